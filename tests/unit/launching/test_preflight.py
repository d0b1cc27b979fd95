"""Before anything starts: the hosts that get ranks, and what is wrong with them."""

import re

import pytest

from hvkit.errors import CannotRunError, LaunchError
from hvkit.host.network import Interface
from hvkit.launching import preflight
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job
from hvkit.launching.preflight import choose_hosts, hosts_with_ranks
from hvkit.launching.probe import NOT_FOUND, Facts, RankCommand

TWO_AND_ONE = (Host("node1", slots=2), Host("node2", slots=1, user="ann"))
MISSING = {"problem": "cannot run x.py: there is no such file in /data", "status": NOT_FOUND}


def chosen(hosts=TWO_AND_ONE, size=3, **changes):
    return choose_hosts(hosts, size, RankCommand.of(["python", "x.py"], "/bin"), **changes)


@pytest.mark.parametrize(("size", "expected"), [(1, [1]), (2, [2]), (3, [2, 1]), (None, [2, 1])])
def test_slots_of_a_host_are_filled_before_the_next(size, expected):
    found = hosts_with_ranks(TWO_AND_ONE, size)
    assert [host.slots for host in found] == expected
    assert [host.user for host in found] == [None, "ann"][: len(expected)]
    assert Job(found, ("true",)).size == sum(expected)


def test_more_ranks_than_slots_are_refused_with_both_numbers():
    with pytest.raises(LaunchError, match=r"-np 4 is more than the 3 slots .*node1 2, node2 1"):
        hosts_with_ranks(TWO_AND_ONE, 4)
    with pytest.raises(LaunchError, match="-np 2 is more than the 1 slot of the hosts"):
        hosts_with_ranks([Host("node1", slots=1)], 2)


def test_a_host_without_ranks_is_not_checked(hosts):
    hosts["node2"] = (None, "", "", "no route to it")
    assert [host.name for host in chosen(size=2).hosts] == ["node1"]


def test_a_host_may_greet_without_an_end_of_line(hosts):
    hosts["node2"] = (0, f"Welcome{hosts.facts(2).printed()}\nBye", "", None)
    assert len(chosen().hosts) == 2


def test_without_a_route_to_the_hosts_they_may_try_all_addresses_of_this_one(hosts, monkeypatch):
    monkeypatch.setattr(preflight, "source_address", lambda name: None)
    own = [Interface("lo", "127.0.0.1", "127.0.0.0/8"), *hosts["node1"].interfaces]
    monkeypatch.setattr(preflight, "interfaces", lambda: own)
    monkeypatch.setattr(preflight, "within_host", lambda: ["docker0"])
    assert chosen().addresses == ("10.0.0.1",)


def test_a_removed_working_directory_is_an_error(hosts, monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    message = r"the working directory, .*/gone, was removed .*`cd` to a folder"
    with pytest.raises(LaunchError, match=message):
        chosen()


def test_a_host_without_the_script_is_named_before_anything_starts(hosts):
    hosts.change(2, **MISSING)
    with pytest.raises(CannotRunError, match=r"^cannot run x\.py: .* in /data on node2$") as caught:
        chosen()
    assert caught.value.exit_status == 127
    assert [host.name for host in chosen(least=1).hosts] == ["node1"]


@pytest.mark.parametrize("least", [None, 1])
def test_a_script_that_no_host_has_is_said_once_and_else_each_problem(hosts, least):
    for number in (1, 2):
        hosts.change(number, **MISSING)
    with pytest.raises(CannotRunError, match=f"^{re.escape(MISSING['problem'])}$"):
        chosen(least=least)
    hosts["node2"] = (None, "", "", "no route to it: switch it on")
    with pytest.raises(LaunchError, match=r"^nothing was started") as caught:
        chosen(least=least)
    assert caught.value.exit_status == 1
    lines = sorted(str(caught.value).splitlines()[1:])
    assert lines == [f"  node1: {MISSING['problem']}", "  node2: no route to it: switch it on"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"problem": "cannot write temporary files to /tmp"}, "cannot write temporary files to"),
        ({"version": "0.0.1"}, r"it has hvkit 0\.0\.1, not "),
        ((0, "Welcome!\n", "", None), "it printed no facts"),
        (
            (1, "", "Traceback\nModuleNotFoundError: No module named 'hvkit'\n", None),
            "cannot import this hvkit .ModuleNotFoundError: No module named 'hvkit'",
        ),
    ],
)
def test_a_host_that_is_not_like_this_one_is_named(hosts, answer, message):
    hosts["node2"] = hosts.facts(2, **answer) if isinstance(answer, dict) else answer
    with pytest.raises(LaunchError, match=f"node2: .*{message}"):
        chosen()


def test_a_host_without_the_working_directory_says_so():
    found = Facts.here("/nowhere", RankCommand.of(["python"], "/bin"))
    assert found.problem.startswith("has no folder /nowhere, the working directory: share it with")


def test_two_names_of_one_host_are_refused(hosts):
    hosts["node2"] = hosts["node1"]
    with pytest.raises(LaunchError, match="node1 and node2 are the same host, node1"):
        chosen()
