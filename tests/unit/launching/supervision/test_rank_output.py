"""The output of ranks reaches the terminal and the log files."""

import itertools
import time
from datetime import datetime

import pytest

from hvkit.launching.supervision import rank_output
from hvkit.launching.supervision.protocol import Frame
from hvkit.launching.supervision.rank_output import LAST_LINES, RankOutput, Style, make_room

OUT, ERR = Frame.STDOUT, Frame.STDERR


@pytest.fixture
def shown():
    return []


def output(shown, **style):
    return RankOutput(3, "node2", Style(**style), lambda kind, data: shown.append((kind, data)))


def output_of(shown, *pieces, kind=ERR, **style):
    """The output of a rank that has written these."""
    rank = output(shown, **style)
    for piece in pieces:
        rank.write(kind, piece)
    return rank


def in_pieces(text, length):
    return [text[start : start + length] for start in range(0, len(text), length)]


def test_without_a_style_bytes_pass_unchanged(shown):
    output_of(shown, b"\x1b[1mhalf", b" a line\r", b"\xff\n", kind=OUT).close()
    assert b"".join(data for _, data in shown) == b"\x1b[1mhalf a line\r\xff\n"


@pytest.mark.parametrize(
    ("style", "pieces", "expected"),
    [
        ({}, [b"one", b" line", b"\nand", b" more"], b"one line\n"),
        ({"prefix": True}, [b"1%\r50%\r100%\r\n"], b"[3 node2] 100%\n"),
        ({"prefix": True}, [b"%d\r" % n for n in range(20_000)] + [b"\n"], b"[3 node2] 19999\n"),
        ({"prefix": True}, [b"x" * 70_000], b"[3 node2] " + b"x" * 70_000 + b"\n"),
        ({"ranks": (range(1), range(2, 4))}, [b"out\n"], b"out\n"),
    ],
    ids=["pieces", "progress bar", "long progress bar", "long unfinished line", "chosen rank"],
)
def test_lines_are_shown_whole_and_progress_bars_in_their_last_state(
    shown, style, pieces, expected
):
    output_of(shown, *pieces, kind=OUT, **style)
    assert shown == [(OUT, expected)]


def test_flush_shows_a_progress_bar_and_another_line_after_it_has_stopped_growing(shown):
    rank = output(shown)
    for piece in (b"loss", b" ", b"0.5"):
        rank.write(OUT, piece)
        rank.flush()
    assert shown == []
    rank.write(OUT, b"\n50%\r")
    rank.flush()
    rank.write(OUT, b"100%\n")
    rank.write(OUT, b"Continue?")
    rank.flush()
    rank.flush()
    assert [data for _, data in shown] == [b"loss 0.5\n", b"50%\r", b"100%\n", b"Continue?"]


def test_flush_shows_a_line_that_grows_for_long(shown, monkeypatch):
    rank = output(shown)
    now = time.monotonic()
    for second in range(6):
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        rank.write(OUT, b".")
        rank.flush()
    assert shown == [(OUT, b"....."), (OUT, b".")]


def test_every_line_of_each_stream_gets_the_prefix_and_is_shown_when_it_ends(shown):
    rank = output_of(shown, b"one\ntw", kind=OUT, prefix=True)
    rank.write(ERR, b"oops\n")
    rank.write(OUT, b"o\n50%\r")
    rank.flush()
    whole = [(OUT, b"one\n"), (ERR, b"oops\n"), (OUT, b"two\n")]
    assert shown == [(kind, b"[3 node2] " + line) for kind, line in whole]
    rank.close()
    assert shown[3:] == [(OUT, b"[3 node2] 50%\n")]


def test_timestamps_are_dates_with_milliseconds(shown):
    output_of(shown, b"x\n", timestamps=True)
    moment, text = shown[0][1].decode().rsplit(" ", 1)
    assert text == "x\n"
    assert datetime.fromisoformat(moment)


def test_output_of_a_rank_that_is_not_shown_goes_only_to_its_log_and_the_report(shown, tmp_path):
    rank = output_of(shown, b"out\n", kind=OUT, log_dir=tmp_path, ranks=(range(1), range(4, 8)))
    rank.write(ERR, b"begun")
    rank.flush()
    rank.close()
    assert shown == []
    assert (tmp_path / "rank-0003.log").read_bytes() == b"out\nbegun"
    assert rank.last_lines() == ["out", "begun"]


