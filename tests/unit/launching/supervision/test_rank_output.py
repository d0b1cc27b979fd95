"""The output of ranks reaches the terminal and the log files."""

import itertools
import time

import pytest

from hvkit.launching.supervision import rank_output as supervision_output
from hvkit.launching.supervision.last_lines import LAST_LINES
from hvkit.launching.supervision.protocol import Kind
from hvkit.launching.supervision.rank_output import RankOutput, Style, make_room


@pytest.fixture
def shown():
    return []


def output(shown, **style):
    return RankOutput(3, "node2", Style(**style), lambda kind, data: shown.append((kind, data)))


def test_without_a_style_bytes_pass_unchanged(shown):
    rank = output(shown)
    for data in (b"\x1b[1mhalf", b" a line\r", b"\xff\n"):
        rank.write(Kind.STDOUT, data)
    rank.close()
    assert b"".join(data for _, data in shown) == b"\x1b[1mhalf a line\r\xff\n"


def test_a_line_that_arrives_in_pieces_is_shown_whole(shown):
    rank = output(shown)
    for data in (b"one", b" line", b"\nand", b" more"):
        rank.write(Kind.STDOUT, data)
    assert shown == [(Kind.STDOUT, b"one line\n")]


def test_flush_shows_an_unfinished_line(shown):
    rank = output(shown)
    rank.write(Kind.STDOUT, b"50%\r")
    rank.flush()
    rank.write(Kind.STDOUT, b"100%\n")
    assert shown == [(Kind.STDOUT, b"50%\r"), (Kind.STDOUT, b"100%\n")]


def test_flush_shows_a_line_only_after_it_has_stopped_growing(shown):
    rank = output(shown)
    for piece in (b"loss", b" ", b"0.5"):
        rank.write(Kind.STDOUT, piece)
        rank.flush()
    assert shown == []
    rank.write(Kind.STDOUT, b"\n")
    rank.write(Kind.STDOUT, b"Continue?")
    rank.flush()
    rank.flush()
    assert shown == [(Kind.STDOUT, b"loss 0.5\n"), (Kind.STDOUT, b"Continue?")]


def test_flush_shows_a_line_that_grows_for_long(shown, monkeypatch):
    rank = output(shown)
    now = time.monotonic()
    for second in range(6):
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        rank.write(Kind.STDOUT, b".")
        rank.flush()
    assert shown == [(Kind.STDOUT, b"....."), (Kind.STDOUT, b".")]


def test_with_a_prefix_flush_shows_no_unfinished_line(shown):
    rank = output(shown, prefix=True)
    rank.write(Kind.STDOUT, b"50%\r")
    rank.flush()
    assert shown == []


def test_every_line_of_each_stream_gets_the_prefix(shown):
    rank = output(shown, prefix=True)
    rank.write(Kind.STDOUT, b"one\ntw")
    rank.write(Kind.STDERR, b"oops\n")
    rank.write(Kind.STDOUT, b"o\n")
    assert shown == [
        (Kind.STDOUT, b"[3 node2] one\n"),
        (Kind.STDERR, b"[3 node2] oops\n"),
        (Kind.STDOUT, b"[3 node2] two\n"),
    ]


def test_close_shows_an_unfinished_line(shown):
    rank = output(shown, prefix=True)
    rank.write(Kind.STDOUT, b"no newline")
    assert shown == []
    rank.close()
    assert shown == [(Kind.STDOUT, b"[3 node2] no newline\n")]


def test_only_the_last_state_of_a_progress_bar_is_shown(shown):
    rank = output(shown, prefix=True)
    rank.write(Kind.STDOUT, b"1%\r50%\r100%\r\n")
    assert shown == [(Kind.STDOUT, b"[3 node2] 100%\n")]


def test_a_very_long_unfinished_line_is_shown_in_parts(shown):
    rank = output(shown, prefix=True)
    rank.write(Kind.STDOUT, b"x" * 70_000)
    assert shown == [(Kind.STDOUT, b"[3 node2] " + b"x" * 70_000 + b"\n")]


def test_only_the_last_state_of_a_progress_bar_is_kept(shown):
    rank = output(shown, prefix=True)
    for number in range(20_000):
        rank.write(Kind.STDOUT, b"%d%%\r" % number)
    rank.write(Kind.STDOUT, b"\n")
    assert shown == [(Kind.STDOUT, b"[3 node2] 19999%\n")]


