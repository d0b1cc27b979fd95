"""The MNIST recipes on several hosts train what they train on one."""

import json
import sys
from pathlib import Path

import pytest
from rig import Rig

ROOT = Path(__file__).parents[2]
HOSTFILES = ROOT / "hostfiles"
RECIPES = ("mnist_torch", "mnist_keras", "mnist_tf")
# Several hosts share this machine's cores. The launchers other than hvkit's have to be told.
PATIENT = {"OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def trained(host, launcher, recipe, folder):
    """What a recipe reports of each step and at its end, started on a host of the rig."""
    script = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py")]
    flags = ["--dataset", "digits", "--epochs", "1", "--log-interval", "1"]
    flags += ["--output-dir", str(folder)]
    done = host.run([*launcher, *script, *flags], env=PATIENT, cwd=ROOT, timeout=240)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
    return {
        "hvkit": ["hvkit", "run", *hosts],
        "mpirun": [
            "mpirun",
            *hosts,
            "--bind-to",
            "none",
            "-x",
            "PATH",
            "-x",
            "TF_CPP_MIN_LOG_LEVEL",
        ],
        "horovodrun": ["horovodrun", *hosts],
    }


def assert_same(found, expected):
    """The same training, but for the order in which MPI adds up on one host and on several.

    What that rounds off grows with every step: the first ones agree closely, the end roughly.
    """
    losses, expected_losses = (
        [record["loss"] for record in records if record["event"] == "train"]
        for records in (found, expected)
    )
    assert len(losses) == len(expected_losses) > 5
    assert losses[:4] == pytest.approx(expected_losses[:4], rel=1e-5)
    assert found[-1]["ranks"] == expected[-1]["ranks"]
    assert found[-1]["test_accuracy"] == pytest.approx(expected[-1]["test_accuracy"], abs=0.03)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["hvkit", "mpirun", "horovodrun"])
def test_on_an_uneven_pair_of_hosts(rig, on_one_host, tmp_path, recipe, name):
    hosts = rig(["node1", "node2"])
    launcher = launchers(HOSTFILES / "uneven_pair", ranks=4)[name]
    assert_same(trained(hosts.host("node1"), launcher, recipe, tmp_path), on_one_host(recipe, 4))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["hvkit", "mpirun", "horovodrun"])
def test_on_four_hosts_with_uneven_slots(rig, on_one_host, tmp_path, recipe, name):
    hosts = rig(["node1", "node2", "node3", "node4"])
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        "# the first is larger\n\nnode1 slots=2\nnode2 slots=1 max_slots=2\n"
        "node3 slots=1\nnode4 slots=1\n"
    )
    launcher = launchers(hostfile, ranks=5)[name]
    found = trained(hosts.host("node1"), launcher, recipe, tmp_path / "out")
    assert_same(found, on_one_host(recipe, 5))


def test_without_mpi_between_the_hosts(rig, on_one_host, tmp_path):
    hosts = rig(["node1", "node2"])
    hostfile = str(HOSTFILES / "uneven_pair")
    launcher = ["hvkit", "run", "--launcher", "gloo", "-np", "4", "--hostfile", hostfile]
    found = trained(hosts.host("node1"), launcher, "mnist_torch", tmp_path)
    assert_same(found, on_one_host("mnist_torch", 4))
