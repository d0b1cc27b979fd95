"""Writes rank 0's records to ``metrics.jsonl``, TensorBoard's event files and the script's hook."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from hvkit.log import logger

FILE = "metrics.jsonl"

Hook = Callable[..., object]


class Writers:
    """Writes records into a folder. An error while writing never ends a training run.

    A full disk, or a tracking server that does not answer, is logged once.

    Args:
        folder: made if it is missing.
        tensorboard: whether to write event files; None: if TensorBoard is installed.
        hook: called with a dict of numbers, and ``step=``.

    Raises:
        ModuleNotFoundError: TensorBoard is wanted, but not installed.
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, tensorboard: bool | None, hook: Hook | None) -> None:
        self._hook = hook
        self._failed: set[str] = set()
        installed = find_spec("tensorboard") is not None
        if tensorboard and not installed:
            raise ModuleNotFoundError(
                "tensorboard=True needs TensorBoard, which is not installed: pip install "
                "tensorboard, or leave tensorboard out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = open(folder / FILE, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        if not _ends_a_line(folder / FILE):  # the run before was killed while it wrote
            self._file.write("\n")
        self._events: Any = None
        if tensorboard:
            self._events = _event_writer(folder)
        elif installed and tensorboard is None:
            with self._tolerant("TensorBoard's event file"):
                self._events = _event_writer(folder)

    def begin(self, after: int) -> None:
        """Write an event that makes TensorBoard drop later steps of earlier event files.

        Args:
            after: the step after which the run begins; 0 for a new run, which replaces an earlier
                one.
        """
        if self._events is not None:
            with self._tolerant("TensorBoard's event file"):
                self._events.add_event(_start_event(after + 1 if after else 0))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``: values that JSON holds."""
        if self._file is not None:
            with self._tolerant("metrics.jsonl"):
                self._file.write(json.dumps(_without_nan(record)) + "\n")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step for TensorBoard and the hook."""
        if self._events is not None:
            with self._tolerant("TensorBoard's event file"):
                self._events.add_event(_event(step, values))
        if self._hook is not None:
            with self._tolerant(f"the hook {getattr(self._hook, '__qualname__', self._hook)!r}"):
                self._hook(dict(values), step=step)

    def flush(self) -> None:
        """Write what is left in memory."""
        if self._events is not None:
            with self._tolerant("TensorBoard's event file"):
                self._events.flush()

    def close(self) -> None:
        """Write what is left in memory, and close the files."""
        if self._file is not None:
            with self._tolerant("metrics.jsonl"):
                self._file.close()
            self._file = None
        if self._events is not None:
            with self._tolerant("TensorBoard's event file"):
                self._events.close()
            self._events = None

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """Log an error of the block, the first time for each ``what``, and go on."""
        try:
            yield
        except Exception as error:  # of any type: the hook is the script's
            if what not in self._failed:
                self._failed.add(what)
                kind = type(error).__name__
                logger.warning("monitor: %s failed, training goes on: %s: %s", what, kind, error)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        if not length:
            return True
        file.seek(length - 1)
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


def _event(step: int, values: Mapping[str, float]) -> Any:
    """One event with all numbers: much faster than ``add_scalar``, which makes one for each."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return Event(wall_time=time.time(), step=step, summary=Summary(value=numbers))


def _start_event(step: int) -> Any:
    """The event at which TensorBoard drops what it has read of this step and later ones."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


def flattened(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, those of dicts inside it as ``outer/inner``; no lists."""
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
