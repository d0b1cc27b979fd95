"""What ``hvkit top`` reads and shows."""

import asyncio
import os
import socket
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from rich.console import Console

from hvkit.cli import main, top
from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.run_status import RunStatus
from hvkit.launching.supervision.supervisor import Supervisor

REASON = "rank 1 on b was killed by signal 9 (SIGKILL)"


def state(**changes):
    """A run's state, as ``hvkit top`` gets it."""
    now = time.monotonic()
    ranks = [
        {"rank": 0, "host": "a", "ended": False, "speed": 812.0, "call": "", "waits": 0,
         "step": 40, "at": now},
        {"rank": 1, "host": "b", "ended": False, "call": "backward()", "waits": 9.2, "step": 41,
         "where": "train.py:12", "at": now},
        {"rank": 2, "host": "b", "ended": True},
    ]  # fmt: skip
    own = {
        "command": "python x.py",
        "phase": "",
        "size": 3,
        "saved": 30,
        "seconds": 61.0,
        "restarts": 2,
        "reason": REASON,
    }
    return {**own, "ranks": ranks, **changes}


def shown(seen, before=None):
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(top.view(12, seen, {} if before is None else before))
    return console.export_text().splitlines()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "folder", lambda: tmp_path / "hvkit")


def test_the_state_of_a_run_is_read_until_it_ends():
    seen = state()
    with run_status.serve(lambda: seen):
        assert run_status.read(os.getpid()) == seen
    assert list(run_status.folder().iterdir()) == []
    with pytest.raises(HvkitError, match=f"process id {os.getpid()} answers"):
        run_status.read(os.getpid())


def test_the_socket_is_removed_when_an_error_ends_the_run():
    with pytest.raises(SystemExit), run_status.serve(state):
        raise SystemExit
    assert list(run_status.folder().iterdir()) == []


def test_no_thread_outlives_a_run():
    before = threading.active_count()
    with run_status.serve(state):
        run_status.read(os.getpid())
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_begins_is_not_taken_for_a_dead_one(monkeypatch):
    listen = socket.socket.listen

    def looked_for_before(self, *backlog):
        assert run_status.running() == []
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", looked_for_before)
    with run_status.serve(state):
        assert (run_status.folder() / str(os.getpid())).exists()


def test_the_socket_of_another_run_with_the_same_number_stays():
    path = run_status.folder() / str(os.getpid())
    with run_status.serve(state), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_running_runs_are_found():
    with run_status.serve(state):
        assert run_status.running() == [os.getpid()]
    assert run_status.running() == []


def test_an_update_keeps_the_rest_of_the_state():
    status = RunStatus()
    status.update(saved=7, phase="")
    status.update(restarts=1)
    read = status.read()
    assert (read["saved"], read["phase"], read["restarts"]) == (7, "", 1)
    assert read["seconds"] <= status.read()["seconds"]


def test_a_try_that_has_saved_nothing_yet_leaves_the_newest_checkpoint_as_it_was():
    async def look():
        supervisor = Supervisor(2, b"key", Style(), None, lambda: None)
        status = RunStatus()
        status.update(saved=7)
        status.update(**supervisor.state())
        before = status.now.saved
        supervisor.saved = 9
        status.update(**supervisor.state())
        supervisor.writer.close()
        return before, status.now.saved

    assert asyncio.run(look()) == (7, 9)


def test_clients_that_do_not_read_hold_up_nobody():
    large = state(reason="x" * 10_000_000)
    path = str(run_status.folder() / str(os.getpid()))
    with ExitStack() as held:
        with run_status.serve(lambda: large):
            for _ in range(3):
                client = held.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(path)
                assert client.recv(1)  # its answer has begun
            assert run_status.read(os.getpid()) == large
            begun = time.monotonic()
        assert time.monotonic() - begun < run_status._ANSWERS_WITHIN


def test_without_a_folder_for_the_socket_there_is_a_run_without_top(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(run_status, "folder", lambda: tmp_path / "file")
    with run_status.serve(state):
        pass
    assert main(["top"]) == 1


def test_a_run_takes_no_folder_that_others_can_enter():
    run_status.folder().mkdir()
    run_status.folder().chmod(0o777)
    with run_status.serve(state):
        assert list(run_status.folder().iterdir()) == []


def test_a_folder_that_vanishes_is_no_error_of_the_run():
    with run_status.serve(state):
        for each in run_status.folder().iterdir():
            each.unlink()
        run_status.folder().rmdir()


def test_what_a_killed_run_left_is_removed():
    run_status.folder().mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run_status.folder() / "4711"))
    assert run_status.running() == []
    assert list(run_status.folder().iterdir()) == []