def test_only_the_last_lines_and_the_end_of_a_very_long_one_are_kept(shown):
    rank = output_of(shown, b"".join(b"%d\n" % number for number in range(100)) + b"end")
    assert rank.last_lines() == [*(str(n) for n in range(100 - LAST_LINES, 100)), "end"]
    assert len(output_of(shown, *[b"x" * 1000] * 100).last_lines()[0]) == 2000


def test_logs_of_earlier_runs_are_kept(tmp_path):
    folder = tmp_path / "deep" / "logs"
    for run, ranks in enumerate((3, 1, 2)):
        make_room(folder)
        for rank in range(ranks):
            log = RankOutput(rank, "node1", Style(log_dir=folder), lambda kind, data: None)
            log.write(OUT, b"run %d\n" % run)
            log.close()
    logs = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.log")}
    assert logs == {
        **{f"earlier-1/rank-000{rank}.log": "run 0\n" for rank in range(3)},
        "earlier-2/rank-0000.log": "run 1\n",
        **{f"rank-000{rank}.log": "run 2\n" for rank in range(2)},
    }


# How lines of C++ begin, of level INFO; new and old.
INFO, OLD = b"I0000 00:00:1795685351.176964   27122 ", b"2026-11-26 10:00:00.000000: "
WARNS, FAILS = b"W" + INFO[1:], b"E" + INFO[1:]
PLUGIN = b"Attempting to register factory for plugin cuDNN when one has already been registered"
PEERS = b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : "
GREETINGS = [
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
    INFO + b"port.cc:153] oneDNN custom operations are on.\n",
    OLD + b"I tensorflow/core/util/port.cc:153] oneDNN custom operations\n",
    INFO + b"device_compiler.h:208] Compiled cluster using XLA!\n",
    OLD + b"I external/local_xla/xla/service/service.cc:168] XLA service\n",
    INFO + b"service.cc:153] XLA service 0x7f5a initialized\n",
    INFO + b"service.cc:161]   StreamExecutor [0]: Host, Default\n",
    INFO + b"generator_dataset_op.cc:213] Memory patch applied\n",
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with"
    b" the appropriate compiler flags.\n",
    FAILS + b"cuda_dnn.cc:8454] Unable to register cuDNN factory: " + PLUGIN + b"\n",
    OLD + b"E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:467] Unable to register cuFFT"
    b" factory: " + PLUGIN + b"\n",
    WARNS + b"computation_placer.cc:177] computation placer already registered. Please check.\n",
    b"W1129 08:01:11.472600    6026 coordination_service.cc:185] [173972] Using experimental "
    b"recoverable task feature.\n",
    PEERS + b"3\n",
]
NOT_GREETINGS = [
    FAILS + b"cuda_executor.cc:10] failed call to cuInit\n",
    b"F" + INFO[1:] + b"tensor.cc:10] Check failed: size >= 0\n",
    WARNS + b"bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory\n",
    OLD + b"W tensorflow/core/gpu_device.cc:2343] Cannot dlopen libraries\n",
    b"I1129 08:01:11.472600 140123 train.py:12] step 10: loss 0.3\n",
    b"INFO:absl:step 10\n",
    INFO + b"my_engine.cc:10] checkpoint written to /x\n",
    INFO + b"service.cc:10] 3 requests\n",
    INFO + b"gpu_device.cc:2022] Created device GPU:0\n",
    OLD + b"I tensorflow/core/common_runtime/gpu/gpu_device.cc:2022] Created device GPU:0\n",
    OLD + b"I my/own/server.cc:5] accuracy 0.93\n",
    b"2026-11-26 [step 3] Unable to register cuDNN factory: in my text\n",
    OLD + b"E my/own/file.cc:5] Unable to register cuDNN factory: mine\n",
    OLD + b"I have a dream\n",
    b"loss 0.3 " + INFO + b"port.cc:153] oneDNN\n",
    PEERS + b"31\n",
]


