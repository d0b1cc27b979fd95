"""The report of a run, and its metrics.jsonl."""

import io
import json
import sys

import common
import numpy as np
import pytest
from common.images import Dataset, Images

import hvkit
from hvkit.communication.traffic import Sent

STEPS = 3


def flags(*arguments):
    return common.parse_flags("A recipe.", arguments)


@pytest.fixture
def data():
    def images(n):
        return Images(np.zeros((n, 28, 28), np.uint8), np.arange(n) % 10)

    return Dataset(images(100), images(7), "made up")


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
    with common.Report(chosen, data, steps=3) as report:
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
        "bytes_per_step": {},
    }
    said = capsys.readouterr().out
    assert "epoch 2/2: test accuracy 0.9000" in said
    assert "\x1b" not in said


def test_the_final_record_has_the_bytes_of_a_step_by_purpose(tmp_path, data, monkeypatch, capsys):
    before = {"start": Sent(500, 1), "gradients": Sent(100, 1)}
    after = before | {"gradients": Sent(30_100, 4), "checks": Sent(60, 1)}
    monkeypatch.setattr(hvkit, "traffic", iter([before, after, after]).__next__)
    with common.Report(flags("--output-dir", str(tmp_path)), data, STEPS) as report:
        run(report, [3.0, 2.0, 1.0])
    assert records(tmp_path)[-1]["bytes_per_step"] == {"gradients": 10_000, "checks": 20}
    assert (
        "in a step, on average: 10.0 kB of gradients, 0.0 kB of checks" in capsys.readouterr().out
    )


def test_training_time_leaves_out_the_evaluation(tmp_path, data, monkeypatch):
    clock = iter([100.0, 102.0, 200.0, 204.0])
    monkeypatch.setattr(common.report.time, "perf_counter", lambda: next(clock))
    chosen = flags("--output-dir", str(tmp_path), "--epochs", "2", "--batch-size", "50")
    with common.Report(chosen, data, 2) as report:
        run(report, [1.0, 1.0])
        run(report, [1.0, 1.0])
    assert records(tmp_path)[-1]["images_per_second"] == 2 * 100 / (2 + 4)


def test_records_are_on_disk_as_soon_as_they_are_reported(tmp_path, data):
    with common.Report(flags("--output-dir", str(tmp_path)), data, STEPS) as report:
        run(report, [1.0] * report.steps)
        assert records(tmp_path)[-1]["event"] == "epoch"


def test_a_run_that_resumes_adds_to_the_metrics_and_counts_on(tmp_path, data, capsys):
    chosen = flags("--output-dir", str(tmp_path), "--epochs", "3")
    with common.Report(chosen, data, STEPS) as report:
        run(report, [1.0] * STEPS)
    with common.Report(chosen, data, STEPS, first_epoch=1) as report:
        run(report, [1.0] * STEPS)
    written = [(record["event"], record.get("epoch")) for record in records(tmp_path)]
    assert written == [
        *(("start", None), ("train", 1), ("epoch", 1), ("final", None)),
        *(("start", None), ("train", 2), ("epoch", 2), ("final", None)),
    ]
    assert "epoch 2/3: test accuracy" in capsys.readouterr().out


def test_a_run_that_was_done_before_says_so(tmp_path, data, capsys):
    with common.Report(flags("--output-dir", str(tmp_path)), data, STEPS, first_epoch=8):
        pass
    assert "all 8 epochs were done before" in capsys.readouterr().out
    assert records(tmp_path)[-1]["images_per_second"] is None


def test_a_loss_that_is_no_number_becomes_null(tmp_path, data):
    with common.Report(flags("--output-dir", str(tmp_path), "--dry-run"), data, STEPS) as report:
        run(report, [float("nan")] * 3, test=(float("inf"), 0.1))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert records(tmp_path)[1]["loss"] is None
    assert records(tmp_path)[-1]["test_loss"] is None


def test_a_run_that_fails_has_no_final_record(tmp_path, data):
    report = common.Report(flags("--output-dir", str(tmp_path)), data, STEPS)
    with pytest.raises(ValueError, match="could not convert"), report:
        run(report, ["no loss"] * report.steps)
    assert [record["event"] for record in records(tmp_path)] == ["start"]


def test_an_output_dir_that_cannot_be_written_ends_with_the_reason(tmp_path, data, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        common.Report(flags("--output-dir", str(tmp_path / "file")), data, STEPS)
    assert f"error: --output-dir {tmp_path / 'file'}: File exists" in capsys.readouterr().err


def test_the_loss_is_read_from_the_device_only_where_it_is_reported(data):
    class Loss:
        read = 0

        def __float__(self):
            Loss.read += 1
            return 1.0

    with common.Report(flags("--log-interval", "2", "--batch-size", "20"), data, 5) as report:
        run(report, [Loss()] * 5)
    assert Loss.read == 3


def test_other_ranks_than_0_print_nothing_and_write_nothing(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setattr(hvkit, "rank", lambda: 1)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    with common.Report(flags("--output-dir", str(tmp_path)), data, STEPS) as report:
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
    with common.Report(flags("--epochs", "1"), data, STEPS) as report:
        run(report, [1.0] * report.steps)
    assert "━" in screen.getvalue()


def test_the_pseudo_terminal_of_a_launcher_whose_output_goes_to_a_file_is_none(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    monkeypatch.setattr(common.ranks.os, "readlink", lambda path: "/home/someone/run.log")
    assert not common.ranks.on_terminal()
    monkeypatch.setattr(common.ranks.os, "readlink", lambda path: "/dev/pts/3")
    assert common.ranks.on_terminal()
