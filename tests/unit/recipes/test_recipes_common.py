"""Flags, the data split, and the report, in one process."""

import io
import json
import sys

import common
import numpy as np
import pytest
from mnist_data import Dataset, Images

import hvkit


def flags(*arguments):
    return common.parse_flags("A recipe.", arguments)


@pytest.fixture
def data():
    def images(n):
        return Images(np.zeros((n, 28, 28), np.uint8), np.arange(n) % 10)

    return Dataset(images(100), images(7), "made up")


def test_defaults_suit_every_recipe():
    chosen = flags()
    assert (chosen.batch_size, chosen.epochs, chosen.lr, chosen.momentum) == (32, 8, 0.02, 0.9)
    assert chosen.dataset == "auto"
    assert not chosen.dry_run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch-size", "0"], "--batch-size: must be a positive whole number, got '0'"),
        (["--batch-size", "1.5"], "--batch-size: must be a positive whole number, got '1.5'"),
        (["--test-batch-size", "-1"], "--test-batch-size: must be a positive whole number"),
        (["--epochs", "none"], "--epochs: must be a positive whole number, got 'none'"),
        (["--log-interval", "0"], "--log-interval: must be a positive whole number"),
        (["--lr", "0"], "--lr: must be a positive number, got '0'"),
        (["--lr", "inf"], "--lr: must be a positive number, got 'inf'"),
        (["--lr", "nan"], "--lr: must be a positive number, got 'nan'"),
        (["--momentum", "1"], "--momentum: must be a number from 0 to below 1, got '1'"),
        (["--seed", "-3"], "--seed: must be a whole number from 0 to 2147483647, got '-3'"),
        (["--dataset", "cifar"], "--dataset: invalid choice: 'cifar'"),
        (["--dataset", "digits", "--data-dir", "x"], "does not read --data-dir x"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--learning-rate", "3"], "unrecognized arguments: --learning-rate 3"),
    ],
)
def test_a_wrong_flag_is_an_error_that_names_the_value_and_what_is_accepted(
    arguments, complaint, capsys
):
    with pytest.raises(SystemExit) as end:
        flags(*arguments)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_dry_run_is_one_epoch_of_three_steps(data):
    short = flags("--dry-run", "--epochs", "5", "--batch-size", "10")
    assert short.epochs == 1
    assert common.train_batches(short, data.train, epoch=0).shape == (3, 10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_together_take_the_steps_of_one_process_with_the_larger_batch(size):
    alone = common.split_epoch(1000, 8 * size, seed=1, epoch=2, rank=0, size=1)
    ranks = [common.split_epoch(1000, 8, seed=1, epoch=2, rank=r, size=size) for r in range(size)]
    np.testing.assert_array_equal(np.concatenate(ranks, axis=1), alone)


def test_an_epoch_takes_no_row_twice_and_drops_less_than_one_step():
    rows = [common.split_epoch(1000, 7, seed=1, epoch=0, rank=r, size=3) for r in range(3)]
    taken = np.concatenate([r.ravel() for r in rows])
    assert len(taken) == len(set(taken.tolist())) == 1000 // 21 * 21


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else():
    def order(seed, epoch):
        return common.split_epoch(100, 10, seed, epoch, rank=0, size=1).tolist()

    assert order(1, 1) == order(1, 1)
    assert order(1, 1) != order(1, 2)
    assert order(1, 1) != order(2, 1)


@pytest.mark.parametrize(("samples", "size"), [(10, 3), (360, 4), (3, 3), (10000, 7)])
def test_parts_of_the_ranks_cover_the_test_set_without_overlap(samples, size):
    parts = [common.part_of_rank(samples, r, size) for r in range(size)]
    rows = [row for part in parts for row in range(part.start, part.stop)]
    lengths = {part.stop - part.start for part in parts}
    assert rows == list(range(samples))
    assert max(lengths) - min(lengths) <= 1


def test_results_of_unequal_parts_are_weighted_by_their_images(monkeypatch):
    sums = [(6.0, 2, 3), (1.0, 1, 1)]
    monkeypatch.setattr(hvkit, "allgather", lambda obj: sums)
    assert common.over_all_ranks(*sums[0]) == (7 / 4, 3 / 4)


def test_too_large_a_batch_ends_with_what_there_is_and_the_fix(capsys):
    with pytest.raises(SystemExit) as end:
        common.load_data(flags("--dataset", "digits", "--batch-size", "2000"))
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "1437 training images are too few for one step of 2000" in said
    assert "smaller --batch-size" in said


def test_missing_data_ends_with_the_reason_alone(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        common.load_data(flags("--data-dir", str(tmp_path)))
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no train-images-idx3-ubyte")


def ranks_that_hold(monkeypatch, digest):
    """Rank 1 of two, whose rank 0 holds images with ``digest``."""
    monkeypatch.setattr(hvkit, "rank", lambda: 1)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    monkeypatch.setattr(hvkit, "broadcast", lambda obj: (digest, "MNIST from elsewhere"))
    problems = []
    monkeypatch.setattr(hvkit, "allgather", lambda obj: problems.append(obj) or [None, obj])
    return problems


def test_a_rank_with_other_images_than_rank_0_ends_the_run(monkeypatch):
    problems = ranks_that_hold(monkeypatch, digest="another")
    with pytest.raises(SystemExit):
        common.load_data(flags("--dataset", "digits"))
    assert "not those of rank 0 (MNIST from elsewhere)" in problems[-1]


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(report, losses, test=(0.5, 0.25)):
    report.start_epoch()
    for loss in losses:
        report.step(loss)
    report.end_epoch(*test)


def test_metrics_hold_one_record_an_event_and_end_with_the_final_one(tmp_path, data, capsys):
    chosen = flags(
        *("--output-dir", str(tmp_path / "new" / "folder"), "--epochs", "2"),
        *("--log-interval", "2", "--batch-size", "30"),
    )
    with common.Report(chosen, data) as report:
        assert report.steps == 3
        run(report, [3.0, 2.0, 1.0])
        run(report, [1.0, 0.5, 0.25], test=(0.1, 0.9))
    start, *middle, final = records(tmp_path / "new" / "folder")
    assert start["event"] == "start"
    assert start["flags"]["batch_size"] == 30
    assert [(r["event"], r["epoch"], r.get("step"), r.get("loss")) for r in middle] == [
        ("train", 1, 2, 2.0),
        ("train", 1, 3, 1.0),
        ("epoch", 1, None, None),
        ("train", 2, 2, 0.5),
        ("train", 2, 3, 0.25),
        ("epoch", 2, None, None),
    ]
    assert final.pop("images_per_second") > 0
    assert final == {
        "event": "final",
        "test_accuracy": 0.9,
        "test_loss": 0.1,
        "epochs": 2,
        "ranks": 1,
    }
    said = capsys.readouterr().out
    assert "epoch 2/2: test accuracy 0.9000" in said
    assert "\x1b" not in said


def test_training_time_leaves_out_the_evaluation(tmp_path, data, monkeypatch):
    clock = iter([100.0, 102.0, 200.0, 204.0])
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(clock))
    chosen = flags("--output-dir", str(tmp_path), "--epochs", "2", "--batch-size", "50")
    with common.Report(chosen, data) as report:
        run(report, [1.0, 1.0])
        run(report, [1.0, 1.0])
    assert records(tmp_path)[-1]["images_per_second"] == 2 * 100 / (2 + 4)


def test_records_are_on_disk_as_soon_as_they_are_reported(tmp_path, data):
    with common.Report(flags("--output-dir", str(tmp_path)), data) as report:
        run(report, [1.0] * report.steps)
        assert records(tmp_path)[-1]["event"] == "epoch"


def test_a_loss_that_is_no_number_becomes_null(tmp_path, data):
    with common.Report(flags("--output-dir", str(tmp_path), "--dry-run"), data) as report:
        run(report, [float("nan")] * 3, test=(float("inf"), 0.1))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert records(tmp_path)[1]["loss"] is None
    assert records(tmp_path)[-1]["test_loss"] is None


def test_a_run_that_fails_has_no_final_record(tmp_path, data):
    report = common.Report(flags("--output-dir", str(tmp_path)), data)
    with pytest.raises(ValueError, match="could not convert"), report:
        run(report, ["no loss"] * report.steps)
    assert [record["event"] for record in records(tmp_path)] == ["start"]


def test_an_output_dir_that_cannot_be_written_ends_with_the_reason(tmp_path, data, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        common.Report(flags("--output-dir", str(tmp_path / "file")), data)
    assert f"error: --output-dir {tmp_path / 'file'}: File exists" in capsys.readouterr().err


def test_the_loss_is_read_from_the_device_only_where_it_is_reported(data):
    class Loss:
        read = 0

        def __float__(self):
            Loss.read += 1
            return 1.0

    with common.Report(flags("--log-interval", "2", "--batch-size", "20"), data) as report:
        run(report, [Loss()] * 5)
    assert Loss.read == 3


def test_other_ranks_than_0_print_nothing_and_write_nothing(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setattr(hvkit, "rank", lambda: 1)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    with common.Report(flags("--output-dir", str(tmp_path)), data) as report:
        run(report, [1.0] * report.steps)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_shows_a_progress_bar(data, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    with common.Report(flags("--epochs", "1"), data) as report:
        run(report, [1.0] * report.steps)
    assert "━" in screen.getvalue()


def test_the_pseudo_terminal_of_a_launcher_whose_output_goes_to_a_file_is_none(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    monkeypatch.setattr(common.os, "readlink", lambda path: "/home/someone/run.log")
    assert not common.on_terminal()
    monkeypatch.setattr(common.os, "readlink", lambda path: "/dev/pts/3")
    assert common.on_terminal()