def test_text_of_a_rank_commands_no_terminal():
    ranks = [{"rank": 0, "host": "a\x1b[2J", "call": "b\x1b]0;x\x07"}]
    text = "\n".join(shown(state(ranks=ranks, reason="c\x1b[2J")))
    text += "\n".join(shown(state(phase="waits: d\x1b[2J")))
    assert {"a?[2J", "c?[2J", "d?[2J"} <= {*text.split()}
    assert "\x1b" not in text


def test_a_run_that_has_ended_is_an_error():
    with pytest.raises(HvkitError, match="no `hvkit run` of yours with process id 4711"):
        run_status.read(4711)


def test_a_run_of_another_version_is_an_error():
    with (
        run_status.serve(lambda: {"ranks": []}),
        pytest.raises(HvkitError, match="version of hvkit that has started it"),
    ):
        run_status.read(os.getpid())


def test_a_folder_that_others_can_enter_is_refused():
    with run_status.serve(state):
        run_status.folder().chmod(0o755)
        with pytest.raises(HvkitError, match="nobody else can enter"):
            run_status.read(os.getpid())


def test_without_a_run_top_says_so(capsys):
    assert main(["top"]) == 1
    assert "no `hvkit run` of yours is running on this host" in capsys.readouterr().err


def test_the_view_has_a_line_for_each_rank():
    title, reason, _, *lines = shown(state(), {1: (time.monotonic() - 2.0, 31)})
    assert title == (
        "hvkit run 12 (python x.py), begun 1 min 1 s ago: 3 of 3 ranks, 2 restarts, "
        "newest checkpoint: step 30; 812 samples a second"
    )
    assert reason == f"last restart: {REASON}"
    assert lines[0].split() == ["0", "40", "812", "a", "in", "the", "script"]
    assert lines[1].split() == ["1", "41", "5.0", "b", "backward()", "9", "s", "train.py:12"]
    assert lines[2].split() == ["2", "b", "ended"]


def test_one_rank_and_one_restart_are_no_plural():
    title, *_ = shown(state(ranks=[], size=1, restarts=1, saved=None))
    assert title.endswith("0 of 1 rank, 1 restart, newest checkpoint: none")


def test_a_run_that_was_never_restarted_has_no_reason():
    title, heading, *_ = shown(state(restarts=0, reason=""))
    assert " 0 restarts, " in title
    assert heading.startswith("rank  step")


def test_between_two_tries_the_view_says_why_the_ranks_ended_and_what_the_run_waits_for():
    phase = "waits for hosts before restart 3: too few\n  node2: it does not answer"
    before = {1: (time.monotonic(), 31)}
    assert shown(state(phase=phase, ranks=[]), before) == [
        "hvkit run 12 (python x.py), begun 1 min 1 s ago: no ranks, 2 restarts, "
        "newest checkpoint: step 30",
        f"the ranks have ended: {REASON}",
        *phase.split("\n"),
    ]
    assert before == {}  # speeds do not count over a restart


def test_a_rank_that_reports_nothing_more_has_no_speed():
    now = time.monotonic()
    rank = {"rank": 0, "host": "a", "ended": False, "step": 40}
    for at, ended in ((now - 60, False), (now, True)):
        lines = shown(state(ranks=[{**rank, "at": at, "ended": ended}]), {0: (at - 2.0, 30)})
        assert lines[3].split()[:3] == ["0", "40", "a"]


def row(**changes):
    """What ``hvkit top`` shows of a rank, and the run's line above it."""
    now = time.monotonic()
    rank = {"rank": 0, "host": "a", "ended": False, "speed": 812.0, "call": "backward()",
            "waits": 9.2, "step": 40, "at": now, "moved": now}  # fmt: skip
    title, _, _, line = shown(state(ranks=[{**rank, **changes}]), {0: (now - 2.0, 30)})
    return title, line.split()


def test_a_rank_that_is_silent_has_no_speed_and_no_waits():
    assert row()[1] == ["0", "40", "5.0", "812", "a", "backward()", "9", "s"]
    title, line = row(at=time.monotonic() - 9)
    assert line == ["0", "40", "a", "not", "answering", "for", "9", "s"]
    assert "samples a second" not in title


def test_a_rank_that_makes_no_steps_has_no_samples_a_second():
    title, line = row(moved=time.monotonic() - 11)
    assert "812" not in line
    assert "samples a second" not in title
    assert line[-3:] == ["backward()", "9", "s"]


