"""Rank 0's record of a run, in ``metrics.jsonl``, TensorBoard's event files and the script's hook.

It has the start, steps of all ranks, the script's numbers, and the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from hvkit import runtime
from hvkit.errors import HvkitError
from hvkit.host.run_reports import restart_of_this_run
from hvkit.log import logger
from hvkit.monitor.measurements import Step, StepTimes, Totals, step_times
from hvkit.sync.port import skipped_steps
from hvkit.transport.traffic import traffic

FILE = "metrics.jsonl"
_EVENTS = "TensorBoard's event file"

Hook = Callable[..., object]

# Norms that differ by less are the same up to rounding.
_ROUNDING = 1e-5


class RunFile:
    """Writes one try of a run; an error, such as a full disk, is logged once and ends nothing."""

    def __init__(self, folder: Path, tensorboard: bool | None, hook: Hook | None) -> None:
        self._hook = hook
        self._failed: set[str] = set()
        self._totals = Totals(())
        self._begun_after: int | None = None
        self._sent: Mapping[str, int] = {}
        self._skipped = skipped_steps.number
        self._recorded = 0
        installed = find_spec("tensorboard") is not None
        if tensorboard and not installed:
            raise HvkitError(
                "tensorboard=True needs TensorBoard, which is not installed: pip install "
                "tensorboard, or leave tensorboard out"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / FILE, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            if not _ends_a_line(folder / FILE):  # the run before was killed while it wrote
                self._file.write("\n")
        except OSError as error:
            raise HvkitError(
                f"the monitor cannot write into {folder} ({error.strerror}): name a folder that "
                "rank 0 can make"
            ) from error
        self._events: Any = None
        if tensorboard:
            self._events = _event_writer(folder)
        elif installed and tensorboard is None:
            with self._tolerant(_EVENTS):
                self._events = _event_writer(folder)

    def begin(self, at: float, after: int, hosts: Sequence[str]) -> None:
        """Write the start; a second call does nothing. ``after`` is the step that was resumed."""
        if self._begun_after is not None:
            return
        self._totals = Totals(hosts)
        self._begun_after = self._recorded = after
        start: dict[str, Any] = {"time": at, "step": after, "hosts": hosts}
        if runtime.size() > len(hosts):  # with a parameter server, only rank 0 records
            start["size"] = runtime.size()
        self._write({"start": start | restart_of_this_run()})
        # TensorBoard drops this step and later ones from what it has read: a new run replaces an
        # earlier one.
        self._to_tensorboard(step=after + 1 if after else 0, session_log={"status": "START"})

    def record(self, step: int, epoch: int | None, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Write a record for the steps since the last one, up to and including ``step``.

        ``ranks`` holds, by rank, its ``rows`` (of ``Step``), ``metrics``, ``load``, and the rate
        and norms of its ``optimizer``.
        """
        if not any(each["rows"] for each in ranks):
            return
        found = step_times([[Step(*row) for row in each["rows"]] for each in ranks])
        if len(ranks) == len(self._totals.hosts):
            self._totals.add(found)
        record: dict[str, Any] = {"step": step, "time": time.time()}
        if epoch is not None:
            record["epoch"] = epoch
        if skipped := skipped_steps.number - self._skipped:
            record["skipped"] = skipped
        metrics = [each["metrics"] for each in ranks]
        for name in dict.fromkeys(name for each in metrics for name in each):
            values = [each[name] for each in metrics if name in each]
            record[name] = sum(values) / len(values)
        record |= _of_whole_model([each["optimizer"] for each in ranks])
        record |= _times(found)
        sent = {name: each.bytes for name, each in traffic().items() if name != "start"}
        steps = max(found.steps, 1)
        record["sent"] = {name: (sent[name] - self._sent.get(name, 0)) / steps for name in sent}
        loads = zip(self._totals.hosts, ranks, strict=False)
        record["host"] = {host: each["load"] for host, each in loads if each["load"]}
        self._sent, self._skipped, self._recorded = sent, skipped_steps.number, step
        self._write(record)
        numbers = flattened(record).items()
        self._show(step, {name: n for name, n in numbers if name not in ("step", "time")})

    def log(self, step: int, at: float, numbers: Mapping[str, float]) -> None:
        """Write numbers of the script after this step; ``at`` is in seconds since 1970."""
        self._write({"step": step, "time": at, "logged": numbers})
        self._show(step, numbers)

    def rest(self, step: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """After an error, write rank 0's metrics of the steps that are in no record."""
        if step > self._recorded:
            with suppress(Exception):  # the error may be the device's, which then computes nothing
                if numbers := metrics():
                    self.log(step, time.time(), numbers)

    def flush(self) -> None:
        self._with_events(lambda events: events.flush())

    def end(self, step: int, error: str, *, left: bool) -> None:
        """Write the end, and close the files; ``left``: after SIGTERM, with a checkpoint."""
        if self._begun_after is not None:
            how = ({"error": error} if error else {}) | ({"left": True} if left else {})
            self._write({"end": {"time": time.time(), "step": step} | self._totals.summary() | how})
        with self._tolerant(FILE):
            self._file.close()
        self._with_events(lambda events: events.close())

    def line(self) -> str:
        """The run in one line, or of a resumed one the steps since; empty if there are none."""
        if not self._totals.steps:
            return ""
        since = f"since step {self._begun_after:,}: " if self._begun_after else ""
        return since + self._totals.line()

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._tolerant(FILE):
            self._file.write(json.dumps(_without_nan(record)) + "\n")

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        # One event with all numbers: much faster than ``add_scalar``, which makes one for each.
        numbers = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._to_tensorboard(step=step, summary={"value": numbers})
        if self._hook is not None:
            with self._tolerant(f"the hook {getattr(self._hook, '__qualname__', self._hook)!r}"):
                self._hook(dict(values), step=step)

    def _to_tensorboard(self, **content: Any) -> None:
        def add(events: Any) -> None:
            from tensorboard.compat.proto.event_pb2 import Event

            events.add_event(Event(wall_time=time.time(), **content))

        self._with_events(add)

    def _with_events(self, use: Callable[[Any], object]) -> None:
        if self._events is not None:
            with self._tolerant(_EVENTS):
                use(self._events)

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """Log an error of the block, the first time for each ``what``, and go on."""
        try:
            yield
        except Exception as error:  # of any type: the hook is the script's
            if what not in self._failed:
                self._failed.add(what)
                name = type(error).__name__
                logger.warning("monitor: %s failed, training goes on: %s: %s", what, name, error)


def _times(found: StepTimes) -> dict[str, Any]:
    speeds = found.samples_per_second
    record: dict[str, Any] = {"steps": found.steps, "samples_per_second": sum(speeds)}
    if len(speeds) > 1:
        for name, speed in (("slowest", min(speeds)), ("fastest", max(speeds))):
            record[name] = {"samples_per_second": speed, "rank": speeds.index(speed)}
        record["ranks"] = {"samples_per_second": speeds, "last": found.last.tolist()}
    return record | {"seconds": {"step": sum(found.parts.values()), **found.parts}}


def _of_whole_model(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The learning rate, and the norms of a model's gradients from norms of the ranks' parts.

    ``applied_gradient_norm`` is left out where it is that before the script changed gradients.
    """
    found = {name: value for name, value in ranks[0].items() if name == "learning_rate"}
    for name in ("gradient_norm", "applied_gradient_norm"):
        if parts := [each[name] for each in ranks if name in each]:
            found[name] = math.hypot(*parts)
    applied = found.get("applied_gradient_norm")
    if applied is not None and math.isclose(applied, found["gradient_norm"], rel_tol=_ROUNDING):
        del found["applied_gradient_norm"]
    return found


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _event_writer(folder: Path) -> Any:
    """TensorBoard's writer; without the stub it would import TensorFlow for its file system."""
    stub = "tensorboard.compat.notf"
    without = "tensorflow" not in sys.modules and stub not in sys.modules
    if without:
        sys.modules[stub] = ModuleType(stub)
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(str(folder))
    finally:
        if without:
            del sys.modules[stub]


def flattened(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record; in a dict inside it they are named ``outer/inner``; no lists."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = value
    return flat


def _without_nan(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return value
