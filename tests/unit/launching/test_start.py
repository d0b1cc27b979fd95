"""From a request to the outcome of the last try."""

from dataclasses import replace

import pytest

from hvkit.launching import start
from hvkit.launching.hosts import Host
from hvkit.launching.prepare import Request
from hvkit.launching.supervision.supervised_run import Outcome

LEFT = Outcome(143, "got SIGTERM", restartable=True, preempted=True, saved=5, replicas=True)


def request(*names, **changes):
    nodes = tuple(Host(name, slots=1) for name in names)
    return Request(("python", "x.py"), nodes, **{"np": 2, **changes})


@pytest.mark.parametrize("verbose", [True, False])
def test_a_verbose_run_lists_what_ranks_set_with_reasons(hosts, monkeypatch, capsys, verbose):
    monkeypatch.setattr(start, "supervise", lambda run: Outcome(0))
    monkeypatch.setenv("HVKIT_BLOCKING_WAITS", "0")
    monkeypatch.setenv("PRTE_MCA_pmix_tool_support", "1")  # the user's own, too
    for name in ("OMPI_MCA_mpi_yield_when_idle", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    start.start(request("node1", "node2", verbose=verbose))
    printed = capsys.readouterr().err
    assert ("hvkit: starts NCCL_SOCKET_IFNAME==eth0 mpirun -np 2 " in printed) == verbose
    line = "hvkit: ranks set OMPI_MCA_mpi_yield_when_idle=1: a rank that waits"
    assert (line in printed) == verbose
    assert "ranks set HVKIT_BLOCKING_WAITS" not in printed  # the user's own


@pytest.fixture
def tries(hosts, monkeypatch):
    """Runs two ranks whose second try ends well; returns the hosts of the ranks, by try."""
    hosts.change(3)

    def run(first, names, least):
        tries = []

        def supervise(run):
            tries.append(run.hosts)
            return Outcome(0) if tries[1:] else first

        monkeypatch.setattr(start, "supervise", supervise)
        monkeypatch.setattr(start, "_free_memory", lambda *args, **options: None)
        monkeypatch.setattr(start.time, "sleep", lambda seconds: None)
        assert start.start(request(*names, min_np=least, max_restarts=1)).status == 0
        return tries

    return run


@pytest.mark.parametrize(
    ("names", "least", "terminated", "then"),
    [
        (["node1", "node2", "node3"], None, {1}, ("node1", "node3")),
        (["node1", "node2"], None, {1}, ("node1", "node2")),  # the others do not suffice
        (["node1", "node2"], 1, {0}, ("node2",)),
        (["node1", "node2"], 1, {0, 1}, ("node1", "node2")),
    ],
)
def test_hosts_that_got_sigterm_are_left_out_of_the_restart_if_the_others_suffice(
    tries, capsys, names, least, terminated, then
):
    left = replace(LEFT, terminated=frozenset(terminated))
    assert tries(left, names, least) == [("node1", "node2"), then]
    said = "goes on without" in capsys.readouterr().err
    assert said == bool({"node1", "node2"} - set(then))


def test_without_copies_in_memory_rank_0_stays_on_its_host(tries):
    """Its disk may be the only one with the checkpoints."""
    left = replace(LEFT, terminated=frozenset({0}), replicas=False)
    assert tries(left, ["node1", "node2"], 1) == [("node1", "node2")] * 2