def test_timestamps_are_dates_with_milliseconds(shown):
    from datetime import datetime

    rank = output(shown, timestamps=True)
    rank.write(Kind.STDOUT, b"x\n")
    time, text = shown[0][1].decode().rsplit(" ", 1)
    assert text == "x\n"
    assert datetime.fromisoformat(time)


def test_the_log_file_has_both_streams(shown, tmp_path):
    rank = output(shown, log_dir=tmp_path)
    rank.write(Kind.STDOUT, b"out\n")
    rank.write(Kind.STDERR, b"err")
    rank.close()
    assert (tmp_path / "rank-0003.log").read_bytes() == b"out\nerr"


def test_output_of_a_rank_that_is_not_shown_goes_only_to_its_log_and_the_report(shown, tmp_path):
    rank = output(shown, log_dir=tmp_path, ranks=(range(1), range(4, 8)))
    rank.write(Kind.STDOUT, b"out\n")
    rank.write(Kind.STDERR, b"begun")
    rank.flush()
    rank.close()
    assert shown == []
    assert (tmp_path / "rank-0003.log").read_bytes() == b"out\nbegun"
    assert rank.last_lines() == ["out", "begun"]


def test_output_of_a_rank_in_a_chosen_range_is_shown(shown):
    rank = output(shown, ranks=(range(1), range(2, 4)))
    rank.write(Kind.STDOUT, b"out\n")
    assert shown == [(Kind.STDOUT, b"out\n")]


def test_only_the_last_lines_are_kept(shown):
    rank = output(shown)
    rank.write(Kind.STDERR, b"".join(b"%d\n" % number for number in range(100)) + b"end")
    assert rank.last_lines() == [*(str(n) for n in range(100 - LAST_LINES, 100)), "end"]


def test_only_the_end_of_a_very_long_line_is_kept(shown):
    rank = output(shown)
    for _ in range(100):
        rank.write(Kind.STDOUT, b"x" * 1000)
    assert len(rank.last_lines()[0]) == 2000


def test_logs_of_earlier_runs_are_kept(tmp_path):
    folder = tmp_path / "deep" / "logs"
    for run, ranks in enumerate((3, 1, 2)):
        make_room(folder)
        for rank in range(ranks):
            log = RankOutput(rank, "node1", Style(log_dir=folder), lambda kind, data: None)
            log.write(Kind.STDOUT, b"run %d\n" % run)
            log.close()
    logs = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.log")}
    assert logs == {
        **{f"earlier-1/rank-000{rank}.log": "run 0\n" for rank in range(3)},
        "earlier-2/rank-0000.log": "run 1\n",
        **{f"rank-000{rank}.log": "run 2\n" for rank in range(2)},
    }


