"""What ``hvkit top`` reads of a run: its socket, and ranks at one moment."""

import json
import os
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.run_status import RankReports, RunStatus, at_one_moment
from hvkit.launching.supervision.supervisor import Supervisor, _Rank
from hvkit.watch import calls
from hvkit.watch.calls import Status


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of this user's sockets."""
    monkeypatch.setattr(run_status, "folder", lambda: tmp_path / "hvkit")
    return tmp_path / "hvkit"


def state(**changes):
    return {**RunStatus().read(), "ranks": [], **changes}


def test_the_state_of_a_run_is_read_until_it_ends_and_no_thread_outlives_it(folder):
    seen, before = state(), threading.active_count()
    assert run_status.running() == []
    with run_status.serve(lambda: seen):
        assert run_status.running() == [os.getpid()]
        assert run_status.read(os.getpid()) == seen
    assert list(folder.iterdir()) == []
    with pytest.raises(HvkitError, match=f"no `hvkit run` of yours with process id {os.getpid()}"):
        run_status.read(os.getpid())
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_socket_is_removed_when_an_error_ends_the_run(folder):
    with pytest.raises(SystemExit), run_status.serve(state):
        raise SystemExit
    assert list(folder.iterdir()) == []


def test_a_run_that_begins_is_not_taken_for_a_dead_one(folder, monkeypatch):
    listen = socket.socket.listen

    def looked_for_before(self, *backlog):
        assert run_status.running() == []
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", looked_for_before)
    with run_status.serve(state):
        assert (folder / str(os.getpid())).exists()


def test_the_socket_of_another_run_with_the_same_number_stays(folder):
    path = folder / str(os.getpid())
    with run_status.serve(state), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_a_socket_that_cannot_be_removed_does_not_fail_the_run(folder):
    with run_status.serve(state):
        (folder / str(os.getpid())).unlink()
        (folder / str(os.getpid())).mkdir()


def test_the_socket_of_a_killed_run_is_removed(folder):
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "4711"))
    assert run_status.running() == []
    assert list(folder.iterdir()) == []


def test_clients_that_do_not_read_hold_up_nobody(folder):
    large = state(reason="x" * 10_000_000)
    with ExitStack() as held:
        with run_status.serve(lambda: large):
            for _ in range(3):
                client = held.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(str(folder / str(os.getpid())))
                assert client.recv(1)  # its answer has begun
            assert run_status.read(os.getpid()) == large
        assert "hvkit-top" in [thread.name for thread in threading.enumerate()]


def test_a_run_takes_no_folder_that_others_can_enter_and_none_is_read(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with run_status.serve(state):
        assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    with run_status.serve(state):
        folder.chmod(0o755)
        with pytest.raises(HvkitError, match="nobody else can enter"):
            run_status.read(os.getpid())


def test_without_a_folder_for_the_socket_a_run_goes_on(folder):
    folder.touch()
    with run_status.serve(state):
        assert run_status.running() == []
    folder.unlink()
    with run_status.serve(state):  # it vanishes meanwhile
        (folder / str(os.getpid())).unlink()
        folder.rmdir()


def test_a_run_of_another_version_is_an_error(folder):
    with (
        run_status.serve(lambda: {"ranks": []}),
        pytest.raises(HvkitError, match="version of hvkit that has started it"),
    ):
        run_status.read(os.getpid())


def test_an_update_keeps_the_rest_of_the_state():
    status = RunStatus()
    status.update(saved=7, phase="")
    status.update(restarts=1)
    read = status.read()
    assert (read["saved"], read["phase"], read["restarts"]) == (7, "", 1)
    assert read["seconds"] <= status.read()["seconds"]


def steps(ranks, now):
    return [each.get("step") for each in at_one_moment(ranks, now)]


def test_all_ranks_are_shown_at_the_newest_second_that_all_have_reported():
    first, second = RankReports(), RankReports()
    second.take({"step": 99}, 99, 99.4, 0.0)
    for now in range(100, 104):
        first.take({"step": now}, now + 0.001, now + 0.002, 0.0)
        # The other's report of this second is on its way.
        assert steps([first, second], now + 0.01) == [max(now - 1, 100), now - 1]
        second.take({"step": now}, now, now + 0.4, 0.0)
        assert steps([first, second], now + 0.5) == [now, now]


@pytest.mark.parametrize("ahead", [-3600.3, 0.2, 7e5])
def test_a_host_with_another_clock_reports_seconds_of_this_one(ahead):
    here, there = RankReports(), RankReports()
    for now in range(100, 104):
        here.take({"step": now}, now, now + 0.01, 0.0)
        there.take({"step": now + 50}, now + ahead, now + (0.01 if now == 101 else 0.3), 0.0)
    here.take({"step": 104}, 104, 104.01, 0.0)
    assert steps([here, there], 104.1) == [103, 153]


def test_a_rank_that_is_silent_delays_no_other():
    silent, other = RankReports(), RankReports()
    for now in range(100, 110):
        other.take({"step": now}, now, now, 0.0)
        if now < 103:
            silent.take({"step": now}, now, now, 0.0)
    assert steps([silent, other], 109.5) == [102, 109]
    # One that has never reported has no step.
    assert steps([RankReports(), other], 109.5) == [None, 109]
    assert steps([RankReports()], 109.5) == [None]


def test_reports_of_one_second_have_one_time_however_late_they_came():
    first, second = RankReports(), RankReports()
    for now, late in ((100, 0.01), (101, 0.4)):
        first.take({}, now, now + 0.01, 7.01 + now)
        second.take({}, now, now + late, 7 + now + late)
    moments = [each["at"] for each in at_one_moment([first, second], 101.5)]
    assert moments == pytest.approx([108] * 2)


@pytest.fixture
def supervisor():
    """That of two ranks on host a."""
    supervisor = Supervisor(2, b"k" * 32, Style(), None, lambda: None)
    for rank in range(2):
        supervisor.ranks[rank] = _Rank(rank, "a", None, None)
    return supervisor


def test_the_state_of_a_run_shows_running_ranks_at_one_moment_and_ended_ones_at_their_end(
    monkeypatch, supervisor
):
    """Reports as ranks make them, of the same seconds, that come one after another."""
    sent = []
    monkeypatch.setattr(calls, "report", lambda **values: sent.append(values))

    def report(rank, now, step):
        monkeypatch.setattr(calls.time, "time", lambda: now)
        monkeypatch.setattr(calls, "last_step", lambda: step)
        calls.report_now(Status())
        supervisor._take_report(supervisor.ranks[rank], json.dumps(sent.pop()).encode())
        return [each.get("step") for each in supervisor.state()["ranks"]]

    assert report(0, 100.0, 10) == [10, None]
    assert report(1, 100.0, 10) == [10, 10]
    assert report(0, 101.0, 90) == [10, 10]
    assert report(1, 101.0, 91) == [90, 91]
    supervisor.ranks[0].connected = False
    assert report(0, 101.3, 120) == [120, 91]


def test_a_try_that_has_saved_nothing_yet_leaves_the_newest_checkpoint_as_it_was(supervisor):
    status = RunStatus()
    status.update(saved=7)
    status.update(**supervisor.state())
    assert status.now.saved == 7
    supervisor.reports.saved = 9
    status.update(**supervisor.state())
    assert status.now.saved == 9
