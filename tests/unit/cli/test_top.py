"""``hvkit top``: what it shows of runs, and which one."""

import os
import sys
import time

import pytest
from rich.console import Console

from hvkit.cli import main, top
from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.run_status import RunStatus

NOW = time.monotonic() - 60.0
REASON = "rank 1 on b was killed by signal 9 (SIGKILL)"


def state(**changes):
    """A run's state, as ``hvkit top`` gets it; read long ago, as under load."""
    now = NOW
    ranks = [
        {"rank": 0, "host": "a", "ended": False, "speed": 812.0, "call": "", "waits": 0,
         "step": 40, "at": now},
        {"rank": 1, "host": "b", "ended": False, "call": "backward()", "waits": 9.2, "step": 41,
         "where": "train.py:12", "at": now},
        {"rank": 2, "host": "b", "ended": True},
    ]  # fmt: skip
    own = {"command": "python x.py", "phase": "", "size": 3, "saved": 30, "seconds": 61.0}
    return {**own, "restarts": 2, "reason": REASON, "ranks": ranks, "read_at": now, **changes}


IDLE = state(phase="checks the hosts", reason="", ranks=[])


def shown(seen, before=None):
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(top.view(12, seen, {} if before is None else before))
    return console.export_text().splitlines()


def test_the_view_has_a_line_for_each_rank():
    title, reason, _, *lines = shown(state(), {1: (NOW - 2.0, 31)})
    assert title == (
        "hvkit run 12 (python x.py), begun 1 min 1 s ago: 3 of 3 ranks, 2 restarts, "
        "newest checkpoint: step 30; 812 samples a second"
    )
    assert reason == f"last restart: {REASON}"
    assert lines[0].split() == ["0", "40", "812", "a", "in", "the", "script"]
    assert lines[1].split() == ["1", "41", "5.0", "b", "backward()", "9", "s", "train.py:12"]
    assert lines[2].split() == ["2", "b", "ended"]


def test_one_rank_and_one_restart_are_no_plural_and_without_a_reason_there_is_no_line():
    title, heading, *_ = shown(state(ranks=[], size=1, restarts=1, saved=None, reason=""))
    assert title.endswith("0 of 1 rank, 1 restart, newest checkpoint: none")
    assert heading.startswith("rank  step")


def test_between_two_tries_the_view_says_why_the_ranks_ended_and_what_the_run_waits_for():
    phase = "waits for hosts before restart 3: too few\n  node2: it does not answer"
    before = {1: (NOW, 31)}
    assert shown(state(phase=phase, ranks=[]), before) == [
        "hvkit run 12 (python x.py), begun 1 min 1 s ago: no ranks, 2 restarts, "
        "newest checkpoint: step 30",
        f"the ranks have ended: {REASON}",
        *phase.split("\n"),
    ]
    assert before == {}  # speeds do not count over a restart


def test_text_of_a_rank_commands_no_terminal():
    ranks = [{"rank": 0, "host": "a\x1b[2J", "call": "b\x1b]0;x\x07"}]
    text = "\n".join(shown(state(ranks=ranks, reason="c\x1b[2J")))
    text += "\n".join(shown(state(phase="waits: d\x1b[2J")))
    assert {"a?[2J", "c?[2J", "d?[2J"} <= {*text.split()}
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("ago", "changes", "line", "speed"),
    [
        (0, {}, "0 40 5.0 812 a backward() 9 s", True),
        (9, {}, "0 40 a not answering for 9 s", False),
        (0, {"moved": -11}, "0 40 5.0 a backward() 9 s", False),  # it makes no steps
        (0, {"ended": True}, "0 40 a ended", False),
    ],
)
def test_only_a_rank_that_makes_steps_and_reports_them_has_a_speed(ago, changes, line, speed):
    at = NOW - ago
    rank = {"rank": 0, "host": "a", "ended": False, "speed": 812.0, "call": "backward()",
            "waits": 9.2, "step": 40, "at": at, **changes}  # fmt: skip
    rank["moved"] = at + changes.get("moved", 0)
    title, _, _, found = shown(state(ranks=[rank]), {0: (at - 2.0, 30)})
    assert " ".join(found.split()) == line
    assert title.endswith("samples a second") == speed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of this user's sockets; no pauses."""
    monkeypatch.setattr(run_status, "folder", lambda: tmp_path / "hvkit")
    monkeypatch.setattr(top.time, "sleep", lambda seconds: None)
    return tmp_path / "hvkit"


