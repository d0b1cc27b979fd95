"""Compares several runs side by side; for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvkit.log import printable
from hvkit.monitor.charts import short
from hvkit.monitor.recorded_run import RecordedRun
from hvkit.monitor.step_times import PARTS
from hvkit.monitor.terminal_report import troubles
from hvkit.wording import counted, duration

# Speeds and mean batch sizes of runs may differ by this factor without a remark.
_ALLOWANCE = 1.1


def told_apart(folders: Sequence[Path]) -> list[str]:
    """Distinct names of folders: as many parts from the ends of their paths as it takes.

    Raises:
        ValueError: one is named twice.
    """
    paths = [folder.resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ValueError(f"{folders[number]} is named twice: name each run once")
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


Row = tuple[str, list[str]]
"""What is compared, and its value for each run."""


def numbers(runs: Sequence[RecordedRun]) -> list[Row]:
    """The rows about the size and speed of runs."""
    found = [
        _row("ranks", runs, lambda run: f"{_ranks(run):,}"),
        _row("hosts", runs, lambda run: f"{len(set(run.hosts)):,}"),
        _row("steps", runs, lambda run: f"{run.taken:,}"),
        _row("time", runs, lambda run: duration(run.seconds)),
        _row("samples a second", runs, lambda run: f"{run.mean('samples_per_second'):,.0f}"),
    ]
    if (base := _one_rank(runs)) is not None:
        found.append(
            _row(f"speedup over {base.name}", runs, lambda run: f"{_speedup(run, base):.2f}x")
        )
    found.append(_row("ms a step", runs, lambda run: f"{1e3 * run.mean('seconds/step'):,.4g}"))
    found += [(f"{part}, of a step", [_share(run, part) for run in runs]) for part in PARTS]
    found.append(_row("restarts or resumptions", runs, lambda run: f"{len(run.starts) - 1}"))
    return found


def remarks(runs: Sequence[RecordedRun]) -> list[str]:
    """Sentences about speedups that have other reasons than the number of ranks."""
    base = _one_rank(runs)
    if base is None:
        return []
    said = []
    for run in runs:
        ranks, speedup = _ranks(run), _speedup(run, base)
        batch, base_batch = _batch(run), _batch(base)
        if speedup > _ALLOWANCE * ranks:
            said.append(
                f"{run.name}: a speedup of {speedup:.2f}x is more than {counted(ranks, 'rank')} "
                f"explain: {base.name} was measured under other conditions"
            )
        if batch and base_batch and not 1 / _ALLOWANCE < batch / base_batch < _ALLOWANCE:
            said.append(
                f"{run.name}: a rank takes {batch:,.4g} samples a step, in {base.name} "
                f"{base_batch:,.4g}: the speedup compares different batch sizes"
            )
    return said


def last_values(runs: Sequence[RecordedRun]) -> list[Row]:
    """The last value of each metric."""
    metrics = dict.fromkeys(name for run in runs for name in run.curves)
    return [(f"last {metric}", [_last(run, metric) for run in runs]) for metric in metrics]


def _row(what: str, runs: Sequence[RecordedRun], value: Callable[[RecordedRun], str]) -> Row:
    return what, [value(run) for run in runs]


def _ranks(run: RecordedRun) -> int:
    return run.starts[-1].size


def _one_rank(runs: Sequence[RecordedRun]) -> RecordedRun | None:
    """A run on one rank, for speedups over it; ``None`` if there is none, or no other run."""
    return next((run for run in runs if _ranks(run) == 1), None) if len(runs) > 1 else None


def _speedup(run: RecordedRun, base: RecordedRun) -> float:
    return run.mean("samples_per_second") / (base.mean("samples_per_second") or float("nan"))


def _batch(run: RecordedRun) -> float:
    """Samples of a rank in a step, on average."""
    samples, steps = 0.0, 0
    for each in run.records:
        of_a_rank = each["samples_per_second"] / len(each["ranks"]["samples_per_second"])
        samples += of_a_rank * each["seconds"].get("step", 0.0) * each["steps"]
        steps += each["steps"]
    return samples / max(steps, 1)


def _share(run: RecordedRun, part: str) -> str:
    parts = run.parts()
    whole = sum(parts.values()) or 1.0
    return f"{parts[part] / whole:.0%}"


def _last(run: RecordedRun, metric: str) -> str:
    points = run.curves.get(metric)
    return short(points[-1][1]) if points else ""


def show(runs: Sequence[RecordedRun], console: Console) -> None:
    """Print runs side by side."""
    names = [printable(run.name) for run in runs]
    for run, name in zip(runs, names, strict=True):
        for line in troubles(run):
            console.print(escape(f"{name}: {printable(line)}"), style="red", highlight=False)
    for line in remarks(runs):
        console.print(escape(printable(line)), style="yellow", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    for what, values in [*numbers(runs), *last_values(runs)]:
        table.add_row(escape(printable(what)), *map(escape, values))
    console.print(table)
    if unreadable := sum(run.unreadable for run in runs):
        console.print(f"{counted(unreadable, 'line')} without a record left out")
