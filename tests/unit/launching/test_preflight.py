"""The hosts that get ranks: slots are filled in the order of the hosts."""

import pytest

from hvkit.errors import LaunchError
from hvkit.launching.host_checks.preflight import placed
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job

TWO_AND_ONE = (Host("node1", slots=2), Host("node2", slots=1))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [("node1", 1)]),
        (2, [("node1", 2)]),
        (3, [("node1", 2), ("node2", 1)]),
        (None, [("node1", 2), ("node2", 1)]),
    ],
)
def test_slots_of_a_host_are_filled_before_the_next(size, expected):
    assert [(host.name, host.slots) for host in placed(TWO_AND_ONE, size)] == expected


def test_a_job_has_as_many_ranks_as_were_placed():
    assert Job(placed(TWO_AND_ONE, 3), ("true",)).size == 3


def test_more_ranks_than_slots_are_refused_with_both_numbers():
    with pytest.raises(LaunchError, match=r"-np 4 is more than the 3 slots .*node1 2, node2 1"):
        placed(TWO_AND_ONE, 4)
    with pytest.raises(LaunchError, match="-np 2 is more than the 1 slot of the hosts"):
        placed([Host("node1", slots=1)], 2)


def test_a_host_keeps_its_user():
    assert placed([Host("node1", slots=1, user="ann")], 1)[0].user == "ann"
