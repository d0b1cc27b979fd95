"""The CNN recipes end to end, on the bundled digits, on made-up files and on random images."""

import re
import shutil
import sys

import numpy as np
import pytest
from cases import MORE
from launching import ALONE, HOROVODRUN, MPIRUN, python, run
from monitored import Monitored

DIGITS = ("--dataset", "digits")


@pytest.fixture
def cifar(tmp_path):
    """A folder like CIFAR-10's, with 256 training and 33 test images, brighter by their label."""
    folder = tmp_path / "files" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, number in (("data_batch_4.bin", 256), ("test_batch.bin", 33)):
        labels = np.arange(number) % 10
        pixels = random.integers(30, size=(number, 3072)) + 25 * labels[:, None]
        (folder / name).write_bytes(np.hstack([labels[:, None], pixels]).astype(np.uint8).tobytes())
    return folder


def checkpoints(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def learns(start, launcher, recipe, flags, cifar):
    """Two ranks train two epochs of 8 steps; returns the run, which has learnt."""
    whole = start(launcher, recipe, *flags)
    assert f"256 training and 33 test images: CIFAR-10 from {cifar}" in whole.out
    assert whole.said_more_than_once == []
    assert list(whole.monitored.losses) == [*range(1, 17)]
    in_order = list(whole.monitored.losses.values())
    assert np.mean(in_order[-4:]) < 0.9 * np.mean(in_order[:4])
    right = 33 * whole.monitored.tests[-1]["test_accuracy"]
    assert right == pytest.approx(round(right), abs=1e-4)
    return whole


def flags_for(cifar, folder):
    return (
        *("--data-dir", str(cifar.parent), "--batch-size", "16", "--lr", "0.005"),
        *("--epochs", "2", "--checkpoint-dir", str(folder), "--log-interval", "1"),
    )


def test_two_ranks_learn_and_resume_where_they_were(start, tmp_path, cifar):
    folder = tmp_path / "checkpoints"
    flags = flags_for(cifar, folder)
    whole = learns(start, MPIRUN, "cnn_torch", flags, cifar)
    assert checkpoints(folder) == ["step-000000008", "step-000000016"]
    shutil.rmtree(folder / "step-000000016")
    resumed = start(MPIRUN, "cnn_torch", *flags)
    assert "epoch 1/2" not in resumed.out
    assert resumed.monitored.start["step"] == 8
    losses = whole.monitored.losses
    assert resumed.monitored.losses == {n: losses[n] for n in range(9, 17)}
    assert resumed.monitored.tests == whole.monitored.tests[1:]


@MORE
def test_ranks_of_a_pipeline_augment_their_images_equally(start, cifar):
    mesh = "--mesh", "pipeline=2", "--microbatches", "2"
    files = "--data-dir", str(cifar.parent), "--epochs", "1"
    run = start(MPIRUN, "cnn_torch", *files, *mesh, output_dir=None)
    assert "1 x 64 images a step, 4 steps an epoch" in run.out
    assert "epoch 1/1: test accuracy" in run.out


@MORE
def test_two_ranks_learn_in_a_custom_loop_of_tensorflow(start, tmp_path, cifar):
    folder = tmp_path / "checkpoints"
    learns(start, HOROVODRUN, "cnn_tf", flags_for(cifar, folder), cifar)
    assert checkpoints(folder) == ["step-000000008", "step-000000016"]


# Runs the script that its first argument names, and ends it in the first save.
KILLED_IN_SAVE = """
import os, runpy, sys, hvkit
hvkit.Checkpoint.save = lambda *args, **kwargs: os._exit(9)
script = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


@MORE
@pytest.mark.parametrize("recipe", ["cnn_torch", "cnn_tf", "cnn_keras"])
def test_an_epoch_is_tested_before_it_is_saved(tmp_path, cifar, recipe):
    command = [sys.executable, "-c", KILLED_IN_SAVE, python(recipe)[-1]]
    flags = "--data-dir", str(cifar), "--epochs", "2", "--batch-size", "32"
    folders = "--checkpoint-dir", str(tmp_path / "saved"), "--output-dir", str(tmp_path / "run")
    status, _, err = run([*command, *flags, *folders], 120)
    assert status == 9, err
    assert [test["step"] for test in Monitored.read(tmp_path / "run").tests] == [8]


@MORE
def test_a_run_on_two_ranks_is_resumed_by_one_with_all_that_saves_bits(start, tmp_path, cifar):
    flags = (
        *("--data-dir", str(cifar), "--checkpoint-dir", str(tmp_path / "checkpoints")),
        *("--precision", "bfloat16", "--compression", "bf16", "--batch-norm", "sync"),
        *("--no-augment", "--schedule", "step"),
    )
    first = start(MPIRUN, "cnn_torch", *flags, "--epochs", "1")
    assert all(0.5 < loss < 10 for loss in first.monitored.losses.values())
    assert first.monitored.ranks == 2
    resumed = start(ALONE, "cnn_torch", *flags, "--epochs", "2")
    assert "saved on 2 ranks; 1 rank now\n" in resumed.err
    assert "epoch 2/2: test accuracy" in resumed.out
    assert (resumed.monitored.start["step"], resumed.monitored.records[-1]["step"]) == (2, 6)
    assert checkpoints(tmp_path / "checkpoints") == ["step-000000002", "step-000000006"]


@MORE
def test_a_dry_run_of_fit_alone_trains_and_tests_in_bfloat16(start):
    run = start(ALONE, "cnn_keras", *DIGITS, "--dry-run", "--precision", "bfloat16")
    (loss,) = run.monitored.losses.values()
    assert 0.5 < loss < 10
    (test,) = run.monitored.tests
    assert np.isfinite(test["test_loss"])


def said(run, of_whom):
    """The mean and the spread that a recipe prints at the end."""
    found = re.search(rf"images/s {of_whom}: (\S+) \+- (\S+)", run.out)
    return float(found[1]), float(found[2])


SHORT = ("--synthetic", "--rounds", "2", "--steps-per-round", "2", "--untimed-steps", "1")


@pytest.mark.parametrize(
    "recipe",
    ["cnn_torch", pytest.param("cnn_keras", marks=MORE), pytest.param("cnn_tf", marks=MORE)],
)
def test_synthetic_measures_each_round_and_their_mean_and_spread(start, recipe):
    # The smallest of images: processors are slow at float16.
    small = ("--image-size", "8", "--batch-size", "2", "--classes", "3", "--precision", "float16")
    run = start(ALONE, recipe, *SHORT, *small, output_dir=None)
    rounds = [float(rate) for rate in re.findall(r"round ./2: (\S+) images/s on rank 0", run.out)]
    assert len(rounds) == 2
    mean, spread = said(run, "per rank")
    assert mean == pytest.approx(np.mean(rounds), abs=0.11)
    assert spread == pytest.approx(1.96 * np.std(rounds), abs=0.2)
    assert said(run, "of 1 ranks together") == (mean, spread)


@MORE
def test_synthetic_adds_up_the_ranks(start):
    run = start(
        *(MPIRUN, "cnn_torch", *SHORT),
        *("--model", "resnet50", "--image-size", "64", "--batch-size", "2"),
        output_dir=None,
    )
    together, _ = said(run, "of 2 ranks together")
    per_rank, _ = said(run, "per rank")
    assert together == pytest.approx(2 * per_rank, abs=0.16)
    assert together > 0
    assert run.said_more_than_once == []


@MORE
def test_flags_that_do_not_go_together_are_told_once_for_all_ranks(start):
    run = start(MPIRUN, "cnn_torch", "--model", "resnet50", fails=True)
    assert run.err.count("add --synthetic") == 1
