"""A function reaches ranks of another host, and their results return, through the agents."""

import os
import socket
import subprocess
import sys
import time

import pytest
from supervised import LAUNCHER

from hvkit.functions.outcomes import error_in, results_in
from hvkit.functions.pickling import write_call
from hvkit.host.call_folder import call_in, outcome_in
from hvkit.launching.supervision.protocol import Connection, ConnectionLost, Kind, frame, sealing

# The supervisor takes itself for another host than that of its agents.
RUN = """
import os, socket, sys
from pathlib import Path
from hvkit.launching.supervision.supervised_run import SupervisedRun, supervise
socket.gethostname = lambda: "elsewhere"
agent = [sys.executable, "-m", "hvkit.launching.supervision.agent"]
launcher, size, *command = sys.argv[1:]
command = [sys.executable, "-c", launcher, size, *agent, *command]
run = SupervisedRun(command, dict(os.environ), "The launcher", int(size), ("127.0.0.1",), None, 10,
                    bind=False, call=Path(os.environ["FOLDER"]))
sys.exit(supervise(run).status)
"""


def called(function, argument, folder, temporary):
    """Call it on two ranks; the process of the supervisor."""
    with call_in(folder).open("wb") as file:
        write_call(file, function, [argument], {})
    rank = [sys.executable, "-P", "-m", "hvkit.functions.rank"]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, LAUNCHER, "2", *rank],
        env=os.environ | {"FOLDER": str(folder), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_call_and_its_results_travel_in_pieces_and_leave_no_folder(tmp_path):
    folder, temporary = tmp_path / "call", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()

    def doubled(data):
        assert os.environ["HVKIT_CALL"].startswith(str(temporary))
        assert os.stat(os.environ["HVKIT_CALL"]).st_mode & 0o777 == 0o700
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        return data * 2, rank

    data = os.urandom(3_000_000)  # more than the window and any frame
    run = called(doubled, data, folder, temporary)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    outcomes = [outcome_in(folder, rank) for rank in (0, 1)]
    assert results_in(outcomes) == [(data * 2, 0), (data * 2, 1)]
    assert list(temporary.iterdir()) == []


def test_an_exception_travels_too_and_a_killed_agent_leaves_no_folder(tmp_path):
    folder, temporary = tmp_path / "call", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()

    def fails(mark):
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            mark.touch()
            raise FileNotFoundError(2, "No such file", "weights.pt")
        while not mark.exists():
            time.sleep(0.01)
        os.kill(os.getppid(), 9)  # the agent

    run = called(fails, tmp_path / "raised", folder, temporary)
    _, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    with outcome_in(folder, 1).open("rb") as file:
        error = error_in(file)
    assert type(error) is FileNotFoundError, errors
    assert error.filename == "weights.pt"
    assert "raised on rank 1" in error.__notes__[0]
    assert list(temporary.iterdir()) == []


def test_a_call_that_somebody_has_changed_on_its_way_is_not_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours, b"key")
        seal = sealing(b"another key", "call")
        seal.update(b"piece")
        theirs.sendall(frame(Kind.CALL, b"piece") + frame(Kind.SEAL, seal.digest()))
        with pytest.raises(ConnectionLost, match="SEAL instead of the call"):
            list(connection.pieces_of_call())
