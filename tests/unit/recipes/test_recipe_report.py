"""The report of a run, and what its monitor records."""

import io
import sys

import common
import numpy as np
import pytest
from common.images import Dataset, Images
from monitored import Monitored

import hvkit
from hvkit.errors import HvkitError
from hvkit.transport.traffic import Sent

STEPS = 3


def flags(*arguments):
    return common.parse_flags("A recipe.", arguments)


@pytest.fixture
def data():
    def images(n):
        return Images(np.zeros((n, 28, 28), np.uint8), np.arange(n) % 10)

    return Dataset(images(100), images(7), "made up")


def report_of(*arguments, data, steps=STEPS, first_epoch=0):
    chosen = flags(*arguments)
    return common.Report(chosen, data, steps, common.make_monitor(chosen, steps), first_epoch)


def run(report, losses, test=(0.5, 0.25)):
    report.start_epoch()
    for loss in report.batches(losses):
        report.step(loss)
    report.end_epoch(*test)


def test_the_monitor_records_the_loss_and_the_test_of_each_epoch(tmp_path, data, capsys):
    folder = tmp_path / "new" / "folder"
    arguments = "--output-dir", str(folder), "--epochs", "2", "--log-interval", "2"
    with report_of(*arguments, data=data) as report:
        run(report, [3.0, 2.0, 1.0])
        run(report, [1.0, 0.5, 0.25], test=(0.1, 0.9))
    monitored = Monitored.read(folder)
    assert monitored.losses == {2: 2.5, 3: 1.0, 5: 0.75, 6: 0.25}
    assert [record["epoch"] for record in monitored.records] == [0, 0, 1, 1]
    assert monitored.tests == [
        {"step": 3, "test_loss": 0.5, "test_accuracy": 0.25},
        {"step": 6, "test_loss": 0.1, "test_accuracy": 0.9},
    ]
    assert "error" not in monitored.end
    said = capsys.readouterr().out
    assert "epoch 2/2: test accuracy 0.9000" in said
    assert "\x1b" not in said


def test_an_epoch_of_fewer_steps_than_the_log_interval_is_one_record(tmp_path, data):
    with report_of("--output-dir", str(tmp_path), data=data) as report:
        run(report, [3.0, 2.0, 1.0])
        # It is on disk as soon as it is reported.
        monitored = Monitored.read(tmp_path)
        assert (monitored.losses, len(monitored.tests), monitored.end) == ({3: 2.0}, 1, {})
        run(report, [1.0, 0.5, 0.0])
    assert Monitored.read(tmp_path).losses == {3: 2.0, 6: 0.5}


def test_without_an_output_dir_there_is_no_monitor():
    assert common.make_monitor(flags(), STEPS) is None


def test_the_end_says_the_bytes_of_a_step_by_purpose_the_most_first(data, monkeypatch, capsys):
    before = {"start": Sent(500, 1), "gradients": Sent(100, 1)}
    after = {"checks": Sent(300, 1), **before, "gradients": Sent(30_100, 4), "few": Sent(60, 1)}
    monkeypatch.setattr(hvkit, "traffic", iter([before, after]).__next__)
    with report_of(data=data) as report:
        run(report, [3.0, 2.0, 1.0])
    said = capsys.readouterr().out
    assert "in a step, on average: 10.0 kB of gradients, 0.1 kB of checks\n" in said


def test_training_time_leaves_out_the_evaluation(data, monkeypatch, capsys):
    clock = iter([100.0, 102.0, 200.0, 204.0])
    monkeypatch.setattr(common.report.time, "perf_counter", lambda: next(clock))
    with report_of("--epochs", "2", "--batch-size", "60", data=data, steps=2) as report:
        run(report, [1.0, 1.0])
        run(report, [1.0, 1.0])
    rate = 2 * 120 / (2 + 4)
    assert f"{rate:.0f} images/s in training" in capsys.readouterr().out


def test_a_run_that_resumes_counts_epochs_on(data, capsys):
    with report_of("--epochs", "3", data=data, first_epoch=1) as report:
        run(report, [1.0] * STEPS)
    assert "epoch 2/3: test accuracy" in capsys.readouterr().out
    with report_of(data=data, first_epoch=8):
        pass
    assert "the checkpoint has all 8 epochs" in capsys.readouterr().out


def test_a_loss_that_is_no_number_becomes_null(tmp_path, data):
    with report_of("--output-dir", str(tmp_path), "--dry-run", data=data) as report:
        run(report, [float("nan")] * 3, test=(float("inf"), 0.1))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    monitored = Monitored.read(tmp_path)
    assert monitored.losses == {3: None}
    assert monitored.tests[0]["test_loss"] is None


def test_a_run_that_fails_ends_with_its_error(tmp_path, data):
    report = report_of("--output-dir", str(tmp_path), "--log-interval", "1", data=data)
    with pytest.raises(ValueError, match="could not convert"), report:
        run(report, [1.0, 1.0, "no loss"])
    monitored = Monitored.read(tmp_path)
    assert list(monitored.losses) == [1, 2]
    assert "could not convert" in monitored.end["error"]


def test_an_output_dir_that_cannot_be_written_ends_with_the_reason(tmp_path, data):
    (tmp_path / "file").write_text("")
    report = report_of("--output-dir", str(tmp_path / "file"), data=data)
    with pytest.raises(HvkitError, match=r"cannot write into .*/file \(File exists\)"), report:
        run(report, [1.0] * report.steps)


def test_the_loss_is_read_from_the_device_only_where_it_is_reported(data):
    class Loss:
        read = 0

        def __float__(self):
            Loss.read += 1
            return 1.0

    arguments = "--log-interval", "2", "--batch-size", "20"
    with report_of(*arguments, data=data, steps=5) as report:
        run(report, [Loss()] * 5)
    assert Loss.read == 3


def test_other_ranks_than_0_print_nothing(data, monkeypatch, capsys):
    monkeypatch.setattr(hvkit, "rank", lambda: 1)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    with report_of(data=data) as report:
        run(report, [1.0] * report.steps)
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_a_progress_bar(data, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    with report_of("--epochs", "1", data=data) as report:
        run(report, [1.0] * report.steps)
    assert "━" in screen.getvalue()


def test_the_pseudo_terminal_of_a_launcher_whose_output_goes_to_a_file_is_none(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    monkeypatch.setattr(common.ranks.os, "readlink", lambda path: "/home/someone/run.log")
    assert not common.ranks.on_terminal()
    monkeypatch.setattr(common.ranks.os, "readlink", lambda path: "/dev/pts/3")
    assert common.ranks.on_terminal()
