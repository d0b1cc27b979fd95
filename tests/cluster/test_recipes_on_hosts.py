"""The MNIST recipes on several hosts train what they train on one."""

import sys
from pathlib import Path

import pytest
from cases import MORE, cases
from monitored import Monitored
from rig import Rig

ROOT = Path(__file__).parents[2]
HOSTFILES = ROOT / "hostfiles"
# What makes sums independent of where the ranks are: the same number of threads for a rank that is
# alone on its host, and one order of adding up, which neither hosts (han is the collective that
# goes through them) nor a value's place among others (rings) decide.
SAME_SUMS = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "HVKIT_OWN_COLLECTIVES": "0",
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "recursive_doubling",
}
# Several hosts share this machine's cores. The launchers other than hvkit's have to be told.
ENVIRONMENT = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    **SAME_SUMS,
}


def trained(host, launcher, recipe, folder):
    """What a recipe records of each step and epoch, started on a host of the rig."""
    script = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py")]
    flags = ["--dataset", "digits", "--epochs", "1", "--log-interval", "1"]
    flags += ["--output-dir", str(folder)]
    done = host.run([*launcher, *script, *flags], env=ENVIRONMENT, cwd=ROOT, timeout=240)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return Monitored.read(folder)


@pytest.fixture(scope="module")
def on_one_host(_machine, tmp_path_factory):
    """``on_one_host(recipe, ranks)``: what ranks on one host report; found out once."""
    known = {}

    def report(recipe, ranks):
        if (recipe, ranks) not in known:
            launcher = ["hvkit", "run", "-np", str(ranks)]
            folder = tmp_path_factory.mktemp("one_host")
            with Rig(["node1"]) as rig:
                known[recipe, ranks] = trained(rig.host("node1"), launcher, recipe, folder)
        return known[recipe, ranks]

    return report


def launchers(hostfile, ranks):
    hosts = ["-np", str(ranks), "--hostfile", str(hostfile)]
    forwarded = [word for name in ("PATH", *ENVIRONMENT) for word in ("-x", name)]
    return {
        "hvkit": ["hvkit", "run", *hosts],
        "mpirun": ["mpirun", *hosts, "--bind-to", "none", *forwarded],
        "horovodrun": ["horovodrun", *hosts],
    }


def assert_equal(found, expected):
    """The same training to the bit: but for its speed, everything that was recorded."""
    assert len(found.losses) > 5
    assert found.losses == expected.losses
    assert len(found.tests) == 1
    assert found.tests == expected.tests
    assert (found.ranks, found.epochs) == (expected.ranks, expected.epochs)


# Each framework and each launcher.
WAYS = cases([("hvkit", "mnist_torch"), ("mpirun", "mnist_torch"), ("horovodrun", "mnist_tf")])


@pytest.mark.parametrize(("name", "recipe"), WAYS)
def test_on_an_uneven_pair_of_hosts(rig, on_one_host, tmp_path, recipe, name):
    hosts = rig(["node1", "node2"])
    launcher = launchers(HOSTFILES / "uneven_pair", ranks=4)[name]
    assert_equal(trained(hosts.host("node1"), launcher, recipe, tmp_path), on_one_host(recipe, 4))


@MORE
def test_without_mpi_between_the_hosts(rig, on_one_host, tmp_path):
    hosts = rig(["node1", "node2"])
    hostfile = str(HOSTFILES / "uneven_pair")
    launcher = ["hvkit", "run", "--launcher", "gloo", "-np", "4", "--hostfile", hostfile]
    found = trained(hosts.host("node1"), launcher, "mnist_torch", tmp_path)
    expected = on_one_host("mnist_torch", 4)
    # Gloo adds up in another order than MPI; what that rounds off grows with every step.
    assert found.losses.keys() == expected.losses.keys()
    assert len(found.losses) > 5
    for step in range(1, 5):
        assert found.losses[step] == pytest.approx(expected.losses[step], rel=1e-5)
    assert found.ranks == 4
