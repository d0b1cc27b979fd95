"""The MNIST recipes end to end, on the bundled digits and on made-up files."""

import re

import numpy as np
import pytest
from cases import MORE, cases
from launching import ALONE, HOROVODRUN, HVKIT, MPIRUN, python, run

DIGITS = ("--dataset", "digits")


@pytest.mark.parametrize(
    ("launcher", "recipe"),
    [(MPIRUN, "mnist_torch"), (MPIRUN, "mnist_flax"), (HOROVODRUN, "mnist_keras")],
)
def test_two_ranks_learn_the_digits_with_default_settings(start, launcher, recipe):
    run = start(launcher, recipe, *DIGITS)
    monitored = run.monitored
    assert monitored.tests[-1]["test_accuracy"] >= 0.95, run.out
    assert (monitored.ranks, monitored.epochs, len(monitored.tests)) == (2, 8, 8)
    assert "epoch 8/8: test accuracy" in run.out
    assert run.said_more_than_once == []


@MORE
def test_a_pipeline_learns_the_digits_and_tests_all_of_them(start):
    flags = *DIGITS, "--epochs", "1", "--mesh", "pipeline=2"
    run = start(MPIRUN, "mnist_torch", *flags)
    assert "1 x 32 images a step, 44 steps an epoch" in run.out
    accuracy = float(re.search(r"test accuracy (\S+),", run.out)[1])
    assert accuracy >= 0.8
    # Both ranks count all images: their mean is that of a whole number of them.
    assert 360 * accuracy == pytest.approx(round(360 * accuracy), abs=0.02)
    assert run.monitored.tests[-1]["test_accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert run.said_more_than_once == []


@MORE
def test_flax_learns_the_digits_in_a_mesh(start):
    run = start(MPIRUN, "mnist_flax", *DIGITS, "--epochs", "2", "--mesh", "tensor=2")
    assert "1 x 32 images a step, 44 steps an epoch" in run.out
    accuracy = run.monitored.tests[-1]["test_accuracy"]
    assert accuracy >= 0.8
    # Both ranks count all images together: it is that of a whole number of them.
    assert 360 * accuracy == pytest.approx(round(360 * accuracy), abs=0.01)
    assert run.said_more_than_once == []


@MORE
@pytest.mark.parametrize("recipe", ["mnist_torch", "mnist_tf"])
def test_two_ranks_learn_in_rounds_and_report_what_they_send(start, recipe):
    words = "--strategy", "LocalSGD:every=4", "--compression", "int8"
    run = start(MPIRUN, recipe, *DIGITS, "--epochs", "2", *words)
    assert run.monitored.tests[-1]["test_accuracy"] >= 0.85, run.out
    assert run.monitored.sent("gradients") == 0
    # 1.2 million weights, a byte each in every fourth step and at the end of an epoch. Uncompressed
    # they would be four times as many, and in every step four times that.
    assert 300e3 < run.monitored.sent("weights") < 500e3


@pytest.mark.parametrize("recipe", cases(["mnist_torch", "mnist_keras", "mnist_tf"]))
def test_a_dry_run_alone_trains_tests_and_records_all(start, recipe):
    run = start(ALONE, recipe, *DIGITS, "--dry-run", "--log-interval", "2")
    monitored = run.monitored
    assert list(monitored.losses) == [2, 3]
    assert [record["learning_rate"] for record in monitored.records] == pytest.approx([0.02, 0.02])
    assert all(record["samples_per_second"] > 0 for record in monitored.records)
    assert (monitored.ranks, monitored.epochs) == (1, 1)
    assert len(monitored.logged) == 1
    (test,) = monitored.tests
    assert test["step"] == 3
    assert 0 < test["test_accuracy"] < 1
    assert 0 < test["test_loss"] < 10
    assert "error" not in monitored.end
    assert "images/s in training" in run.out
    assert "\x1b" not in run.out


@MORE
def test_hvkit_report_shows_the_last_run_in_the_folder(start, tmp_path):
    for launcher in (ALONE, MPIRUN):
        start(launcher, "mnist_torch", *DIGITS, "--dry-run", "--log-interval", "1")
    status, out, err = run([*HVKIT, "report", str(tmp_path / "run")], 60)
    assert status == 0, err
    assert "run: 3 steps" in out
    assert "on 2 ranks of 1 host" in out
    for metric in ("loss", "test_accuracy", "test_loss"):
        assert f"\n{metric} " in out
    assert "an earlier run of 3 steps in this folder is not shown" in out
    assert "no end is recorded" not in out


@MORE
def test_an_output_dir_that_cannot_be_written_ends_all_ranks_with_one_reason(start, tmp_path):
    (tmp_path / "run").write_text("")
    run = start(MPIRUN, "mnist_torch", *DIGITS, "--dry-run", fails=True)
    assert run.err.count(f"the monitor cannot write into {tmp_path / 'run'} (File exists)") == 1
    assert run.err.count("hvkit: rank 1 ends with the same HvkitError as rank 0") == 1
    assert run.status == 1


def test_a_wrong_flag_is_told_once_for_all_ranks(start):
    run = start(MPIRUN, "mnist_torch", *DIGITS, "--lr", "-1", fails=True)
    assert run.err.count("--lr: must be a positive number, got '-1'") == 1


@MORE
def test_missing_files_are_told_once_for_all_ranks(start, tmp_path):
    run = start(MPIRUN, "mnist_torch", "--data-dir", str(tmp_path), fails=True)
    assert run.err.count(f"error on rank 0: {tmp_path}: no train-images-idx3-ubyte") == 1
    assert run.monitored is None


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


@MORE
def test_two_ranks_train_on_the_files_of_a_data_dir(start, tmp_path):
    folder = write_mnist(tmp_path / "files")
    run = start(MPIRUN, "mnist_tf", "--data-dir", str(folder), "--dry-run")
    assert f"100 training and 20 test images: MNIST from {folder}" in run.out
    assert (run.monitored.ranks, run.monitored.epochs) == (2, 1)


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