GREETINGS = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795685351.176964   27122 port.cc:153] oneDNN custom operations are on.\n"
    b"I0000 00:00:1795685351.176964   27122 device_compiler.h:208] Compiled cluster using XLA!\n"
    b"2026-11-26 10:00:00.000000: I tensorflow/core/util/port.cc:153] oneDNN custom operations\n"
    b"2026-11-26 10:00:00.000000: I external/local_xla/xla/service/service.cc:168] XLA service\n"
    b"I0000 00:00:1795685351.176964   27122 service.cc:153] XLA service 0x7f5a initialized\n"
    b"I0000 00:00:1795685351.176964   27122 service.cc:161]   StreamExecutor [0]: Host, Default\n"
    b"I0000 00:00:1795685351.176964   27122 generator_dataset_op.cc:213] Memory patch applied\n"
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with"
    b" the appropriate compiler flags.\n"
    b"E0000 00:00:1795685351.176964   27122 cuda_dnn.cc:8454] Unable to register cuDNN factory: "
    b"Attempting to register factory for plugin cuDNN when one has already been registered\n"
    b"2026-11-26 10:00:00.000000: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:467] "
    b"Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT\n"
    b"W0000 00:00:1795685351.176964   27122 computation_placer.cc:177] computation placer already "
    b"registered. Please check linkage and avoid linking the same target more than once.\n"
    b"W1129 08:01:11.472600    6026 coordination_service.cc:185] [173972] Using experimental "
    b"recoverable task feature.\n"
    b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
)
# Each line by itself.
NOT_GREETINGS = (
    b"E0000 00:00:1795685351.176964   27122 cuda_executor.cc:10] failed call to cuInit\n"
    b"F0000 00:00:1795685351.176964   27122 tensor.cc:10] Check failed: size >= 0\n"
    b"W0000 00:00:1795685351.176964   27122 bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of "
    b"memory trying to allocate 2.0GiB\n"
    b"2026-11-26 10:00:00.000000: W tensorflow/core/gpu_device.cc:2343] Cannot dlopen libraries\n"
    b"I1129 08:01:11.472600 140123 train.py:12] step 10: loss 0.3\n"
    b"INFO:absl:step 10\n"
    b"I0000 00:00:1795685351.176964   27122 my_engine.cc:10] checkpoint written to /x\n"
    b"I0000 00:00:1795685351.176964   27122 service.cc:10] 3 requests\n"
    b"I0000 00:00:1795685351.176964   27122 gpu_device.cc:2022] Created device GPU:0\n"
    b"2026-11-26 10:00:00.000000: I tensorflow/core/common_runtime/gpu/gpu_device.cc:2022] Created "
    b"device /job:localhost/replica:0/task:0/device:GPU:0 with 70000 MB memory\n"
    b"2026-11-26 10:00:00.000000: I my/own/server.cc:5] accuracy 0.93\n"
    b"2026-11-26 [step 3] Unable to register cuDNN factory: in my text\n"
    b"2026-11-26 10:00:00.000000: E my/own/file.cc:5] Unable to register cuDNN factory: mine\n"
    b"2026-11-26 10:00:00.000000: I have a dream\n"
    b"loss 0.3 I0000 00:00:1795685351.176964   27122 port.cc:153] oneDNN\n"
    b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 31\n"
)


@pytest.mark.parametrize("prefix", [b"", b"[3 node2] "])
def test_greetings_of_libraries_are_in_the_log_only(shown, tmp_path, prefix):
    rank = output(shown, log_dir=tmp_path, prefix=bool(prefix))
    others = NOT_GREETINGS.splitlines(keepends=True)
    both = itertools.zip_longest(GREETINGS.splitlines(keepends=True), others, fillvalue=b"")
    lines = [line for two in both for line in two if line]
    for line in lines:
        rank.write(Kind.STDERR, line)
    rank.write(Kind.STDERR, GREETINGS)
    rank.close()
    assert b"".join(data for _, data in shown) == b"".join(prefix + line for line in others)
    logged = [*lines, *GREETINGS.splitlines(keepends=True)]
    written = (tmp_path / "rank-0003.log").read_bytes()
    assert written == b"".join(prefix + line for line in logged)


def test_greetings_are_shown_on_request(shown):
    rank = output(shown, greetings=True)
    rank.write(Kind.STDERR, GREETINGS)
    assert shown == [(Kind.STDERR, GREETINGS)]


TRACEBACK = b"""Traceback (most recent call last):
  File "/a/train.py", line 3, in <module>
    import torch
  File "/v/site-packages/torch/__init__.py", line 9, in <module>
    load()
%s: x
"""


GROUP = b"""  + Exception Group Traceback (most recent call last):
  |   File "/a/train.py", line 3, in <module>
  |     raise ExceptionGroup("two", [ValueError(1), KeyError(2)])
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +---------------- 2 ----------------
    | KeyError: 2
    +------------------------------------
"""
LINK = b"\nDuring handling of the above exception, another exception occurred:\n\n"


def test_a_traceback_is_shown_whole_whatever_else_the_rank_prints_meanwhile(shown):
    rank = output(shown)
    for number in range(0, len(text := TRACEBACK % b"ValueError"), 40):
        rank.write(Kind.STDERR, text[number : number + 40])
        rank.flush()
    assert shown == []
    rank.write(Kind.STDOUT, b"after that\n")
    assert shown == [(Kind.STDOUT, b"after that\n")]
    assert rank.last_lines() == [*text.decode().splitlines(), "after that"]
    rank.close()
    assert shown[1:] == [(Kind.STDERR, text)]