@pytest.mark.parametrize("prefix", [b"", b"[3 node2] "])
def test_greetings_of_libraries_are_in_the_log_only(shown, tmp_path, prefix):
    both = itertools.zip_longest(GREETINGS, NOT_GREETINGS, fillvalue=b"")
    lines = [line for two in both for line in two if line]
    output_of(shown, *lines, b"".join(GREETINGS), log_dir=tmp_path, prefix=bool(prefix)).close()
    assert [data for _, data in shown] == [prefix + line for line in NOT_GREETINGS]
    logged = (tmp_path / "rank-0003.log").read_bytes()
    assert logged == b"".join(prefix + line for line in [*lines, *GREETINGS])


def test_greetings_are_shown_on_request(shown):
    output_of(shown, b"".join(GREETINGS), greetings=True)
    assert shown == [(ERR, b"".join(GREETINGS))]


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


VALUE_ERROR = TRACEBACK % b"ValueError"


def test_a_traceback_is_shown_whole_whatever_else_the_rank_prints_meanwhile(shown):
    rank = output(shown)
    for piece in in_pieces(VALUE_ERROR, 40):
        rank.write(ERR, piece)
        rank.flush()
    assert shown == []
    rank.write(OUT, b"after that\n")
    assert shown == [(OUT, b"after that\n")]
    assert rank.last_lines() == [*VALUE_ERROR.decode().splitlines(), "after that"]
    rank.close()
    assert shown[1:] == [(ERR, VALUE_ERROR)]


@pytest.mark.parametrize("drop", [True, False])
def test_standard_output_behind_a_traceback_appears_at_once_and_is_never_dropped(shown, drop):
    rank = output_of(shown, VALUE_ERROR)
    prints = [b"%d\n" % number for number in range(900)] + [b"\r 50%"]
    for data in prints:
        rank.write(OUT, data)
    rank.flush()
    assert shown == [(OUT, data) for data in prints]
    assert rank.last_lines() == [*(f"{number}" for number in range(880, 900)), " 50%"]
    rank.close(drop=drop)
    assert shown[901:] == [(ERR, VALUE_ERROR)] * (not drop)


@pytest.mark.parametrize("follows", [b"goes on\n", b"\r 50%", b"hvkit: rank 0 failed\n"])
@pytest.mark.parametrize("text", [VALUE_ERROR, GROUP])
def test_a_traceback_is_shown_as_soon_as_anything_else_follows_on_standard_error(
    shown, text, follows
):
    rank = output_of(shown, b"ERROR:root:skip sample\n" + text)
    assert shown == [(ERR, b"ERROR:root:skip sample\n")]
    assert rank.last_traceback() == text.decode().splitlines()
    rank.write(ERR, follows)
    assert rank.last_traceback() == []
    rank.flush()
    rank.close(drop=True)
    assert b"".join(data for _, data in shown[1:]) == text + follows


@pytest.mark.parametrize("piece", [7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        VALUE_ERROR + LINK + TRACEBACK % b"torch.OutOfMemoryError",
        TRACEBACK % b"f.<locals>.Own",
        b'  File "/a/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n',
        GROUP,
    ],
)
def test_a_traceback_with_all_that_belongs_to_it_is_held_and_reported(shown, text, piece):
    rank = output_of(shown, *in_pieces(text, piece))
    whole = [line for line in text.decode().splitlines() if line]
    assert rank.last_traceback() == rank.last_lines() == whole
    rank.close(drop=True)
    assert shown == []


def test_a_message_of_several_lines_that_come_in_one_piece_is_of_the_traceback(shown):
    text = TRACEBACK % b"RuntimeError" + b"of two\nlines\n"
    rank = output_of(shown, text)
    assert rank.last_traceback() == text.decode().splitlines()
    rank.write(ERR, b"no more of it\n")
    assert rank.last_traceback() == []


def test_a_report_has_the_last_lines_and_a_whole_traceback_among_them(shown):
    long = VALUE_ERROR.replace(b"    load()\n", b"".join(b"    %d\n" % n for n in range(50)))
    rank = output_of(shown, b"".join(b"%d\n" % n for n in range(90)) + long, b"at exit\n")
    assert rank.last_lines() == [*long.decode().splitlines(), "at exit"]