def test_a_rank_that_has_ended_waits_for_nothing():
    assert row(ended=True)[1] == ["0", "40", "a", "ended"]


def named(monkeypatch, **runs):
    """Has ``hvkit top`` find runs with these states, the newest first."""
    states = {int(each.removeprefix("run")): seen for each, seen in runs.items()}
    monkeypatch.setattr(run_status, "running", lambda: [*states])
    monkeypatch.setattr(top.time, "sleep", lambda seconds: None)

    def read(process):
        if states[process] is None:
            raise HvkitError(f"process {process} is another version's")
        return states[process]

    monkeypatch.setattr(run_status, "read", read)


def test_top_shows_the_newest_run_and_names_the_others(monkeypatch, capsys):
    idle = state(phase="checks the hosts", reason="", ranks=[])
    named(monkeypatch, run14=idle, run13=idle, run12=idle)
    assert main(["top", "--once"]) == 0
    *others, title, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("hvkit run 14 (python x.py), ")
    assert others == [f"another run: {each} (python x.py)" for each in (13, 12)]


def test_top_skips_and_names_a_run_that_it_cannot_read(monkeypatch, capsys):
    idle = state(phase="checks the hosts", reason="", ranks=[])
    named(monkeypatch, run14=None, run13=idle, run12=idle)
    assert main(["top", "--once"]) == 0
    skipped, others, title, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("hvkit run 13 (python x.py), ")
    assert skipped == "skipped 14: process 14 is another version's"
    assert others == "another run: 12 (python x.py)"


def test_the_live_view_names_the_other_runs_too(monkeypatch, capsys):
    named(monkeypatch, run14=state(), run13=state())
    looks = iter([None, None])

    def sleep(seconds):
        if next(looks, 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top"]) == 0
    assert "another run: 13 (python x.py)" in capsys.readouterr().out


def test_top_says_why_it_can_read_no_run(monkeypatch, capsys):
    named(monkeypatch, run14=None, run13=None)
    assert main(["top"]) == 1
    assert "process 14 is another version's" in capsys.readouterr().err


def states(monkeypatch, *them):
    """Has ``hvkit top`` see these states, one a look, and then no run."""
    left = [state(**each) for each in them]

    def read(process):
        if not left:
            raise HvkitError("no run")
        return left.pop(0)

    monkeypatch.setattr(run_status, "read", read)
    monkeypatch.setattr(top.time, "sleep", lambda seconds: None)


def one_rank(step, at):
    return [{"rank": 0, "host": "a", "ended": False, "step": step, "at": at}]


@pytest.mark.parametrize("words", [["--once"], []], ids=["once", "into-a-pipe"])
def test_one_view_has_speeds(monkeypatch, capsys, words):
    now = time.monotonic()
    looks = [{"ranks": one_rank(10, now - 2)}, {"ranks": one_rank(30, now)}]
    states(monkeypatch, *looks)
    assert main(["top", *words, "12"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:3] == ["0", "30", "10.0"]


def test_one_view_of_a_run_that_ends_meanwhile_is_the_one_before(monkeypatch, capsys):
    states(monkeypatch, {"ranks": one_rank(10, time.monotonic())})
    assert main(["top", "--once", "12"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:2] == ["0", "10"]


def test_one_view_can_be_printed_of_a_run_without_ranks(capsys):
    with run_status.serve(RunStatus().read):
        assert main(["top", "--once"]) == 0
    title, phase = capsys.readouterr().out.splitlines()
    assert title.startswith(f"hvkit run {os.getpid()}, begun 0 s ago: no ranks, 0 restarts")
    assert phase == "checks the hosts"


def test_the_live_view_goes_on_over_a_restart_and_ends_with_the_run(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    running, between = {}, {"phase": "begins restart 3", "ranks": []}
    states(monkeypatch, between, running, between, running)
    seen = []
    view = top.view
    monkeypatch.setattr(top, "view", lambda *args: (seen.append(args[1]["phase"]), view(*args))[1])
    assert main(["top", "12"]) == 0
    assert seen == ["begins restart 3", "", "begins restart 3", ""]
    assert capsys.readouterr().out.splitlines()[-1].endswith("12\x1b[0m has ended")


def test_ctrl_c_ends_the_live_view_quietly(monkeypatch, capsys):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top.time, "sleep", interrupt)
    with run_status.serve(state):
        assert main(["top"]) == 0
    assert capsys.readouterr().err == ""
