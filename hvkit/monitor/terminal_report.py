"""The report of a run, or of several side by side, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from hvkit.log import counted, duration, printable
from hvkit.monitor.measurements import PARTS
from hvkit.monitor.recorded_run import RecordedRun
from hvkit.monitor.run_file import FILE

# Speeds and mean batch sizes of runs may differ by this factor without a remark.
_ALLOWANCE = 1.1

STARTS = ("start", "after step", "ranks", "steps lost", "reason")

Row = tuple[str, list[str]]
"""The name of a compared value, and the value for each run."""


def show(run: RecordedRun, console: Console) -> None:
    """Print a run."""
    console.print(f"[bold]{_safe(run.name)}[/bold]: {headline(run)}", highlight=False)
    _print_lines(console, troubles(run), "red")
    rows = []
    for name, points in run.curves.items():
        if values := [value for _, value in points]:  # else all of them were NaN, or repeated
            known = points[-1][0] >= max(run.not_finite.get(name, [0]))
            last = values[-1] if known else float("nan")
            numbers = (values[0], min(values), max(values), last)
            rows.append((name, *(f"{number:.4g}" for number in numbers)))
    _print_table(console, ("metric", "first", "min", "max", "last"), rows)
    fractions = _fractions(run)
    rows = [
        (name, f"{1e3 * seconds:.2f}", f"{fractions[name]:.0%}", "█" * round(40 * fractions[name]))
        for name, seconds in run.parts().items()
    ]
    _print_table(console, ("a step", "ms", "", ""), rows)
    sent = (f"a rank sends {size_of(size)} a step: {name}" for name, size in run.sent().items())
    _print_lines(console, [*slow_ranks(run), *sent])
    if begun := starts(run):
        _print_table(console, STARTS, begun)
    if run.unreadable:
        verb = "is no record and was" if run.unreadable == 1 else "are no records and were"
        console.print(f"{counted(run.unreadable, 'line')} of {FILE} {verb} left out")


def show_several(runs: Sequence[RecordedRun], console: Console) -> None:
    """Print runs side by side."""
    _print_lines(console, [f"{run.name}: {line}" for run in runs for line in troubles(run)], "red")
    _print_lines(console, remarks(runs), "yellow")
    rows = [(what, *values) for what, values in [*comparison(runs), *_last_values(runs)]]
    columns = [Column(""), *(Column(_safe(run.name), justify="right") for run in runs)]
    _print_table(console, columns, rows)
    if unreadable := sum(run.unreadable for run in runs):
        console.print(f"{counted(unreadable, 'line')} without a record left out")


def _safe(text: str) -> str:
    """Text from the script without control characters, and no markup."""
    return escape(printable(text))


def _print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        console.print(_safe(line), style=style, highlight=False)


def _print_table(
    console: Console, columns: Sequence[str | Column], rows: Iterable[Sequence[str]]
) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(_safe, row))
    console.print(table)


def headline(run: RecordedRun) -> str:
    """The run in one line."""
    steps = counted(run.taken, "step")
    until = f", up to step {run.steps:,}," if run.taken < run.steps else ""
    where = f"{counted(len(run.hosts), 'rank')} of {counted(len(set(run.hosts)), 'host')}"
    worth = f"; ranks busy {run.busy():.0%}" if len(run.hosts) > 1 else ""
    if run.starts[-1].size > len(run.hosts):
        where = f"rank 0 of {run.starts[-1].size:,} ranks"
        worth = f"; busy {run.busy():.0%}"
    return (
        f"{steps}{until} in {duration(run.seconds)} on {where}; "
        f"{run.mean('samples_per_second'):,.0f} samples a second{worth}"
    )


def starts(run: RecordedRun) -> list[Sequence[str]]:
    """The rows about the starts of a run that was started again."""
    return [
        (clock(each.time), f"{each.step:,}", f"{each.size:,}", f"{each.lost:,}", each.reason)
        for each in (run.starts if len(run.starts) > 1 else ())
    ]


def slow_ranks(run: RecordedRun) -> list[str]:
    """Sentences about the ranks that came last more often than others."""
    often = [(rank, part) for rank, part in run.last()[:3] if part * len(run.hosts) > 1]
    said = [f"rank {r} on {run.host_of(r)} was last in {part:.0%} of steps" for r, part in often]
    if said and run.last_reason:
        said[0] += f": {run.last_reason}"
    return said


def troubles(run: RecordedRun) -> list[str]:
    """Sentences that explain or limit the numbers: NaN, an error, another run in the folder."""
    said = []
    if run.end is None:
        said.append("no end is recorded: the run goes on, was killed, or did not close its monitor")
    elif run.end:
        said.append(f"the run ended with {run.end}")
    if run.left:
        said.append("the run left after SIGTERM, with a checkpoint")
    if run.later:
        said.append(run.later)
    for name, steps in run.not_finite.items():
        if steps:
            records = counted(len(steps), "record")
            said.append(f"{name} was NaN or infinite in {records}, at step {min(steps):,} first")
    if skipped := sum(each["skipped"] for each in run.records):
        verb = "was" if skipped == 1 else "were"
        said.append(f"{counted(skipped, 'step')} {verb} skipped: NaN or infinite gradients")
    earlier: RecordedRun | None = run
    while earlier and (earlier := earlier.before):
        count = counted(earlier.taken, "step")
        said.append(f"an earlier run of {count} in this folder is not shown")
    return said


def comparison(runs: Sequence[RecordedRun]) -> list[Row]:
    """The rows about the size and speed of runs."""
    rows = [
        ("ranks", [f"{_ranks(run):,}" for run in runs]),
        ("hosts", [f"{len(set(run.hosts)):,}" for run in runs]),
        ("steps", [f"{run.taken:,}" for run in runs]),
        ("time", [duration(run.seconds) for run in runs]),
        ("samples a second", [f"{run.mean('samples_per_second'):,.0f}" for run in runs]),
    ]
    if (base := _on_one_rank(runs)) is not None:
        speedups = [f"{_speedup(run, base):.2f}x" for run in runs]
        rows.append((f"speedup over {base.name}", speedups))
    rows.append(("ms a step", [f"{1e3 * run.mean('seconds/step'):,.4g}" for run in runs]))
    rows += [(f"{part}, of a step", [f"{_fractions(r)[part]:.0%}" for r in runs]) for part in PARTS]
    rows.append(("restarts or resumptions", [f"{len(run.starts) - 1}" for run in runs]))
    return rows


def remarks(runs: Sequence[RecordedRun]) -> list[str]:
    """Sentences about speedups that have other reasons than the number of ranks."""
    base = _on_one_rank(runs)
    if base is None:
        return []
    said = []
    base_batch = _batch(base)
    for run in runs:
        ranks, speedup, batch = _ranks(run), _speedup(run, base), _batch(run)
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


def _last_values(runs: Sequence[RecordedRun]) -> list[Row]:
    """The last value of each metric."""
    lasts = [{name: f"{p[-1][1]:.4g}" for name, p in run.curves.items() if p} for run in runs]
    metrics = dict.fromkeys(name for run in runs for name in run.curves)
    return [(f"last {name}", [each.get(name, "") for each in lasts]) for name in metrics]


def _ranks(run: RecordedRun) -> int:
    return run.starts[-1].size


def _on_one_rank(runs: Sequence[RecordedRun]) -> RecordedRun | None:
    """A run on one rank, for speedups over it; ``None`` if there is none, or no other run."""
    return next((run for run in runs if _ranks(run) == 1), None) if len(runs) > 1 else None


def _speedup(run: RecordedRun, base: RecordedRun) -> float:
    return run.mean("samples_per_second") / (base.mean("samples_per_second") or float("nan"))


def _batch(run: RecordedRun) -> float:
    """Samples of a rank in a step, on average."""
    samples = sum(
        each["samples_per_second"]
        / len(each["ranks"]["samples_per_second"])
        * each["seconds"].get("step", 0.0)
        * each["steps"]
        for each in run.records
    )
    return float(samples / max(sum(each["steps"] for each in run.records), 1))


def _fractions(run: RecordedRun) -> dict[str, float]:
    """The parts of a step's time, as fractions of the whole."""
    parts = run.parts()
    whole = sum(parts.values()) or 1.0
    return {name: seconds / whole for name, seconds in parts.items()}


def size_of(size: float) -> str:
    """Bytes as text: ``1.63 MB``."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} B"


def clock(seconds: float) -> str:
    """A moment as text, in local time."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"