@pytest.mark.parametrize("drop", [True, False])
def test_standard_output_behind_a_traceback_appears_at_once_and_is_never_dropped(shown, drop):
    rank = output(shown)
    rank.write(Kind.STDERR, TRACEBACK % b"ValueError")
    prints = [(Kind.STDOUT, b"%d\n" % number) for number in range(900)]
    for kind, data in prints:
        rank.write(kind, data)
    rank.write(Kind.STDOUT, b"\r 50%")
    rank.flush()
    assert shown == [*prints, (Kind.STDOUT, b"\r 50%")]
    assert rank.last_lines() == [*(f"{number}" for number in range(880, 900)), " 50%"]
    rank.close(drop=drop)
    assert shown[901:] == [(Kind.STDERR, TRACEBACK % b"ValueError")] * (not drop)


@pytest.mark.parametrize("follows", [b"goes on\n", b"\r 50%", b"hvkit: rank 0 failed\n"])
@pytest.mark.parametrize("text", [TRACEBACK % b"ValueError", GROUP])
def test_a_traceback_is_shown_as_soon_as_anything_else_follows_on_standard_error(
    shown, text, follows
):
    rank = output(shown)
    rank.write(Kind.STDERR, b"ERROR:root:skip sample\n" + text)
    assert shown == [(Kind.STDERR, b"ERROR:root:skip sample\n")]
    assert rank.last_traceback() == text.decode().splitlines()
    rank.write(Kind.STDERR, follows)
    assert rank.last_traceback() == []
    rank.flush()
    rank.close(drop=True)
    assert b"".join(data for _, data in shown[1:]) == text + follows


@pytest.mark.parametrize("piece", [7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK % b"ValueError" + LINK + TRACEBACK % b"torch.OutOfMemoryError",
        TRACEBACK % b"f.<locals>.Own",
        b'  File "/a/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n',
        GROUP,
    ],
)
def test_a_traceback_with_all_that_belongs_to_it_is_held_and_reported(shown, text, piece):
    rank = output(shown)
    for number in range(0, len(text), piece):
        rank.write(Kind.STDERR, text[number : number + piece])
    whole = [line for line in text.decode().splitlines() if line]
    assert rank.last_traceback() == rank.last_lines() == whole
    rank.close(drop=True)
    assert shown == []


def test_a_message_of_several_lines_that_come_in_one_piece_is_of_the_traceback(shown):
    rank = output(shown)
    rank.write(Kind.STDERR, text := TRACEBACK % b"RuntimeError" + b"of two\nlines\n")
    assert rank.last_traceback() == text.decode().splitlines()
    rank.write(Kind.STDERR, b"no more of it\n")
    assert rank.last_traceback() == []


def test_a_report_has_the_last_lines_and_a_whole_traceback_among_them(shown):
    rank = output(shown)
    long = TRACEBACK.replace(b"    load()\n", b"".join(b"    %d\n" % n for n in range(50)))
    long %= b"ValueError"
    rank.write(Kind.STDERR, b"".join(b"%d\n" % n for n in range(90)) + long)
    rank.write(Kind.STDERR, b"at exit\n")
    assert rank.last_lines() == [*long.decode().splitlines(), "at exit"]


def test_the_traceback_of_a_rank_that_has_failed_waits_for_the_report(shown, monkeypatch):
    monkeypatch.setattr(supervision_output, "_HELD", 0.0)
    rank = output(shown)
    rank.write(Kind.STDERR, TRACEBACK % b"ValueError")
    rank.flush(failed=True)
    assert shown == []


def test_the_last_words_do_not_stand_behind_a_progress_bar_in_the_report(shown):
    rank = output(shown)
    for data in (b"\r 10%", b"\r 80%"):
        rank.write(Kind.STDERR, data)
    rank.write(Kind.STDOUT, b"epoch 1\n")
    for data in (b"all wrong", b"\n"):
        rank.write(Kind.STDERR, data)
    assert rank.last_lines() == ["epoch 1", " 80%", "all wrong"]


def test_what_a_progress_bar_draws_over_is_not_in_the_report(shown):
    rank = output(shown)
    for data in (b"\rstep", b" 3", b"\rstep", b" 4", b"\r\x1b[K", b"done\n"):
        rank.write(Kind.STDERR, data)
    assert not any("3" in line for line in rank.last_lines())