@pytest.mark.parametrize("failed", [True, False])
def test_a_traceback_is_shown_after_some_seconds_unless_the_rank_has_failed(
    shown, monkeypatch, failed
):
    monkeypatch.setattr(rank_output, "_HELD", 0.0)
    rank = output_of(shown, VALUE_ERROR)
    rank.flush(failed=failed)
    rank.write(OUT, b"goes on\n")
    assert shown == [(ERR, VALUE_ERROR)] * (not failed) + [(OUT, b"goes on\n")]


def test_a_traceback_that_a_report_has_is_not_shown_but_logged(shown, tmp_path):
    output_of(shown, b"before\n" + VALUE_ERROR, log_dir=tmp_path).close(drop=True)
    assert shown == [(ERR, b"before\n")]
    assert (tmp_path / "rank-0003.log").read_bytes() == b"before\n" + VALUE_ERROR


@pytest.mark.parametrize("flushed", [True, False])
def test_a_traceback_behind_a_progress_bar_begins_on_a_line_of_its_own(shown, flushed):
    rank = output_of(shown, b"\r 50%")
    if flushed:
        rank.flush()
    rank.write(ERR, VALUE_ERROR)
    assert rank.last_lines()[0] == "Traceback (most recent call last):"
    rank.close()
    assert b"".join(data for _, data in shown) == b"\r 50%\n" + VALUE_ERROR


def test_the_last_words_do_not_stand_behind_a_progress_bar_in_the_report(shown):
    rank = output_of(shown, b"\r 10%", b"\r 80%")
    rank.write(OUT, b"epoch 1\n")
    for data in (b"all wrong", b"\n"):
        rank.write(ERR, data)
    assert rank.last_lines() == ["epoch 1", " 80%", "all wrong"]


def test_overwritten_text_of_a_progress_bar_is_not_in_the_report(shown):
    rank = output_of(shown, b"\rstep", b" 3", b"\rstep", b" 4", b"\r\x1b[K", b"done\n")
    assert not any("3" in line for line in rank.last_lines())


def test_greetings_warnings_and_old_lines_do_not_say_why_a_rank_ends(shown, monkeypatch):
    rank = output_of(shown, b"reads shard 7\n", kind=OUT)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    warning = b"train.py:26: UserWarning: Converting a tensor\nto a scalar\n  float(loss)\n"
    rank.write(ERR, b"".join(GREETINGS[:3]) + warning + b"<string>:3: UserWarning: no code\n")
    assert rank.last_lines() == []
    rank.write(ERR, b"\r 1%\r 2%")
    assert rank.last_lines() == [" 2%"]
    assert "reads shard 7" in rank.all_last_lines()


@pytest.mark.parametrize("style", [{}, {"prefix": True}])
def test_after_ctrl_c_a_line_stands_for_the_tracebacks_and_nothing_else_is_lost(shown, style):
    interrupted = b"Process Worker-1:\n" + TRACEBACK % b"KeyboardInterrupt"
    rank = output_of(shown, interrupted, LINK + TRACEBACK % b"RuntimeError", **style)
    rank.write(OUT, b"saved\n")
    rank.interrupted = True
    rank.close()
    begin = b"[3 node2] " if style else b""
    assert shown == [
        (ERR, begin + b"Process Worker-1:\n"),
        (OUT, begin + b"saved\n"),
        (ERR, begin + b"hvkit: rank 3 was interrupted (/a/train.py:3)\n"),
    ]


def test_a_rank_that_says_itself_where_ctrl_c_came_says_it_once(shown):
    rank = output(shown)
    rank.interrupted = True
    said = b"hvkit: rank 3 was interrupted (train.py:7)\n"
    rank.write(ERR, TRACEBACK % b"KeyboardInterrupt" + said)
    rank.interrupted = True
    rank.close()
    assert shown == [(ERR, said)]


def test_after_ctrl_c_all_that_a_script_says_itself_is_shown(shown):
    rank = output_of(shown, TRACEBACK % b"KeyboardInterrupt")
    rank.interrupted = True
    lines = b"summary:\n", b"  best accuracy 0.93\n", b"ValueError counts: 3\n"
    said = list(itertools.product((OUT, ERR), lines))
    for each in said:
        rank.write(*each)
    rank.interrupted = True
    rank.close()
    assert shown == [*said, (ERR, b"hvkit: rank 3 was interrupted (/a/train.py:3)\n")]
