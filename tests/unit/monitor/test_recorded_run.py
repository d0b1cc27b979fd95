"""``hvkit report`` reads the file of a run, and describes the run in the terminal."""

import json
import os
import re

import pytest
from recorded_lines import end, logged, record, start, write
from rich.console import Console

from hvkit.cli import main
from hvkit.errors import HvkitError
from hvkit.monitor import terminal_report
from hvkit.monitor.recorded_run import read
from hvkit.monitor.report_page import page


@pytest.fixture
def run_of(tmp_path):
    """``run_of(*lines)``: the run that is read from these lines."""
    return lambda *lines: read(write(tmp_path, *lines))


def shown(run):
    """What the terminal shows."""
    console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal_report.show(run, console)
    return console.export_text()


def test_the_records_are_read_and_shown(run_of):
    lines = record(10, 3.0), record(20, 1.0), start(15, reason="rank 1 [x] left"), record(30, 2.0)
    run = run_of(start(), *lines, end())
    assert run.curves["loss"] == [(10, 3.0), (30, 2.0)]
    assert (run.steps, run.sent(), run.last()[0]) == (30, {"gradients": 2e6}, (3, 0.7))
    assert run.busy() == pytest.approx(0.6)
    assert terminal_report.troubles(run) == []
    assert '"notes":[]' in page(run)
    text = shown(run)
    assert "30 steps in 30 s on 4 ranks of 2 hosts; 400 samples a second; ranks busy 60%\n" in text
    assert re.search(r"loss +3 +2 +3 +2 *\n", text)
    assert re.search(r"waiting +30.00 +30%", text)
    assert "rank 3 on node2 was last in 70% of steps" in text
    assert "rank 1 [x] left" in text
    assert "a rank sends 2 MB a step: gradients" in text


def test_means_are_calculated_once(run_of):
    run = run_of(start(), record(10))
    assert run.mean("seconds/step") == 0.1
    run.records = None  # there may be many
    assert run.mean("seconds/step") == 0.1


RESTARTED = start(10, restart=1, reason="rank 3 on node2 was killed")


@pytest.mark.parametrize(
    ("lines", "loss", "steps_lost"),
    [
        (
            [record(10, 3.0), logged(20, once=9.0), record(20, 9.0), RESTARTED, record(20, 2.0)],
            (3, 2),
            [0, 10],
        ),
        ([record(10, 3.0), record(20), start(), record(10, 2.0)], (2,), [0]),
        ([record(10), start(10, reason="x", reached=17), record(20)], (1, 1), [0, 7]),
    ],
    ids=["a restart repeats steps", "another run in the same folder", "ranks had begun steps"],
)
def test_steps_that_are_repeated_count_once(lines, loss, steps_lost, run_of):
    run = run_of(start(), *lines)
    assert run.curves["loss"] == [(10 * n, value) for n, value in enumerate(loss, 1)]
    assert [each.lost for each in run.starts] == steps_lost
    assert not run.curves.get("once")
    assert "once" not in shown(run)


UNFINISHED = "no end is recorded: the run goes on, was killed, or did not close its monitor"


@pytest.mark.parametrize(
    ("lines", "troubles"),
    [
        (
            [
                *(record(10), record(30), end()),
                *(start(), record(10, skipped=2), record(20, None), logged(20, val_loss=None)),
                end(error="ValueError: <boom>"),
            ],
            [
                "the run ended with ValueError: <boom>",
                "val_loss was NaN or infinite in 1 record, at step 20 first",
                "loss was NaN or infinite in 1 record, at step 20 first",
                "2 steps were skipped: NaN or infinite gradients",
                "an earlier run of 30 steps in this folder is not shown",
            ],
        ),
        ([record(10), end(left=True)], ["the run left after SIGTERM, with a checkpoint"]),
        (
            [record(10), record(30), end(), start(), end(error="E: x")],
            ["a later run in this folder has no record of all ranks; it ended with E: x"],
        ),
        ([record(10), end(), RESTARTED, record(20)], [UNFINISHED]),
        ([record(10), end(), RESTARTED, record(20), end()], []),
        ([record(20, None), RESTARTED, record(20), end()], []),  # what is repeated was not NaN
    ],
    ids=["all", "left", "a later run", "unfinished", "finished", "NaN repeated"],
)
def test_troubles_come_before_the_numbers(lines, troubles, run_of):
    run = run_of(start(), *lines)
    assert terminal_report.troubles(run) == troubles
    text = " ".join(shown(run).split())
    for each in troubles:
        assert text.index(each) < text.index("metric")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([end(error="ValueError: boom")], r"ranks; it ended with ValueError: boom$"),
        (
            [logged(3, loss=None), end(3, error="E: \x1b[31mx")],
            r"ranks; it ended after 3 steps with E: [^\x1b]*; loss NaN or infinite$",
        ),
    ],
)
def test_a_run_that_failed_before_its_first_record_says_how(lines, said, run_of):
    with pytest.raises(HvkitError, match=f"no record of all {said}"):
        run_of(start(), *lines)


