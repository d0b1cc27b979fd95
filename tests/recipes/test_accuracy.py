"""What the recipes reach on real images, on two ranks; minutes each, so ``make accuracy`` runs it.

``$HVKIT_DATA_DIR`` must name a folder with the files of MNIST and of CIFAR-10 (10,000 training
images are enough), in it or in the subfolders ``mnist`` and ``cifar10-subset``.
"""

import os

import pytest
from launching import MPIRUN

pytestmark = pytest.mark.accuracy


@pytest.fixture
def folder():
    named = os.environ.get("HVKIT_DATA_DIR")
    assert named, "set HVKIT_DATA_DIR to the folder with the files of MNIST and CIFAR-10"
    return named


@pytest.mark.parametrize("recipe", ["mnist_torch", "mnist_keras", "mnist_tf"])
def test_two_ranks_reach_97_percent_in_one_epoch_and_99_with_default_settings(
    start, recipe, folder
):
    run = start(MPIRUN, recipe, "--dataset", "mnist", "--data-dir", folder, seconds=1800)
    print(run.out)
    # A run of one epoch is this run's first: nothing in an epoch depends on how many follow.
    tests = run.monitored.tests
    assert tests[0]["test_accuracy"] >= 0.97
    assert tests[-1]["test_accuracy"] >= 0.99
    assert run.monitored.ranks == 2


@pytest.mark.parametrize("recipe", ["cnn_torch", "cnn_keras", "cnn_tf"])
def test_two_ranks_reach_55_percent_on_cifar10_with_default_settings(start, recipe, folder):
    run = start(MPIRUN, recipe, "--dataset", "cifar10", "--data-dir", folder, seconds=1800)
    print(run.out)
    assert run.monitored.tests[-1]["test_accuracy"] >= 0.55
    assert run.monitored.ranks == 2
