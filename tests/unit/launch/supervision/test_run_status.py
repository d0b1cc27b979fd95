"""What ``hvkit top`` reads and shows."""

import asyncio
import os
import socket

import pytest
from rich.console import Console

from hvkit.cli import main, top
from hvkit.errors import HvkitError
from hvkit.launch.supervision import run_status

RANKS = [
    {"rank": 0, "host": "a", "ended": False, "speed": 812.0, "call": "", "waits": 0, "step": 40},
    {"rank": 1, "host": "b", "ended": False, "call": "backward()", "waits": 9.2, "step": 41,
     "where": "train.py:12"},
    {"rank": 2, "host": "b", "ended": True},
]  # fmt: skip
STATE = {"size": 3, "saved": 30, "seconds": 61.0, "restarts": 2, "ranks": RANKS}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "folder", lambda: tmp_path / "hvkit")


def served(look):
    """The result of a function that runs while this process serves ``STATE``."""

    async def both():
        serving = asyncio.create_task(run_status.serve(lambda: STATE))
        while not (run_status.folder() / str(os.getpid())).exists():
            await asyncio.sleep(0.01)
        result = await asyncio.to_thread(look)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return result

    return asyncio.run(both())


def test_the_state_of_a_run_is_read():
    assert served(lambda: run_status.read(os.getpid())) == STATE
    assert list(run_status.folder().iterdir()) == []


def test_running_runs_are_found():
    assert served(run_status.running) == [os.getpid()]
    assert run_status.running() == []


def test_a_client_that_does_not_read_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(run_status, "_ANSWERS_WITHIN", 0.2)
    large = {"ranks": ["x" * 1000] * 10_000}

    async def serve_one():
        serving = asyncio.create_task(run_status.serve(lambda: large))
        path = run_status.folder() / str(os.getpid())
        while not path.exists():
            await asyncio.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as client:
            await asyncio.to_thread(client.connect, str(path))
            await asyncio.sleep(0.05)
            serving.cancel()
            async with asyncio.timeout(10):
                await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(serve_one(), 20))


def test_what_a_killed_run_left_is_removed():
    run_status.folder().mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run_status.folder() / "4711"))
    assert run_status.running() == []
    assert list(run_status.folder().iterdir()) == []


def test_text_of_a_rank_commands_no_terminal():
    ranks = [{"rank": 0, "host": "a\x1b[2J", "call": "b\x1b]0;x\x07"}]
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(top.view(12, STATE | {"ranks": ranks}, {}))
    text = console.export_text()
    assert "a?[2J" in text
    assert "\x1b" not in text


def test_a_run_that_has_ended_is_an_error():
    with pytest.raises(HvkitError, match="no `hvkit run` of yours with process id 4711"):
        run_status.read(4711)


def test_a_folder_that_others_can_enter_is_refused():
    served(run_status.running)
    run_status.folder().chmod(0o755)
    with pytest.raises(HvkitError, match="nobody else can enter"):
        run_status.read(os.getpid())


def test_without_a_run_top_says_so(capsys):
    assert main(["top"]) == 1
    assert "no `hvkit run` of yours is running on this host" in capsys.readouterr().err


def test_the_view_has_a_line_for_each_rank(capsys):
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115
    before = {1: (top.time.monotonic() - 2.0, 31)}
    console.print(top.view(12, STATE, before))
    lines = console.export_text().splitlines()
    assert lines[0].startswith(
        "hvkit run 12: 3 of 3 ranks, 61 s, 2 restarts, newest checkpoint: step 30; 812 samples"
    )
    assert lines[2].split() == ["0", "40", "812", "a", "in", "the", "script"]
    assert lines[3].split() == ["1", "41", "5.0", "b", "backward()", "9", "s", "train.py:12"]
    assert lines[4].split() == ["2", "b", "ended"]


def test_one_view_can_be_printed(capsys):
    assert served(lambda: main(["top", "--once"])) == 0
    assert "backward()" in capsys.readouterr().out