@pytest.mark.parametrize("text", [None, "", "{}", "no json"])
def test_a_folder_without_a_record_is_an_error_that_says_so(tmp_path, text, capsys):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(HvkitError, match=r"metrics\.jsonl"):
        read(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_text_of_a_run_commands_no_terminal(run_of):
    bad = "\x1b]0;owned\x07"
    lines = [start(hosts=[bad] * 4), record(10, **{bad: 1.0}), end(error=bad, last={"reason": bad})]
    for each in (lines, [*lines, start(), end(error=bad)]):
        assert "\x1b" not in shown(run_of(*each))


def test_steps_without_a_record_before_an_error_count_and_show_a_nan(run_of):
    lines = [start(), record(10), logged(14, loss=None), end(14, error="FloatingPointError: NaN")]
    run = run_of(*lines)
    assert (run.steps, run.seconds) == (14, 14.0)
    assert re.search(r"loss +1 +1 +1 +nan *\n", shown(run))
    assert "loss was NaN or infinite in 1 record, at step 14 first" in terminal_report.troubles(run)
    run = run_of(*lines, start(10, reason="x"), record(20))
    assert (run.steps, run.seconds, run.starts[1].lost) == (20, 20.0, 4)


def test_a_run_that_was_resumed_on_fewer_ranks_shows_its_starts(run_of):
    run = run_of(start(), record(10), start(10), record(20, ranks=2))
    assert [each.reason for each in run.starts] == ["", "resumed"]
    assert re.search(r" resumed *\n", shown(run))
    assert '"resumed"]' in page(run)


@pytest.mark.parametrize(
    ("begin", "last", "headline"),
    [
        (
            start(hosts=["node1"], size=4),  # with a parameter server
            record(10, ranks=1),
            "10 steps in 10 s on rank 0 of 4 ranks; 100 samples a second; busy 60%",
        ),
        (
            start(300),  # a monitor that joined later
            record(310),
            "10 steps, up to step 310, in 10 s on 4 ranks of 2 hosts; "
            "400 samples a second; ranks busy 60%",
        ),
    ],
)
def test_the_headline_counts_the_steps_and_ranks_that_were_recorded(begin, last, headline, run_of):
    run = run_of(begin, last, end())
    assert terminal_report.headline(run) == headline
    assert '["10","steps in 10 s"]' in page(run)


@pytest.mark.parametrize("value", [None, "x", [], {}, 0, -1, "NaN", "Infinity", "1" * 400])
def test_no_value_of_a_record_breaks_the_report(value, run_of):
    raw = value if isinstance(value, str) and value != "x" else json.dumps(value)
    for name in ("step", "time", "loss", "steps", "samples_per_second", "ranks", "seconds", "host"):
        line = json.dumps(record(20) | {name: "HERE"}).replace('"HERE"', raw)
        run = run_of(start(), record(10), line, record(30), end())
        shown(run)
        page(run)
        assert run.steps >= 30


def test_lines_that_are_no_records_are_left_out_and_counted(run_of):
    broken = ['{"step": 3', "[]", '"x"', '{"step": "a", "time": 1}', '{"start": {}}', "\x00"]
    run = run_of(start(), record(10), *broken)
    assert (run.unreadable, len(run.records)) == (len(broken), 1)
