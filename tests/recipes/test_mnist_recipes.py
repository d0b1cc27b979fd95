"""The MNIST recipes end to end, on the bundled digits and on made-up files."""

import numpy as np
import pytest
from cases import MORE, cases
from launching import ALONE, HOROVODRUN, MPIRUN, python

DIGITS = ("--dataset", "digits")


@pytest.mark.parametrize(
    ("launcher", "recipe"),
    [
        (MPIRUN, "mnist_torch"),
        pytest.param(MPIRUN, "mnist_keras", marks=MORE),
        pytest.param(HOROVODRUN, "mnist_tf", marks=MORE),
    ],
)
def test_two_ranks_learn_the_digits_with_default_settings(start, launcher, recipe):
    run = start(launcher, recipe, *DIGITS)
    assert run.final["test_accuracy"] >= 0.95, run.out
    assert (run.final["ranks"], run.final["epochs"]) == (2, 8)
    assert "epoch 8/8: test accuracy" in run.out
    assert run.said_more_than_once == []


@MORE
@pytest.mark.parametrize("recipe", ["mnist_keras", "mnist_torch", "mnist_tf"])
def test_two_ranks_learn_in_rounds_and_report_what_they_send(start, recipe):
    words = "--strategy", "LocalSGD:every=4", "--compression", "int8"
    run = start(MPIRUN, recipe, *DIGITS, "--epochs", "2", *words)
    assert run.final["test_accuracy"] >= 0.85, run.out
    sent = run.final["bytes_per_step"]
    assert "gradients" not in sent
    # 1.2 million weights, a byte each in every fourth step and at the end of an epoch. Uncompressed
    # they would be four times as many, and in every step four times that.
    assert 300e3 < sent["weights"] < 500e3


@pytest.mark.parametrize("recipe", cases(["mnist_keras", "mnist_torch", "mnist_tf"]))
def test_a_dry_run_alone_trains_tests_and_writes_all_records(start, recipe):
    run = start(ALONE, recipe, *DIGITS, "--dry-run", "--log-interval", "2")
    assert [(r["event"], r.get("step")) for r in run.records] == [
        ("start", None),
        ("train", 2),
        ("train", 3),
        ("epoch", None),
        ("final", None),
    ]
    assert run.final.keys() == {
        "event",
        "test_accuracy",
        "test_loss",
        "epochs",
        "ranks",
        "images_per_second",
        "bytes_per_step",
    }
    assert (run.final["ranks"], run.final["epochs"]) == (1, 1)
    assert 0 < run.final["test_accuracy"] < 1
    assert run.final["images_per_second"] > 0
    assert "\x1b" not in run.out


@MORE
def test_fit_and_the_custom_loop_train_the_same_network(start):
    fit, loop = (
        start(ALONE, recipe, *DIGITS, "--epochs", "2").final
        for recipe in ("mnist_keras", "mnist_tf")
    )
    # In another order of the images, though.
    assert fit["test_accuracy"] == pytest.approx(loop["test_accuracy"], abs=0.03)
    assert fit["test_loss"] == pytest.approx(loop["test_loss"], rel=0.3)


def test_a_wrong_flag_is_told_once_for_all_ranks(start):
    run = start(MPIRUN, "mnist_torch", *DIGITS, "--lr", "-1", fails=True)
    assert run.err.count("--lr: must be a positive number, got '-1'") == 1


def test_missing_files_are_told_once_for_all_ranks(start, tmp_path):
    run = start(MPIRUN, "mnist_torch", "--data-dir", str(tmp_path), fails=True)
    assert run.err.count(f"error on rank 0: {tmp_path}: no train-images-idx3-ubyte") == 1
    assert run.records == []


def write_mnist(folder, seed=0):
    """Four files like MNIST's, with 100 training and 20 test images of noise."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    for name, shape, values in (
        ("train-images-idx3-ubyte", (100, 28, 28), 256),
        ("train-labels-idx1-ubyte", (100,), 10),
        ("t10k-images-idx3-ubyte", (20, 28, 28), 256),
        ("t10k-labels-idx1-ubyte", (20,), 10),
    ):
        header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
        content = random.integers(values, size=shape, dtype=np.uint8).tobytes()
        (folder / name).write_bytes(header + content)
    return folder


def test_two_ranks_train_on_the_files_of_a_data_dir(start, tmp_path):
    folder = write_mnist(tmp_path / "files")
    run = start(MPIRUN, "mnist_tf", "--data-dir", str(folder), "--dry-run")
    assert f"100 training and 20 test images: MNIST from {folder}" in run.out
    assert (run.final["ranks"], run.final["epochs"]) == (2, 1)


def rank_0_with(folder):
    """Launches two ranks, the first with ``--data-dir folder``, the second with the flags given."""
    rank_0 = [*python("mnist_torch"), "--data-dir", str(folder)]
    return ("mpirun", "-np", "1", *rank_0, ":", "-np", "1")


@MORE
def test_ranks_with_different_images_all_end(start, tmp_path):
    ours, theirs = write_mnist(tmp_path / "ours"), write_mnist(tmp_path / "theirs", seed=1)
    run = start(rank_0_with(ours), "mnist_torch", "--data-dir", str(theirs), fails=True)
    told = f"error on rank 1: its images (MNIST from {theirs}) are not those of rank 0"
    assert run.err.count(told) == 1


@MORE
def test_a_rank_whose_file_is_damaged_ends_all(start, tmp_path):
    ours, theirs = write_mnist(tmp_path / "ours"), write_mnist(tmp_path / "theirs")
    damaged = theirs / "t10k-labels-idx1-ubyte"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run = start(rank_0_with(ours), "mnist_torch", "--data-dir", str(theirs), fails=True)
    assert run.err.count(f"error on rank 1: {damaged}: truncated") == 1
