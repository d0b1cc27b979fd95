"""Which rank ``hvkit run`` names as the one that failed first."""

import pytest

from hvkit.launching.supervision.failures import (
    Failure,
    first_failure,
    hidden_tracebacks,
    in_one_line,
    report,
)


def failure(rank, host, status, at=0.0, **others):
    """A failure, at second 0 by default."""
    return Failure(rank, host, status, at, **others)


HEAD = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    f()")


def raising(rank, error, at=0.0, **others):
    """A rank that ends with a traceback, which its last lines have."""
    whole = (*HEAD, *error.split("\n"))
    own = {"status": 1, "at": at, "last_lines": whole, "traceback": whole}
    return failure(rank, "a", **own | others)


def saying(rank, line, status=1, at=0.0):
    """A rank whose last line this is."""
    return failure(rank, "a", status, at, last_lines=(line,))


def test_the_first_failure_is_named_with_its_last_lines_and_those_after_it():
    same = "hvkit: rank 1 ends with the same ValueError as rank 3"
    failures = [
        failure(3, "node2", 1, last_lines=("Traceback", "ValueError: 7")),
        saying(0, "other", at=0.1),
        saying(1, same, at=0.2),
        failure(2, "a", 1, at=0.3, last_lines=("Traceback", "ValueError: 7")),
        saying(4, "RankLostError: rank 3 has ended", at=0.4),
    ]
    assert report(failures).splitlines() == [
        "hvkit run: rank 3 on node2 ended with exit status 1; its last lines:",
        "    Traceback",
        "    ValueError: 7",
        "hvkit run: ranks 1-2 ended with the same error",
        "hvkit run: after that, ranks 0, 4 failed too",
    ]


def test_a_rank_that_raised_an_error_is_named_though_it_was_stopped_before_it_ended():
    lost = raising(0, "Horovod has been shut down")
    waiting = raising(1, "ValueError: 7", at=1, stopped=True, status=-15)
    assert first_failure([lost, waiting]) is waiting
    assert first_failure([lost, failure(1, "a", -15, at=1, stopped=True)]) is lost
    assert first_failure([waiting]) is None


def test_only_tracebacks_that_a_report_shows_or_that_follow_from_it_are_not_shown_again():
    first = raising(0, "ValueError: 7")
    same, lost = raising(1, "ValueError: 7", at=1), raising(2, "RankLostError: rank 0", at=1)
    other = raising(3, "KeyError: 'x'", at=1)
    assert hidden_tracebacks([first, same, lost, other]) == {0, 1, 2}
    # Other last lines leave it no room in the report.
    assert hidden_tracebacks([raising(0, "ValueError: 7", last_lines=("1", "2"))]) == set()


def test_a_handled_traceback_is_shown_though_the_rank_ends_because_of_another():
    lost = ("hvkit: RankLostError: rank 1 has ended",)
    handled = raising(0, "ValueError: handled", last_lines=lost)
    behind = raising(2, "RankLostError: x\nRESULT 42", at=1)
    assert hidden_tracebacks([handled, raising(1, "KeyError: 'x'", at=1), behind]) == {1}


def test_errors_in_exception_groups_are_compared_and_named():
    group = "  | ExceptionGroup: two", "  +-+---- 1 ----", "    | ValueError: 7", "    +--------"
    one, other = (failure(r, "a", 1, last_lines=group, traceback=group) for r in (0, 1))
    assert hidden_tracebacks([one, other]) == {0, 1}
    assert in_one_line([one]).endswith("exit status 1: ValueError: 7")


@pytest.mark.parametrize(
    ("how", "raises"),
    [
        ({}, True),
        ({"status": 3}, False),
        ({"status": -15}, False),
        ({"status": -15, "stopped": True}, True),
        ({"status": -9, "stopped": True}, False),
        ({"last_lines": (*HEAD, "ValueError: 7", "more"), "traceback": ()}, False),
    ],
)
def test_a_traceback_ends_a_rank_only_at_its_end_and_with_pythons_status(how, raises):
    assert (raising(0, "ValueError: 7", **how).raised is not None) == raises


