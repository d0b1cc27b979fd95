"""The CNN recipes end to end, on the bundled digits, on made-up files and on random images."""

import shutil

import numpy as np
import pytest
from cases import MORE
from launching import ALONE, HOROVODRUN, MPIRUN

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


@pytest.mark.parametrize(
    ("launcher", "recipe"),
    [
        (MPIRUN, "cnn_torch"),
        pytest.param(MPIRUN, "cnn_keras", marks=MORE),
        pytest.param(HOROVODRUN, "cnn_tf", marks=MORE),
    ],
)
def test_two_ranks_learn_and_resume_where_they_were(start, tmp_path, cifar, launcher, recipe):
    folder = tmp_path / "checkpoints"
    flags = (
        *("--data-dir", str(cifar.parent), "--batch-size", "16", "--lr", "0.005"),
        *("--epochs", "2", "--checkpoint-dir", str(folder), "--log-interval", "1"),
    )
    whole = start(launcher, recipe, *flags)
    assert f"256 training and 33 test images: CIFAR-10 from {cifar}" in whole.out
    assert whole.said_more_than_once == []
    losses = [record["loss"] for record in whole.records if record["event"] == "train"]
    assert len(losses) == 16
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    assert 33 * whole.final["test_accuracy"] == pytest.approx(
        round(33 * whole.final["test_accuracy"]), abs=1e-4
    )

    assert checkpoints(folder) == ["step-000000008", "step-000000016"]
    shutil.rmtree(folder / "step-000000016")
    resumed = start(launcher, recipe, *flags)
    assert "epoch 1/2" not in resumed.out
    again = [r["loss"] for r in resumed.records[len(whole.records) :] if r["event"] == "train"]
    assert again == losses[8:]
    assert resumed.final["test_loss"] == whole.final["test_loss"]


@MORE
def test_a_run_on_two_ranks_is_resumed_by_one_with_all_that_saves_bits(start, tmp_path, cifar):
    flags = (
        *("--data-dir", str(cifar), "--checkpoint-dir", str(tmp_path / "checkpoints")),
        *("--precision", "bfloat16", "--compression", "bf16", "--batch-norm", "sync"),
        *("--no-augment", "--schedule", "step"),
    )
    first = start(MPIRUN, "cnn_torch", *flags, "--epochs", "1")
    assert 0.5 < first.records[1]["loss"] < 10
    resumed = start(ALONE, "cnn_torch", *flags, "--epochs", "2")
    assert "saved on 2 ranks; 1 rank now\n" in resumed.err
    assert "epoch 2/2: test accuracy" in resumed.out
    assert checkpoints(tmp_path / "checkpoints") == ["step-000000002", "step-000000006"]


@MORE
def test_a_dry_run_of_fit_alone_trains_and_tests_in_bfloat16(start):
    run = start(ALONE, "cnn_keras", *DIGITS, "--dry-run", "--precision", "bfloat16")
    assert [record["event"] for record in run.records] == ["start", "train", "epoch", "final"]
    assert 0.5 < run.records[1]["loss"] < 10
    assert np.isfinite(run.final["test_loss"])


SHORT = ("--synthetic", "--rounds", "2", "--steps-per-round", "2", "--untimed-steps", "1")


@pytest.mark.parametrize(
    "recipe",
    ["cnn_torch", pytest.param("cnn_keras", marks=MORE), pytest.param("cnn_tf", marks=MORE)],
)
def test_synthetic_measures_each_round_and_their_mean_and_spread(start, recipe):
    # The smallest of images: processors are slow at float16.
    small = ("--image-size", "8", "--batch-size", "2", "--classes", "3", "--precision", "float16")
    run = start(ALONE, recipe, *SHORT, *small)
    rounds = run.final["rounds_by_rank"][0]
    assert len(rounds) == 2
    assert run.final["images_per_second"] == pytest.approx(np.mean(rounds))
    assert run.final["spread"] == pytest.approx(1.96 * np.std(rounds))
    assert f"images/s per rank: {np.mean(rounds):.1f} +- " in run.out


@MORE
def test_synthetic_adds_up_the_ranks(start):
    run = start(
        *(MPIRUN, "cnn_torch", *SHORT),
        *("--model", "resnet50", "--image-size", "64", "--batch-size", "2"),
    )
    first, second = run.final["rounds_by_rank"]
    together = np.add(first, second)
    assert run.final["images_per_second"] == pytest.approx(together.mean())
    assert f"images/s of 2 ranks together: {together.mean():.1f} +- " in run.out
    assert run.said_more_than_once == []


def test_flags_that_do_not_go_together_are_told_once_for_all_ranks(start):
    run = start(MPIRUN, "cnn_torch", "--model", "resnet50", fails=True)
    assert run.err.count("add --synthetic") == 1
