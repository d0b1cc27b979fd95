"""Reads ``metrics.jsonl`` and says in a terminal what a run came to; ``report_page`` draws it.

A run may consist of several starts: one that a restart or a resumption began repeats the steps
since its checkpoint. Records of the earlier try that come after that step are left out of curves,
and counted as steps lost. A start from step 0 that no restart made begins another run in the same
folder, which takes the place of the one before; the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvkit.errors import HvkitError
from hvkit.log import printable
from hvkit.monitor.records import RESERVED
from hvkit.monitor.step_shares import PARTS, speedup
from hvkit.monitor.writers import FILE, flattened
from hvkit.wording import counted, duration

# What a record has beside the curves of the script's metrics, the rate and the norm.
_OWN = RESERVED - {"learning_rate", "gradient_norm"}
# Beyond what a 32-bit float holds.
_LARGEST = 1e39


@dataclass(frozen=True)
class Start:
    """A start of the ranks.

    Attributes:
        time: seconds since 1970.
        step: that it begins after.
        hosts: by rank, its host.
        reason: of a restart; ``resumed`` for one that is not hvkit's; empty for the first start.
        lost: steps that an earlier start had taken beyond ``step``, as far as it is known.
        size: the number of ranks, of which ``hosts`` has rank 0 alone with a parameter server.
    """

    time: float
    step: int
    hosts: tuple[str, ...]
    reason: str
    lost: int
    size: int


@dataclass
class Run:
    """What a folder holds of a run.

    Attributes:
        name: of the folder.
        starts: in their order.
        records: those that hold measurements, by step.
        curves: by metric, its points ``(step, value)``.
        not_finite: by metric, the steps at which it was NaN or infinite.
        end: ``error``, empty if there was none, of a run that has ended; None for others.
        left: whether it has left after SIGTERM.
        reached: the last step and its time, if that ended without a record of all ranks.
        last_reason: why the rank that came last most often was late; empty if none stands out.
        before: the run in the same folder that this one takes the place of.
        later: a sentence about one that has recorded nothing, and so does not.
        unreadable: lines that are no records; the last one of a run that was killed, for example.
    """

    name: str
    starts: list[Start] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    end: str | None = None
    left: bool = False
    reached: tuple[int, float] = (0, 0.0)
    last_reason: str = ""
    before: Run | None = None
    later: str = ""
    unreadable: int = 0
    _means: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the ranks, as of the last start."""
        return self.starts[-1].hosts if self.starts else ()

    @property
    def steps(self) -> int:
        """The last step."""
        recorded = int(self.records[-1]["step"]) if self.records else 0
        return max(recorded, self.reached[0])

    @property
    def taken(self) -> int:
        """Steps since the monitor's first start, which may be in the middle of a training."""
        return self.steps - self.starts[0].step if self.starts else self.steps

    @property
    def seconds(self) -> float:
        """From the first start to the last step."""
        last = float(self.records[-1]["time"]) if self.records else 0.0
        last = max(last, self.reached[1])
        return max(last - self.starts[0].time, 0.0)

    def mean(self, name: str) -> float:
        """The mean over all steps of a number of the records; ``group/name`` inside a group."""
        if name in self._means:
            return self._means[name]
        group, _, inner = name.rpartition("/")
        found = [
            ((each[group] if group else each).get(inner) or 0.0, each["steps"])
            for each in self.records
        ]
        mean = float(sum(v * n for v, n in found) / max(sum(n for _, n in found), 1))
        return self._means.setdefault(name, mean)

    def parts(self) -> dict[str, float]:
        """Seconds of a step by part, mean over the run."""
        return {part: self.mean(f"seconds/{part}") for part in PARTS}

    def speedup(self) -> float:
        """How many ranks the run is worth."""
        return speedup(self.parts(), len(self.hosts))

    def last(self) -> list[tuple[int, float]]:
        """By rank, the part of the steps in which it came last, most often first."""
        counts: dict[int, int] = {}
        for each in self.records:
            for rank, count in enumerate(each.get("ranks", {}).get("last", ())):
                counts[rank] = counts.get(rank, 0) + count
        total = sum(counts.values())
        shares = [(rank, count / total) for rank, count in counts.items()] if total else []
        return sorted(shares, key=lambda each: -each[1])

    def scaling(self) -> dict[int, float]:
        """Samples a second by the number of ranks, if restarts have changed that number."""
        found: dict[int, list[tuple[float, int]]] = {}
        for each in self.records:
            ranks = len(each.get("ranks", {}).get("samples_per_second", (0,)))
            found.setdefault(ranks, []).append((each["samples_per_second"], each["steps"]))
        return {
            ranks: sum(v * n for v, n in values) / sum(n for _, n in values)
            for ranks, values in sorted(found.items())
        }

    def sent(self) -> dict[str, float]:
        """Bytes of a rank a step, by purpose."""
        names = dict.fromkeys(name for each in self.records for name in each.get("sent", {}))
        return {name: found for name in names if (found := self.mean(f"sent/{name}")) >= 0.5}


