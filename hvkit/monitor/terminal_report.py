"""Prints a run in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvkit.log import printable
from hvkit.monitor.recorded_run import RecordedRun
from hvkit.monitor.writers import FILE
from hvkit.wording import counted, duration


def show(run: RecordedRun, console: Console) -> None:
    """Print a run."""
    run = _printable(run)
    console.print(f"[bold]{escape(run.name)}[/bold]: {headline(run)}", highlight=False)
    for line in troubles(run):
        console.print(escape(line), style="red", highlight=False)
    table = Table("metric", "first", "min", "max", "last", box=None, pad_edge=False)
    for name, points in run.curves.items():
        values = [value for _, value in points]
        if not values:  # all of them were NaN, or repeated
            continue
        last = values[-1] if points[-1][0] >= max(run.not_finite.get(name, [0])) else float("nan")
        shown = (values[0], min(values), max(values), last)
        table.add_row(escape(name), *(f"{v:.4g}" for v in shown))
    console.print(table)
    parts = run.parts()
    whole = sum(parts.values()) or 1.0
    table = Table("a step", "ms", "", "", box=None, pad_edge=False)
    for name, seconds in parts.items():
        bar = "█" * round(40 * seconds / whole)
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / whole:.0%}", bar)
    console.print(table)
    for line in [*slow_ranks(run), *_sent_lines(run)]:
        console.print(escape(line), highlight=False)
    if len(run.starts) > 1:
        columns = ("start", "after step", "ranks", "steps lost", "reason")
        table = Table(*columns, box=None, pad_edge=False)
        for start in run.starts:
            row = (str(start.step), str(start.size), str(start.lost), escape(start.reason))
            table.add_row(clock(start.time), *row)
        console.print(table)
    if run.unreadable:
        verb = "is no record and was" if run.unreadable == 1 else "are no records and were"
        console.print(f"{counted(run.unreadable, 'line')} of {FILE} {verb} left out")


def _printable(run: RecordedRun) -> RecordedRun:
    """The run without control characters, since names and reasons come from the script."""
    starts = [
        replace(s, hosts=tuple(map(printable, s.hosts)), reason=printable(s.reason))
        for s in run.starts
    ]
    curves = {printable(name): points for name, points in run.curves.items()}
    not_finite = {printable(name): steps for name, steps in run.not_finite.items()}
    return replace(
        run,
        name=printable(run.name),
        starts=starts,
        curves=curves,
        not_finite=not_finite,
        end=None if run.end is None else printable(run.end),
        last_reason=printable(run.last_reason),
        later=printable(run.later),
    )


def headline(run: RecordedRun) -> str:
    """The run in one line."""
    steps = counted(run.taken, "step")
    until = f", up to step {run.steps:,}," if run.taken < run.steps else ""
    where = f"{counted(len(run.hosts), 'rank')} of {counted(len(set(run.hosts)), 'host')}"
    worth = f"; ranks busy {run.busy():.0%}" if len(run.hosts) > 1 else ""
    if run.starts and run.starts[-1].size > len(run.hosts):
        where = f"rank 0 of {run.starts[-1].size:,} ranks"
        worth = f"; busy {run.busy():.0%}"
    return (
        f"{steps}{until} in {duration(run.seconds)} on {where}; "
        f"{run.mean('samples_per_second'):,.0f} samples a second{worth}"
    )


def slow_ranks(run: RecordedRun) -> list[str]:
    """Sentences about the ranks that came last more often than others."""
    said = []
    for number, (rank, share) in enumerate(run.last()[:3]):
        if share * len(run.hosts) <= 1:
            break
        why = f": {run.last_reason}" if run.last_reason and not number else ""
        said.append(f"rank {rank} on {run.host_of(rank)} was last in {share:.0%} of steps{why}")
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
    before = run.before
    while before is not None:
        said.append(
            f"an earlier run of {counted(before.taken, 'step')} in this folder is not shown"
        )
        before = before.before
    return said


def _sent_lines(run: RecordedRun) -> Iterable[str]:
    for purpose, size in run.sent().items():
        yield f"a rank sends {size_of(size)} a step: {purpose}"


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