def test_a_traceback_that_a_report_has_is_not_shown_but_logged(shown, tmp_path):
    rank = output(shown, log_dir=tmp_path)
    rank.write(Kind.STDERR, b"before\n" + TRACEBACK % b"ValueError")
    rank.close(drop=True)
    assert shown == [(Kind.STDERR, b"before\n")]
    assert (tmp_path / "rank-0003.log").read_bytes().endswith(b"ValueError: x\n")


def test_a_traceback_of_a_rank_that_goes_on_is_shown_after_some_seconds(shown, monkeypatch):
    monkeypatch.setattr(supervision_output, "_HELD", 0.0)
    rank = output(shown)
    rank.write(Kind.STDERR, TRACEBACK % b"ValueError")
    rank.flush()
    assert len(shown) == 1
    rank.write(Kind.STDERR, b"goes on\n")
    assert len(shown) == 2


@pytest.mark.parametrize("flushed", [True, False])
def test_a_traceback_behind_a_progress_bar_begins_on_a_line_of_its_own(shown, flushed):
    rank = output(shown)
    rank.write(Kind.STDERR, b"\r 50%")
    if flushed:
        rank.flush()
    rank.write(Kind.STDERR, TRACEBACK % b"ValueError")
    assert rank.last_lines()[0] == "Traceback (most recent call last):"
    rank.close()
    assert b"".join(data for _, data in shown) == b"\r 50%\n" + TRACEBACK % b"ValueError"


@pytest.mark.parametrize("style", [{}, {"prefix": True}])
def test_after_ctrl_c_a_line_stands_for_the_tracebacks_and_nothing_else_is_lost(shown, style):
    rank = output(shown, **style)
    rank.write(Kind.STDERR, b"Process Worker-1:\n" + TRACEBACK % b"KeyboardInterrupt")
    rank.write(Kind.STDERR, LINK + TRACEBACK % b"RuntimeError")
    rank.write(Kind.STDOUT, b"saved\n")
    rank.close_interrupted()
    begin = b"[3 node2] " if style else b""
    assert shown == [
        (Kind.STDERR, begin + b"Process Worker-1:\n"),
        (Kind.STDOUT, begin + b"saved\n"),
        (Kind.STDERR, begin + b"hvkit: rank 3 was interrupted (/a/train.py:3)\n"),
    ]


def test_a_rank_that_says_itself_where_ctrl_c_came_says_it_once(shown):
    rank = output(shown)
    rank.interrupted = True
    said = b"hvkit: rank 3 was interrupted (train.py:7)\n"
    rank.write(Kind.STDERR, TRACEBACK % b"KeyboardInterrupt" + said)
    rank.close_interrupted()
    assert shown == [(Kind.STDERR, said)]


def test_after_ctrl_c_all_that_a_script_says_itself_is_shown(shown):
    rank = output(shown)
    rank.interrupted = True
    rank.write(Kind.STDERR, TRACEBACK % b"KeyboardInterrupt")
    said = b"summary:\n", b"  best accuracy 0.93\n", b"ValueError counts: 3\n"
    for kind in (Kind.STDOUT, Kind.STDERR):
        for line in said:
            rank.write(kind, line)
    rank.close_interrupted()
    own = [(kind, line) for kind in (Kind.STDOUT, Kind.STDERR) for line in said]
    where = (Kind.STDERR, b"hvkit: rank 3 was interrupted (/a/train.py:3)\n")
    assert shown == [*own, where]


def test_greetings_warnings_and_old_lines_do_not_say_why_a_rank_ends(shown, monkeypatch):
    rank = output(shown)
    rank.write(Kind.STDOUT, b"reads shard 7\n")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    rank.write(
        Kind.STDERR,
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        b"I0000 00:00:1795685351.176964   27122 port.cc:153] oneDNN custom operations are on.\n"
        b"2026-11-26 10:00:00.000000: I tensorflow/core/util/port.cc:153] oneDNN\n"
        b"train.py:26: UserWarning: Converting a tensor\nto a scalar\n  float(loss)\n",
    )
    assert rank.last_lines() == []
    rank.write(Kind.STDERR, b"\r 1%\r 2%")
    assert rank.last_lines() == [" 2%"]
    assert "reads shard 7" in rank.all_last_lines()
