"""The process that runs a rank's command; also a function, for a supervisor on another host."""

import os
import socket
import subprocess
import sys
import time

import pytest
from supervised import RUN, begin

from hvkit.connections import ConnectionLost, frame
from hvkit.functions.outcomes import error_in, results_in
from hvkit.functions.pickling import write_call
from hvkit.launching.supervision.protocol import AgentConnection, Frame, call_in, outcome_in, sealed


def test_an_agent_without_supervisor_becomes_the_command():
    agent = [sys.executable, "-m", "hvkit.launching.supervision.agent"]
    done = subprocess.run([*agent, "bash", "-c", "exit 5"], timeout=60)
    assert done.returncode == 5


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Calls a function on two ranks of "another" host; exit status, errors, and the outcomes.

    That host has a folder for temporary files of its own, which is empty afterwards.
    """
    folder, temporary = tmp_path / "call", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    elsewhere = RUN.replace("agent =", 'import socket; socket.gethostname = lambda: "x"\nagent =')

    def call(function, argument):
        with call_in(folder).open("wb") as file:
            write_call(file, function, [argument], {})
        rank = [sys.executable, "-P", "-m", "hvkit.functions.rank"]
        agents = f"call={str(folder)!r}"
        run = begin("", program=elsewhere, agents=agents, command=rank)
        _, errors = run.communicate(timeout=60)
        assert list(temporary.iterdir()) == []
        return run.returncode, errors, [outcome_in(folder, rank) for rank in (0, 1)]

    return call


def test_a_call_and_its_results_travel_in_pieces_and_leave_no_folder(called):
    def doubled(data):
        assert os.environ["HVKIT_CALL"].startswith(os.environ["TMPDIR"])
        assert os.stat(os.environ["HVKIT_CALL"]).st_mode & 0o777 == 0o700
        return data * 2, int(os.environ["OMPI_COMM_WORLD_RANK"])

    data = os.urandom(3_000_000)  # more than the window and any frame
    status, errors, outcomes = called(doubled, data)
    assert status == 0, errors
    assert results_in(outcomes) == [(data * 2, 0), (data * 2, 1)]


def test_an_exception_travels_too_and_a_killed_agent_leaves_no_folder(called, tmp_path):
    def fails(mark):
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            mark.touch()
            raise FileNotFoundError(2, "No such file", "weights.pt")
        while not mark.exists():
            time.sleep(0.01)
        os.kill(os.getppid(), 9)  # the agent

    status, errors, outcomes = called(fails, tmp_path / "raised")
    assert status != 0
    with outcomes[1].open("rb") as file:
        error = error_in(file)
    assert type(error) is FileNotFoundError, errors
    assert error.filename == "weights.pt"
    assert "raised on rank 1" in error.__notes__[0]


def test_a_call_that_somebody_has_changed_on_its_way_is_not_read(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = AgentConnection(ours, b"key")
        call = call_in(tmp_path)
        call.write_bytes(b"piece")
        for each in sealed(call, b"another key", Frame.CALL):
            theirs.sendall(frame(*each))
        call.unlink()
        with pytest.raises(ConnectionLost, match="SEAL instead of the call"):
            connection.receive_call(call)
        assert not call.exists()