def test_an_exception_is_named_with_the_innermost_line_of_the_script():
    library = '  File "/usr/lib/python3.12/socket.py", line 836, in create_connection'
    whole = (*HEAD, library, "    raise", "ConnectionRefusedError: [Errno 111]")
    raised = failure(0, "a", 1, traceback=whole).raised
    assert str(raised) == "ConnectionRefusedError at train.py:3"
    assert not raised.lasts
    assert failure(0, "a", 1, traceback=whole, refused=True).raised.lasts  # hvkit's own


@pytest.mark.parametrize(
    "line",
    [
        "hvkit.errors.RankLostError: another rank",
        "HorovodInternalError: shut down",
        "hvkit: rank 1 still waits in fit (x.py:1), 3 s after it should have ended: ended by force",
        "hvkit: rank 1 waits in fit (x.py:1) for 60 s; it cannot reach rank 0 at a to find why",
    ],
)
def test_a_rank_that_ends_because_of_another_is_not_the_cause_though_it_ended_first(line):
    follower, cause = saying(0, line), saying(1, "KeyError: 'x'", status=9, at=0.1)
    assert first_failure([follower, cause]) is cause
    # If all failures are consequences, it is the first, unless the ranks have said why they end.
    followers = [saying(1, line), saying(0, "RankLostError: x", at=0.1)]
    assert first_failure(followers) is followers[0]
    assert report(followers, cause="rank 2 has not come") == "hvkit run: rank 2 has not come"
    assert in_one_line(followers, (), "rank 2 has not come") == "rank 2 has not come"


def test_a_warning_about_a_late_rank_is_no_consequence():
    killed = saying(0, "hvkit: rank 1 has not reached fit (x.py:1) for 60 s; it is at x.py:5", -9)
    text = report([killed, failure(1, "node1", 1, at=0.2)], cause="rank 0 died")
    assert text.startswith("hvkit run: rank 0 on a was killed by signal 9 (SIGKILL)")


def test_of_failures_at_about_the_same_time_the_killed_rank_is_the_cause():
    aborted, killed = failure(0, "node1", 14), failure(1, "node2", -9, at=0.01)
    assert first_failure([aborted, killed]) is killed
    # A crash long after an error is not.
    crashed, wrong = failure(1, "node2", -11, at=5.0), saying(0, "ValueError")
    assert first_failure([crashed, wrong]) is wrong


def test_ranks_that_were_being_stopped_have_not_failed():
    stopped = [failure(0, "node1", -15, stopped=True)]
    assert first_failure(stopped) is None
    assert (report(stopped), in_one_line(stopped)) == ("", "")


@pytest.mark.parametrize(
    ("failed", "line", "exit_status"),
    [
        (failure(1, "b", -9), "rank 1 on b was killed by signal 9 (SIGKILL)", 137),
        (failure(1, "b", None), "rank 1 on b vanished: it and its watcher died without an", 1),
        (failure(1, "b", 127, problem="cannot run 'x'"), "rank 1 on b: cannot run 'x'", 127),
        (saying(1, "ValueError: x"), "rank 1 on a ended with exit status 1: ValueError: x", 1),
    ],
)
def test_the_line_about_a_failure_names_rank_host_and_reason(failed, line, exit_status):
    assert in_one_line([failed]).startswith(line)
    assert failed.exit_status == exit_status


def test_a_lost_host_is_named_with_its_ranks():
    lost = [failure(rank, "node2", None, lost=True) for rank in (2, 1)]
    text = "no sign of life from node2 (ranks 1-2): it or the network is down"
    assert report(lost, {"node2", "node3"}) == f"hvkit run: {text}"
    assert in_one_line(lost, {"node2", "node3"}) == text


def test_if_all_other_hosts_are_lost_this_hosts_network_is_named():
    lost = [failure(1, "node2", None, lost=True), failure(2, "node3", None, lost=True)]
    found = report(lost, {"node2", "node3"})
    assert found.endswith("node2 (rank 1), node3 (rank 2): this host's network is down")


def test_a_host_that_was_silent_before_a_rank_failed_is_the_cause():
    aborted, lost = failure(3, "node3", 14, at=3.5), failure(1, "node2", None, at=0.4, lost=True)
    assert first_failure([aborted, lost]) is lost
