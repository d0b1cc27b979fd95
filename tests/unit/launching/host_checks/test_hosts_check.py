"""A check of hosts, and each kind of problem that it finds."""

from dataclasses import replace

import pytest

from hvkit.launching.host_checks import hosts_check as checks
from hvkit.launching.host_checks.hosts_check import Examined, HostReport, problems
from hvkit.launching.host_checks.reachability import Reach, Reachability
from hvkit.launching.hosts import Host
from hvkit.launching.ssh import SRUN, SSH

_GIB = 2**30


def _facts(name: str, **changes: object) -> HostReport:
    number = name[-1]
    facts = HostReport(
        hostname=name,
        versions={"python": "3.11.2", "torch": "2.13.0", "MPI": "Open MPI 5.0.11"},
        cores=8,
        memory=16 * _GIB,
        gpus=0,
        own_addresses=(f"10.0.0.{number}",),
        outward=(f"10.0.0.{number}", "172.17.0.1"),
        problems=(),
    )
    return replace(facts, **changes)


def _examined(name: str, slots: int | None = 2, **changes: object) -> Examined:
    return Examined(Host(name, slots), _facts(name, **changes), None)


def _reach(source: str, target: str, **changes: object) -> Reach:
    address, own = f"10.0.0.{target[-1]}", f"10.0.0.{source[-1]}"
    return replace(Reach(source, target, (address,), (), address, "eth0", own), **changes)


def _found(*examined: Examined, connections: Reachability | None = None) -> list[str]:
    return [str(problem) for problem in problems(examined, connections or Reachability())]


def test_right_hosts_have_no_problems():
    connections = Reachability(
        (_reach("node1", "node2"), _reach("node2", "node1")), {"node1": 0.1, "node2": -1.5}
    )
    assert _found(_examined("node1"), _examined("node2"), connections=connections) == []


def test_a_host_without_a_report_is_a_problem():
    away = Examined(Host("node2", 2), None, "is away")
    assert _found(_examined("node1"), away) == ["node2: is away"]


def test_a_problem_of_several_hosts_is_listed_once():
    wrong = ("no compiler: install one",)
    found = _found(_examined("node1", problems=wrong), _examined("node2", problems=wrong))
    assert found == ["node1, node2: no compiler: install one"]


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        ({"torch": "2.13.0"}, {"torch": "2.12.0"}, "torch differs (2.13.0 on node1, node3; 2.12.0"),
        ({"torch": "2.13.0"}, {"torch": None}, "torch differs (2.13.0 on node1, node3; none on"),
        ({"python": "3.11.2"}, {"python": "3.12.1"}, "python differs (3.11 on node1, node3; 3.12"),
        ({"MPI": "MPICH 4"}, {"MPI": "MPICH 5"}, "MPI differs (MPICH 4 on node1, node3; MPICH 5"),
        ({"horovod": "1"}, {}, "horovod differs (1 on node1, node3; none on"),
    ],
)
def test_versions_that_differ_are_a_problem_with_the_hosts(ours, theirs, what):
    found = _found(
        _examined("node1", versions=ours),
        _examined("node2", versions=theirs),
        _examined("node3", versions=ours),
    )
    fix = " on node2): install the same version on all hosts"
    assert found == [f"node1, node2, node3: {what.removesuffix(' on')}{fix}"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"python": "3.11.2"}, {"python": "3.11.9"}),
        ({"horovod": "0.28.1+hvkit1"}, {"horovod": "0.28.1+hvkit2"}),
    ],
)
def test_versions_that_work_together_are_no_problem(ours, theirs):
    assert _found(_examined("node1", versions=ours), _examined("node2", versions=theirs)) == []


def test_more_slots_than_cores_gpus_or_memory_are_problems():
    assert _found(_examined("node1", 9)) == [
        "node1: 9 slots but 8 cores: ranks would share cores, use at most 8 slots"
    ]
    assert _found(_examined("node1", 2, gpus=1)) == [
        "node1: 2 slots but 1 GPU: each rank needs its own GPU, use at most 1 slot"
    ]
    assert _found(_examined("node1", 8, memory=_GIB)) == [
        "node1: 1024 MiB of free memory for 8 ranks, but each takes at least 512 MiB: end other "
        "programs there or use fewer slots"
    ]


