"""Reads a run from ``metrics.jsonl``.

A run may have several starts: a restart or resumption repeats the steps since its checkpoint. The
earlier records of these steps are left out of curves, and counted as lost steps. A start from step
0 that is no restart begins a new run in the same folder, which replaces the one before.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError
from hvkit.log import counted, printable
from hvkit.monitor.measurements import PARTS, RESERVED, busy
from hvkit.monitor.run_file import FILE, flattened

# Entries of a record that are not drawn as curves.
_OWN = RESERVED - {"learning_rate", "gradient_norm", "applied_gradient_norm"}
# More than a 32-bit float can hold.
_LARGEST = 1e39


@dataclass(frozen=True)
class Start:
    """A start of the ranks."""

    time: float  # seconds since 1970
    step: int  # the step after which it begins
    hosts: tuple[str, ...]  # the host of each rank; with a parameter server, only that of rank 0
    reason: str  # why it restarted; ``resumed`` if hvkit did not restart it; empty for the first
    lost: int  # steps that an earlier start had taken beyond ``step``, as far as it is known
    size: int  # the number of ranks


@dataclass
class RecordedRun:
    """The record of a run in a folder.

    By metric, ``curves`` has its points ``(step, value)``, and ``not_finite`` the steps at which it
    was NaN or infinite.
    """

    name: str  # the folder's name
    starts: list[Start] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)  # the measurements, by step
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    end: str | None = None  # the error that ended it, empty for none; None if no end is recorded
    left: bool = False  # whether it has left after SIGTERM
    reached: tuple[int, float] = (0, 0.0)  # the last step and its time, if no record has it
    last_reason: str = ""  # why the rank that came last most often was late, if one stands out
    before: RecordedRun | None = None  # the run in the same folder that this one replaces
    later: str = ""  # a sentence about a later run in the folder that has recorded nothing
    unreadable: int = 0  # lines that are no records, such as a last one that was cut off
    _means: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """By rank, as of the last start."""
        return self.starts[-1].hosts if self.starts else ()

    @property
    def steps(self) -> int:
        """The last step."""
        return max(int(self.records[-1]["step"]) if self.records else 0, self.reached[0])

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
        """The mean over all steps of a number of the records; ``group/name`` inside a group.

        It is calculated once: the records must be complete.
        """
        if name not in self._means:  # a report asks for some of them often
            group, _, inner = name.rpartition("/")
            values = [(each[group] if group else each).get(inner) or 0.0 for each in self.records]
            steps = [each["steps"] for each in self.records]
            total = sum(map(operator.mul, values, steps))
            self._means[name] = float(total / max(sum(steps), 1))
        return self._means[name]

    def parts(self) -> dict[str, float]:
        """Seconds of a step by part, mean over the run."""
        return {part: self.mean(f"seconds/{part}") for part in PARTS}

    def busy(self) -> float:
        return busy(self.parts())

    def host_of(self, rank: int) -> str:
        """The host of a rank, as of the last start; ``?`` if no record names it."""
        return self.hosts[rank] if rank < len(self.hosts) else "?"

    def last(self) -> list[tuple[int, float]]:
        """By rank, the part of the steps in which it came last, most often first."""
        counts = Counter[int]()
        for each in self.records:
            counts.update(dict(enumerate(each["ranks"]["last"])))
        total = counts.total()
        return [(rank, count / total) for rank, count in counts.most_common()] if total else []

    def sent(self) -> dict[str, float]:
        """Bytes of a rank a step, by purpose."""
        names = dict.fromkeys(name for each in self.records for name in each.get("sent", {}))
        return {name: found for name in names if (found := self.mean(f"sent/{name}")) >= 0.5}


def read(folder: Path) -> RecordedRun:
    """The run that a monitor has recorded in this folder, or the one before without a record."""
    path = folder / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise HvkitError(
            f"{path} cannot be read ({error.strerror}): name the folder that was passed to "
            "hvkit.Monitor"
        ) from None
    run = RecordedRun(folder.resolve().name)
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
        _add_points(run, each["step"], {n: v for n, v in each.items() if n not in _OWN})
    for points in run.curves.values():
        points.sort(key=lambda point: point[0])
    return run


def _add_points(run: RecordedRun, step: int, metrics: Mapping[str, Any]) -> None:
    for name, value in flattened(metrics).items():
        run.curves.setdefault(name, []).append((step, value))
    for name in (name for name, value in metrics.items() if value is None):
        run.not_finite.setdefault(name, []).append(step)


def _end_without_record(run: RecordedRun) -> str:
    if run.end is None:
        return ""
    bad = [name for name, steps in run.not_finite.items() if steps]
    nan = f"; {', '.join(bad)} NaN or infinite" if bad else ""
    error = f" with {run.end}" if run.end else ""
    after = f" after {counted(run.taken, 'step')}" if run.taken else ""
    return f"; it ended{after}{error}{nan}"


def _with(run: RecordedRun, record: Any) -> RecordedRun:
    """The run with the contents of a line of its file; a new run if the line begins one."""
    if "start" in record:
        return _with_start(run, record["start"])
    if "logged" in record:
        numbers = record["logged"].items()
        checked = {name: value if value is None else float(value) for name, value in numbers}
        _add_points(run, int(record["step"]), checked)
    elif "end" in record:
        end = record["end"]
        run.last_reason = str((end.get("last") or {}).get("reason", ""))
        run.end, run.left = str(end.get("error", "")), bool(end.get("left", False))
        if (step := int(end.get("step", 0))) > run.steps:
            run.reached = step, float(end["time"])
    else:
        run.records.append(_checked(record))
    return run


def _with_start(run: RecordedRun, start: dict[str, Any]) -> RecordedRun:
    step, at = int(start["step"]), float(start["time"])
    hosts = tuple(str(host) for host in start["hosts"]) or ("?",)
    size = int(start.get("size", len(hosts)))
    reason, reached = str(start.get("reason", "")), int(start.get("reached", 0))
    if step == 0 and not reason:  # another run in the same folder
        before = run if run.records else run.before
        run = RecordedRun(run.name, before=before, unreadable=run.unreadable)
    newest = run.steps
    run.end, run.left, run.reached = None, False, (0, 0.0)
    run.records = [each for each in run.records if each["step"] <= step]
    for points in run.curves.values():
        points[:] = [point for point in points if point[0] <= step]
    for steps in run.not_finite.values():
        steps[:] = [each for each in steps if each <= step]
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