@pytest.fixture
def runs(folder, monkeypatch):
    """What is read of each run, look by look; the newest run first. None: it cannot be read."""
    runs = {}

    def read(process):
        if not runs[process] or runs[process][0] is None:
            raise HvkitError(f"process {process} is another version's")
        return runs[process].pop(0)

    monkeypatch.setattr(run_status, "running", lambda: [*runs])
    monkeypatch.setattr(run_status, "read", read)
    return runs


def test_without_a_run_top_says_so(folder, capsys):
    assert main(["top"]) == 1
    assert "no `hvkit run` of yours is running on this host" in capsys.readouterr().err
    folder.touch()
    assert main(["top"]) == 1


def test_top_shows_the_newest_run_that_it_can_read_and_names_the_others(runs, capsys):
    runs.update({14: [None], 13: [IDLE] * 2, 12: [IDLE], 11: [IDLE]})
    assert main(["top", "--once"]) == 0
    skipped, *others, title, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("hvkit run 13 (python x.py), ")
    assert skipped == "skipped 14: process 14 is another version's"
    assert others == [f"another run: {each} (python x.py)" for each in (12, 11)]


def test_top_says_why_it_can_read_no_run(runs, capsys):
    runs.update({14: [None], 13: [None]})
    assert main(["top"]) == 1
    assert "process 14 is another version's" in capsys.readouterr().err


def one_rank(step, at):
    rank = {"rank": 0, "host": "a", "ended": False, "step": step, "at": at}
    return state(ranks=[rank], read_at=at)


@pytest.mark.parametrize("words", [["--once"], []], ids=["once", "into-a-pipe"])
def test_one_view_has_speeds(runs, capsys, words):
    runs[12] = [one_rank(10, NOW), one_rank(30, NOW + 2)]
    assert main(["top", *words, "12"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:3] == ["0", "30", "10.0"]


def test_one_view_of_a_run_that_ends_meanwhile_is_the_one_before(runs, capsys):
    runs[12] = [one_rank(10, NOW)]
    assert main(["top", "--once", "12"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[:2] == ["0", "10"]


def test_one_view_can_be_printed_of_a_run_without_ranks(folder, capsys):
    with run_status.serve(RunStatus().read):
        assert main(["top", "--once"]) == 0
    title, phase = capsys.readouterr().out.splitlines()
    assert title.startswith(f"hvkit run {os.getpid()}, begun 0 s ago: no ranks, 0 restarts")
    assert phase == "checks the hosts"


def test_the_live_view_goes_on_over_a_restart_and_ends_with_the_run(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    between = state(phase="begins restart 3", ranks=[])
    runs.update({12: [IDLE, between, state(), between, state()], 11: [IDLE]})
    seen = []
    view = top.view
    monkeypatch.setattr(top, "view", lambda *args: (seen.append(args[1]["phase"]), view(*args))[1])
    assert main(["top"]) == 0
    assert seen == ["begins restart 3", "", "begins restart 3", ""]
    printed = capsys.readouterr().out
    assert "another run: 11 (python x.py)" in printed
    assert printed.splitlines()[-1].endswith("12\x1b[0m has ended")


def test_ctrl_c_ends_the_live_view_quietly(runs, monkeypatch, capsys):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top.time, "sleep", interrupt)
    runs[12] = [state()]
    assert main(["top", "12"]) == 0
    assert capsys.readouterr().err == ""