def test_a_host_without_slots_has_as_many_as_cores():
    assert _found(_examined("node1", None)) == []
    assert "free memory for 8 ranks" in _found(_examined("node1", None, memory=_GIB))[0]


def test_a_host_without_gpus_among_others_with_some_is_a_problem():
    assert _found(_examined("node1", gpus=8), _examined("node2")) == [
        "node2: no GPU found there, but other hosts have some: run `nvidia-smi` there, or remove "
        "the host"
    ]


def test_two_names_of_one_host_are_a_problem():
    same = {"hostname": "node1", "outward": ("10.0.0.1",)}
    assert _found(_examined("node1", **same), _examined("alias1", **same)) == [
        "node1, alias1: are one host: name it once, with all its slots"
    ]


def test_a_hostname_that_loops_back_matters_only_among_several_hosts():
    looping = _examined("node1", own_addresses=("127.0.1.1",))
    assert _found(looping) == []
    assert _found(looping, _examined("node2")) == [
        "node1: its own name, node1, resolves to 127.0.1.1 there, which no other host can reach: "
        "in its /etc/hosts map the name to its address in the network"
    ]


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", "127.0.0.1", "::1"])
def test_localhost_matters_only_among_several_hosts(name):
    here = Examined(Host(name, 2), _facts("node1"), None)
    away = _reach("node2", name, reached=None, addresses=("127.0.0.1",), failures=("refused",))
    assert _found(here) == []
    assert _found(here, _examined("node2"), connections=Reachability((away,))) == [
        f"{name}: means a different host on every host: use the name that the others reach it by"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"addresses": ()},
            ": its name does not resolve there; add it to DNS or to /etc/hosts there",
        ),
        (
            {"addresses": ("127.0.1.1",), "failures": ("connection refused",)},
            ": its name means another host there (127.0.1.1 connection refused); correct DNS or "
            "/etc/hosts there",
        ),
        (
            {"addresses": ("10.0.0.3",), "failures": ("another host answers",)},
            ": its name means another host there (10.0.0.3 another host answers); correct DNS or "
            "/etc/hosts there",
        ),
        (
            {"addresses": ("fd00::2", "10.0.0.2"), "failures": ("no route", "timed out")},
            " (fd00::2 no route, 10.0.0.2 timed out): is that its address, is there a route to "
            "it, and do firewalls allow all TCP ports between the hosts? Ranks listen on "
            "arbitrary ports",
        ),
    ],
)
def test_a_host_that_cannot_reach_another_is_a_problem_with_the_reason(changes, reason):
    connections = Reachability(
        (_reach("node1", "node2", reached=None, **changes), _reach("node2", "node1"))
    )
    found = _found(_examined("node1"), _examined("node2"), connections=connections)
    assert found == [f"node1: cannot reach node2{reason}"]


def test_a_host_that_did_not_try_in_time_is_a_problem():
    found = _found(
        _examined("node1"), _examined("node2"), connections=Reachability(absent=("node2",))
    )
    assert found == [
        "node2: did not try to reach the others in time: is it overloaded? Check again"
    ]


@pytest.mark.parametrize(("seconds", "text"), [(61.4, "61 s ahead of"), (-90, "90 s behind")])
def test_a_wrong_clock_is_a_problem(seconds, text):
    found = _found(
        _examined("node1"), _examined("node2"), connections=Reachability(ahead={"node2": seconds})
    )
    assert found == [f"node2: its clock is {text} this host's: set all clocks by NTP"]


def test_a_check_reaches_the_hosts_in_the_way_of_a_run(srun, monkeypatch):
    shells = []
    examined = [Examined(Host(name), None, "away") for name in ("node1", "node2")]
    monkeypatch.setattr(
        checks, "collect_reports", lambda hosts, shell: shells.append(shell) or examined
    )
    hosts = [one.host for one in examined]
    checks.check(hosts, "Slurm")
    checks.check(hosts)
    assert shells == [SRUN, SSH]
