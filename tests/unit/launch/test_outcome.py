"""Which rank is named as the culprit."""

import pytest

from hvkit.launch.supervision.outcome import Failure, culprit, ranges, report


def test_the_first_failure_is_named_with_its_last_lines():
    failures = [
        Failure(3, "node2", 1, last_lines=("Traceback", "ValueError: 7")),
        Failure(0, "node1", 1, last_lines=("other",)),
    ]
    assert report(failures).splitlines() == [
        "hvkit run: rank 3 on node2 ended with exit status 1; its last lines:",
        "    Traceback",
        "    ValueError: 7",
        "hvkit run: after that, rank 0 failed too",
    ]


@pytest.mark.parametrize(
    "line",
    ["hvkit.errors.RankLostError: another rank", "HorovodInternalError: shut down"],
)
def test_a_rank_whose_partner_has_gone_is_not_the_culprit_though_it_ended_first(line):
    follower = Failure(0, "node1", 1, last_lines=(line,))
    cause = Failure(1, "node2", 9, last_lines=("KeyError: 'x'",))
    assert culprit([follower, cause]) is cause


def test_where_all_only_follow_the_first_is_named():
    followers = [Failure(rank, "node1", 1, last_lines=("RankLostError",)) for rank in (1, 0)]
    assert culprit(followers) is followers[0]


def test_ranks_that_were_told_to_end_have_not_failed():
    assert culprit([Failure(0, "node1", -15, asked=True)]) is None
    assert report([Failure(0, "node1", -15, asked=True)]) == ""


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (Failure(1, "b", -9), "rank 1 on b was killed by signal 9 (SIGKILL)"),
        (Failure(1, "b", None), "rank 1 on b ended without a word"),
        (Failure(1, "b", 127, problem="cannot run 'x'"), "rank 1 on b: cannot run 'x'"),
    ],
)
def test_how_a_rank_ended_is_said_in_words(failure, line):
    assert line in failure.describe()


def test_the_exit_status_is_that_of_a_shell():
    assert Failure(0, "a", 3).exit_status == 3
    assert Failure(0, "a", -9).exit_status == 137
    assert Failure(0, "a", None).exit_status == 1


def test_neighbouring_ranks_are_joined():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
