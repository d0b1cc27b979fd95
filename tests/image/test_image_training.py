"""Training in two containers of the image, over ssh, as the user who is not root."""

import json
import os
from pathlib import Path

import pytest
from containers import containers, keys_in_a_secret
from monitored import Monitored

_MPIRUN = ("mpirun", "-np", "2", "-H", "node1:1,node2:1", "--bind-to", "none")
_HVKIT_RUN = ("hvkit", "run", "-np", "2", "-H", "node1:1,node2:1")


@pytest.fixture
def train(image, tmp_path):
    """``train(launcher, *flags, data=None)`` runs recipes/mnist_torch.py and returns its record.

    The launcher is started in the first of two containers.
    """
    keys = keys_in_a_secret(tmp_path / "keys")

    def train(launcher, *flags, data=None, seconds):
        with containers(image, ["node1", "node2"], keys, data) as (node1, node2):
            node1.serve()
            node2.serve()
            script = ("python", "recipes/mnist_torch.py", "--output-dir", "/tmp/run")
            node1.output(*launcher, *script, *flags, timeout=seconds)
            lines = node1.output("cat", "/tmp/run/metrics.jsonl").splitlines()
        return Monitored.of(lines)

    return train


@pytest.mark.parametrize("launcher", [_MPIRUN, _HVKIT_RUN], ids=["mpirun", "hvkit run"])
def test_two_containers_train_on_digits(train, launcher):
    monitored = train(launcher, "--dataset", "digits", "--epochs", "2", seconds=300)
    assert monitored.ranks == 2
    assert monitored.tests[-1]["test_accuracy"] >= 0.8


def test_two_containers_reach_97_percent_on_mnist_in_one_epoch(train):
    folder = os.environ.get("HVKIT_DATA_DIR")
    assert folder, "set HVKIT_DATA_DIR to the folder with the files of MNIST"
    flags = ("--dataset", "mnist", "--data-dir", "/data", "--epochs", "1")
    monitored = train(_MPIRUN, *flags, data=Path(folder), seconds=1200)
    assert monitored.ranks == 2
    assert monitored.tests[-1]["test_accuracy"] >= 0.97


def test_hvkit_finds_no_fault_with_the_containers(image, tmp_path):
    with containers(image, ["node1", "node2"], keys_in_a_secret(tmp_path / "keys")) as pair:
        for container in pair:
            container.serve()
        pair[0].output("hvkit", "hosts", "-H", "node1:1,node2:1", "--check", timeout=120)


def test_the_doctor_finds_no_problem(image):
    with containers(image, ["node1"]) as (node1,):
        report = json.loads(node1.output("hvkit", "doctor", "--json", timeout=300))
    assert report["problems"] == []
    results = report["self_test"]["results"]
    assert {one["framework"] for one in results} == {"torch", "tensorflow"}
    assert [one["error"] for one in results] == [None] * len(results)
