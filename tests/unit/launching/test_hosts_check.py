"""A check of hosts: their reports, and each kind of problem that it finds."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from hvkit.launching import hosts_check as checks
from hvkit.launching.hosts import Host
from hvkit.launching.hosts_check import Examined, problems, read_report
from hvkit.launching.reachability import Reach, Reachability
from hvkit.launching.ssh import SRUN, SSH

GIB = 2**30


def report(**changes):
    return {
        "format": 1,
        "hostname": "node1",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "mpi": {"flavour": "Open MPI", "version": "5.0.11", "program": "~/bin/mpirun"},
        "cores": {"usable": 8, "host": 16, "limit": None},
        "memory": {"total": 2**35, "available": 2**34},
        "gpus": [],
        "addresses": ["10.0.0.1"],
        "interfaces": [
            {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"},
            {"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24"},
        ],
        "problems": [],
        **changes,
    }


def test_a_report_is_read_from_between_what_shells_print():
    text = json.dumps(report(), indent=2)
    assert read_report(f"Welcome {{user}}!\n{text}\nGoodbye.\n") == report()


@pytest.mark.parametrize(("limit", "cores"), [(None, 8), (1.5, 2), (0.3, 1), (64.0, 8)])
def test_a_limit_on_cpu_time_limits_the_cores(limit, cores):
    found = report(cores={"usable": 8, "host": 16, "limit": limit})
    assert Examined(Host("node1"), found).cores == cores


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it printed no report"),
        ("Welcome!\n", "it printed no report"),
        ("{\n", "its report is invalid"),
        (json.dumps(report(format=2), indent=2), "its report has format 2, not 1"),
    ],
)
def test_anything_else_is_an_error(text, why):
    with pytest.raises(ValueError, match=why):
        read_report(text)


def test_this_hosts_own_report_is_read():
    command = [sys.executable, "-m", "hvkit", "doctor", "--json", "--no-self-test"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = read_report(printed)
    assert Examined(Host("here"), found).cores >= 1
    assert found["memory"]["available"] > 0
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))


def examined(name, slots=2, **changes):
    """A host with this report, which is in order but for the changes."""
    interfaces = [{"name": "eth0", "address": f"10.0.0.{name[-1]}", "network": "10.0.0.0/24"}]
    own = {"hostname": name, "addresses": [f"10.0.0.{name[-1]}"], "interfaces": interfaces}
    return Examined(Host(name, slots), report(**{**own, **changes}))


def reach(source, target, **changes):
    address, own = f"10.0.0.{target[-1]}", f"10.0.0.{source[-1]}"
    return replace(Reach(source, target, (address,), (), address, "eth0", own), **changes)


def found(*hosts, connections=None):
    return [str(problem) for problem in problems(hosts, connections or Reachability())]


TWO = examined("node1"), examined("node2")


def test_right_hosts_have_no_problems():
    both = reach("node1", "node2"), reach("node2", "node1")
    connections = Reachability(both, {"node1": 0.1, "node2": -1.5})
    assert found(*TWO, connections=connections) == []
    assert found(examined("node1", None)) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        ({"torch": "2.13.0"}, {"torch": "2.12.0"}, "torch differs (2.13.0 on node1, node3; 2.12.0"),
        ({"torch": "2.13.0"}, {"torch": None}, "torch differs (2.13.0 on node1, node3; none"),
        ({"python": "3.11.2"}, {"python": "3.12.1"}, "python differs (3.11 on node1, node3; 3.12"),
        ({"horovod": "1"}, {}, "horovod differs (1 on node1, node3; none"),
        ({"python": "3.11.2"}, {"python": "3.11.9"}, None),
        ({"horovod": "0.28.1+hvkit1"}, {"horovod": "0.28.1+hvkit2"}, None),
    ],
)
def test_versions_that_do_not_work_together_are_a_problem_with_the_hosts(ours, theirs, what):
    first, third = (examined(name, versions=ours) for name in ("node1", "node3"))
    fix = "on node2): install the same version on all hosts"
    expected = [f"node1, node2, node3: {what} {fix}"] if what else []
    assert found(first, examined("node2", versions=theirs), third) == expected


MPICH = {"mpi": {"flavour": "MPICH", "version": "5"}}
WRONG = {"problems": [{"what": "no compiler", "fix": "install one"}]}
LOOPING = examined("node1", addresses=["127.0.1.1"])
SAME = {"hostname": "node1"}


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ([TWO[0], Examined(Host("node2", 2), None, "is away")], "node2: is away"),
        (
            [TWO[0], examined("node2", **MPICH)],
            r"node1, node2: MPI differs \(Open MPI 5\.0\.11 on node1; MPICH 5 on node2\): .*",
        ),
        ([examined(each, **WRONG) for each in ("node1", "node2")], "node1, node2: no compiler: .*"),
        ([examined("node1", 9)], "node1: 9 slots but 8 cores: .*, use at most 8 slots"),
        ([examined("node1", 2, gpus=[{}])], "node1: 2 slots but 1 GPU: .*, use at most 1 slot"),
        (
            [examined("node1", None, memory={"available": GIB})],
            "node1: 1024 MiB of free memory for 8 ranks, but each takes at least 512 MiB: .*",
        ),
        (
            [examined("node1", gpus=[{}] * 8), TWO[1]],
            "node2: no GPU found there, but other hosts have .*",
        ),
        (
            [examined("node1", **SAME), examined("alias1", **SAME)],
            "node1, alias1: are one host, node1: name it once, with all its slots",
        ),
        ([LOOPING, TWO[1]], r"node1: its own name, node1, resolves to 127\.0\.1\.1 there, .*"),
    ],
)
def test_each_problem_is_listed_once_with_its_hosts(hosts, problem):
    (only,) = found(*hosts)
    assert re.fullmatch(problem, only)


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", "127.0.0.1"])
def test_a_name_for_this_host_alone_matters_only_among_several(name):
    here = Examined(Host(name, 2), TWO[0].report)
    away = reach("node2", name, reached=None, addresses=("127.0.0.1",), failures=("refused",))
    assert found(here) == found(LOOPING) == []
    assert found(here, TWO[1], connections=Reachability((away,))) == [
        f"{name}: means a different host on every host: use the name that the others reach it by"
    ]


ANOTHER = "its name means another host there"


@pytest.mark.parametrize(
    ("addresses", "failures", "reason"),
    [
        ((), (), ": its name has no IPv4 address there; add it to DNS or to /etc/hosts there"),
        (("127.0.1.1",), ("refused",), f": {ANOTHER} (127.0.1.1 refused); correct DNS or"),
        (("10.0.0.3",), ("another host answers",), f": {ANOTHER} (10.0.0.3 another host answers);"),
        (
            ("10.1.0.2", "10.0.0.2"),
            ("no route", "timed out"),
            " (10.1.0.2 no route, 10.0.0.2 timed out): is that its address, is there a route to it",
        ),
    ],
)
def test_a_host_that_cannot_reach_another_is_a_problem_with_the_reason(addresses, failures, reason):
    failed = reach("node1", "node2", reached=None, addresses=addresses, failures=failures)
    (only,) = found(*TWO, connections=Reachability((failed, reach("node2", "node1"))))
    assert only.startswith(f"node1: cannot reach node2{reason}")


@pytest.mark.parametrize(
    ("connections", "problem"),
    [
        (Reachability(absent=("node2",)), "node2: did not try to reach the others in time"),
        (Reachability(ahead={"node2": 61.4}), "node2: its clock is 61 s ahead of this host's"),
        (Reachability(ahead={"node2": -90}), "node2: its clock is 90 s behind this host's"),
    ],
)
def test_a_host_that_is_late_or_has_a_wrong_clock_is_a_problem(connections, problem):
    (only,) = found(*TWO, connections=connections)
    assert only.startswith(problem)


def test_a_check_reaches_the_hosts_in_the_way_of_a_run(srun, monkeypatch):
    shells, away = [], [Examined(Host(name), None, "away") for name in ("node1", "node2")]
    monkeypatch.setattr(
        checks, "collect_reports", lambda hosts, shell: shells.append(shell) or away
    )
    for system in ("Slurm", None):
        checks.check([one.host for one in away], system)
    assert shells == [SRUN, SSH]
