"""``hvkit run`` where Open MPI's interfaces are set by others, or hosts are in several networks."""

import sys

import pytest
from cases import MORE

RUN = [sys.executable, "-m", "hvkit", "run"]
COUNT = [sys.executable, "-c", "import torch, hvkit; print(len(hvkit.allgather(0)))"]


@pytest.fixture
def hosts(rig):
    return rig(["node1", "node2"])


def run(hosts, *words, **options):
    return hosts.host("node1").run([*RUN, *words, *COUNT], timeout=120, **options)


def must(host, script):
    done = host.run(["sh", "-ec", script])
    assert done.returncode == 0, done.stderr


@MORE
def test_open_mpis_own_settings_count_and_interfaces_that_are_asked_for_win(hosts):
    both = ["-H", "node1:1,node2:1"]
    exclude = {
        "OMPI_MCA_btl_tcp_if_exclude": "lo,docker0",
        "PRTE_MCA_prte_if_exclude": "docker0",
    }
    for words in (both, [*both, "--interfaces", "eth0"]):
        done = run(hosts, *words, env=exclude)
        assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
    settings = "mkdir ~/.openmpi; echo 'btl_tcp_if_include = eth0' > ~/.openmpi/mca-params.conf"
    # All hosts have the same home.
    must(hosts.host("node1"), settings)
    done = run(hosts, *both)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


@MORE
def test_ranks_may_be_started_from_another_network(hosts):
    must(hosts.host("node2"), "ip route add 10.99.0.0/24 dev eth0")
    move = (
        "ip address add 10.99.0.1/24 dev eth0; ip address del 10.77.0.1/24 dev eth0; "
        "ip route add 10.77.0.0/24 dev eth0 src 10.99.0.1"
    )
    must(hosts.host("node1"), move)
    done = run(hosts, "-H", "node2:2")
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
    assert "WARNING" not in done.stderr