def read(folder: Path) -> Run:
    """The run that a monitor has recorded in this folder.

    Raises:
        HvkitError: there is no record of a run.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise HvkitError(
            f"{path} cannot be read ({error.strerror}): name the folder that was passed to "
            "hvkit.Monitor"
        ) from None
    run = Run(folder.resolve().name)
    for line in filter(bytes.strip, lines):
        try:
            run = _with(run, json.loads(line, parse_constant=lambda _: None))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            run.unreadable += 1
    if not run.records:
        how = printable(_end_without_record(run))
        if run.before is None:
            hint = how or ": is the run still at its start, or is this another file?"
            raise HvkitError(f"{path} holds no record of all ranks{hint}")
        run.before.later = f"a later run in this folder has no record of all ranks{how}"
        run.before.unreadable = run.unreadable
        run = run.before
    if not run.starts:
        run.starts.append(Start(run.records[0]["time"], 0, ("?",), "", 0, 1))
    for each in run.records:
        metrics = {name: value for name, value in each.items() if name not in _OWN}
        for name, value in flattened(metrics).items():
            run.curves.setdefault(name, []).append((each["step"], value))
        for name in (name for name, value in metrics.items() if value is None):
            run.not_finite.setdefault(name, []).append(each["step"])
    for points in run.curves.values():
        points.sort(key=lambda point: point[0])
    return run


def _end_without_record(run: Run) -> str:
    if run.end is None:
        return ""
    bad = [name for name, steps in run.not_finite.items() if steps]
    nan = f"; {', '.join(bad)} NaN or infinite" if bad else ""
    error = f" with {run.end}" if run.end else ""
    after = f" after {counted(run.taken, 'step')}" if run.taken else ""
    return f"; it ended{after}{error}{nan}"


def _with(run: Run, record: Any) -> Run:
    """The run with a line of its file; another one if that begins another one.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: it is no such line.
    """
    if "start" in record:
        return _with_start(run, record["start"])
    if "logged" in record:
        step = int(record["step"])
        for name, value in record["logged"].items():
            if value is None:
                run.not_finite.setdefault(str(name), []).append(step)
            else:
                run.curves.setdefault(str(name), []).append((step, float(value)))
    elif "end" in record:
        end = record["end"]
        reason = str((end.get("last") or {}).get("reason", ""))
        run.end, run.left = str(end.get("error", "")), bool(end.get("left", False))
        run.last_reason = reason
        if (step := int(end.get("step", 0))) > run.steps:
            run.reached = step, float(end["time"])
    else:
        run.records.append(_checked(record))
    return run


def _with_start(run: Run, start: dict[str, Any]) -> Run:
    step, at = int(start["step"]), float(start["time"])
    hosts = tuple(str(host) for host in start["hosts"]) or ("?",)
    size = int(start.get("size", len(hosts)))
    reason, reached = str(start.get("reason", "")), int(start.get("reached", 0))
    if step == 0 and not reason:  # another run in the same folder
        before = run if run.records else run.before
        run = Run(run.name, before=before, unreadable=run.unreadable)
    newest = run.steps
    run.end, run.left, run.reached = None, False, (0, 0.0)
    while run.records and run.records[-1]["step"] > step:
        run.records.pop()
    for points in run.curves.values():
        while points and points[-1][0] > step:
            points.pop()
    for steps in run.not_finite.values():
        while steps and steps[-1] > step:
            steps.pop()
    lost = max(newest, reached) - step
    reason = reason or ("resumed" if run.starts else "")
    run.starts.append(Start(at, step, hosts, reason, max(lost, 0), size))
    return run


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose numbers have the types that the report reads."""
    if any(abs(float(number)) > _LARGEST for number in flattened(record).values()):
        raise ValueError("a number that no run has")
    record["step"], record["steps"] = int(record["step"]), max(int(record["steps"]), 1)
    record["skipped"] = int(record.get("skipped", 0))
    record["time"] = float(record["time"])
    record["samples_per_second"] = float(record["samples_per_second"])
    ranks = record.get("ranks", {})
    record["ranks"] = {
        "samples_per_second": [float(v) for v in ranks.get("samples_per_second") or [0]],
        "last": [int(v) for v in ranks.get("last", [])],
    }
    for group in ("seconds", "sent"):
        given = record.get(group, {}).items()
        record[group] = {str(name): float(value or 0) for name, value in given}
    record["host"] = dict(record.get("host", {}))
    return record


def show(run: Run, console: Console) -> None:
    """Print the run for a terminal."""
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
        verb = "is no record" if run.unreadable == 1 else "are no records"
        console.print(f"{counted(run.unreadable, 'line')} of {FILE} {verb}, and left out")


def _printable(run: Run) -> Run:
    """The run without what would command a terminal: names and reasons are the script's."""
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


def headline(run: Run) -> str:
    """The run in one line."""
    steps = counted(run.taken, "step")
    until = f", up to step {run.steps:,}," if run.taken < run.steps else ""
    where = f"{counted(len(run.hosts), 'rank')} of {counted(len(set(run.hosts)), 'host')}"
    worth = f"{run.speedup():.1f}x of {len(run.hosts)}"
    if run.starts and run.starts[-1].size > len(run.hosts):
        where = f"rank 0 of {run.starts[-1].size:,} ranks"
        worth = f"{run.speedup():.0%} of its time at work"
    return (
        f"{steps}{until} in {duration(run.seconds)} on {where}; "
        f"{run.mean('samples_per_second'):,.0f} samples a second; {worth}"
    )


def slow_ranks(run: Run) -> list[str]:
    """Sentences about the ranks that came last more often than others."""
    said = []
    for number, (rank, share) in enumerate(run.last()[:3]):
        if share * len(run.hosts) <= 1:
            break
        host = run.hosts[rank] if rank < len(run.hosts) else "?"
        why = f": {run.last_reason}" if run.last_reason and not number else ""
        said.append(f"rank {rank} on {host} was last in {share:.0%} of steps{why}")
    return said


def troubles(run: Run) -> list[str]:
    """Sentences about what a reader must know before the numbers: NaN, an error, another run."""
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


def _sent_lines(run: Run) -> Iterable[str]:
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
