"""Measures the steps of a rank, and computes where the time of all ranks' steps went.

A clock on each rank observes hvkit's own waits (``hvkit.watch.spans``). A wait includes two times
that a single rank cannot separate: until the last rank calls, and the collective itself.
Arithmetic on the steps of all ranks separates them. In a step that all ranks end together, the rank
that came last to the collectives waited for nobody, so it was blocked only for as long as the
collectives took. Other ranks were blocked for longer: the difference is their waiting. No common
clock is needed.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from hvkit.watch.spans import WAITING, Span, observe

PARTS = ("data", "compute", "waiting", "allreduce")
"""Parts of a step's time: loading the batch; forward, backward, update and the script's own code;
waiting for other ranks; collectives."""

REASONS = ("data", "compute", "between steps")
"""Why a rank comes last; "between steps" is work of the script that belongs to no step."""

RESERVED = frozenset((
    *("step", "time", "epoch", "steps", "skipped", "seconds", "sent", "host", "samples_per_second"),
    *("slowest", "fastest", "ranks", "learning_rate", "start", "end", "logged"),
    *("gradient_norm", "applied_gradient_norm"),
))  # fmt: skip
"""Names in records that a script cannot use for its metrics."""

# A rank is reported as slow if all ranks waited for more than this part of their time, and it came
# last more than this many times as often as by chance.
_WORTH_NAMING = 0.05
_BEYOND_CHANCE = 1.5


class Step(NamedTuple):
    """One step of one rank, in seconds."""

    duration: float  # the time since the end of the step before
    data: float  # the part of the duration in which the batch was loaded
    blocked: float  # the part of the duration in collectives
    samples: float  # the number of samples in the batch

    def waiting(self, seconds: float) -> Step:
        """The step with this many further seconds in a collective at its end."""
        return self._replace(duration=self.duration + seconds, blocked=self.blocked + seconds)


class StepClock:
    """Takes the time of this thread's steps."""

    def __init__(self) -> None:
        # Reads the seconds in collectives of graphs so far, which mark no spans.
        self.blocked_in_graphs: Callable[[], float] = lambda: 0.0
        self._thread = threading.get_ident()
        self.begin()
        observe(self._see)

    def begin(self) -> None:
        """Begin the next step now; the time since the last one belongs to no step."""
        self._since = time.monotonic()
        self._data = self._blocked = 0.0
        self._in_graphs = self.blocked_in_graphs()

    def loaded(self, seconds: float) -> None:
        self._data += seconds

    def loaded_until_now(self) -> None:
        """Count all time of this step so far as loading its batch."""
        self._data = time.monotonic() - self._since

    def end(self, samples: float, steps: int = 1) -> Step:
        """End some steps that one call has taken, and begin the next one; return their mean."""
        now, in_graphs = time.monotonic(), self.blocked_in_graphs()
        blocked = self._blocked + in_graphs - self._in_graphs
        whole = (now - self._since, self._data, blocked, samples)
        self._since, self._data, self._blocked, self._in_graphs = now, 0.0, 0.0, in_graphs
        return Step(*(each / steps for each in whole))

    def close(self) -> None:
        observe(self._see, False)

    def _see(self, span: Span) -> None:
        # Agreements that overlap training, and background checkpoints, have threads of their own.
        # A wait with a step is one in a graph, as the timeline shows it.
        own = span.step is None and threading.get_ident() == self._thread
        if span.name == WAITING and own:
            self._blocked += span.ended - span.begun


class Means:
    """Means of the script's metrics over some steps; summed on their own device, such as a GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        if name in RESERVED:
            raise ValueError(f"{name!r} is a name that hvkit uses in records: choose another one")
        value = detached(name, value)
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> dict[str, float]:
        """The means by name; waits for a GPU."""
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}

    def clear(self) -> None:
        self._sums.clear()
        self._counts.clear()


def detached(name: str, value: Any) -> Any:
    """A copy of the value in 32 bits or more, without autograd's graph, still on its device."""
    if isinstance(value, int | float):
        return float(value)
    if math.prod(getattr(value, "shape", (0,))) != 1:
        raise TypeError(
            f"metrics are numbers or tensors with one value, got {value!r} of type "
            f"{type(value).__name__} for {name!r}"
        )
    if hasattr(value, "detach"):
        return value.detach().float().clone().reshape(())
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(value, tensorflow.Tensor | tensorflow.Variable):
        return tensorflow.reshape(tensorflow.cast(value, "float32"), ())
    return float(value)


def length_of(batch: Any, parts: int = 1) -> float:
    """Samples in a rank's batch: the length of its first array or tensor; 0 if there is none.

    In JAX an array may be the batch of all ranks; then its length is divided by ``parts``.
    """
    if getattr(batch, "shape", None):
        whole = not getattr(batch, "is_fully_addressable", True)
        return int(batch.shape[0]) / parts if whole else int(batch.shape[0])
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for each in batch:
            with suppress(TypeError, ValueError):
                if found := length_of(each, parts):
                    return found
    return 0


class HostLoad:
    """The load of this host since the last ``read``: from ``psutil`` and ``nvidia-ml-py``."""

    def __init__(self) -> None:
        self._nvml: Any = None  # None on a host without NVIDIA's library, or without a GPU
        with suppress(Exception):
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
        psutil.cpu_percent()
        self._since, self._net = time.monotonic(), _network()

    def read(self) -> dict[str, float]:
        """The load by name.

        ``cpu`` (percent of all CPUs), ``memory`` (percent), ``sent_mb_s`` and ``received_mb_s``
        (10^6 bytes a second, over all interfaces but loopback); with NVIDIA GPUs also ``gpu``
        (percent, mean over GPUs) and ``gpu_memory`` (percent, of the fullest).
        """
        now, net = time.monotonic(), _network()
        seconds = max(now - self._since, 1e-9)
        load = {
            "cpu": psutil.cpu_percent(),
            "memory": psutil.virtual_memory().percent,
            "sent_mb_s": (net[0] - self._net[0]) / seconds / 1e6,
            "received_mb_s": (net[1] - self._net[1]) / seconds / 1e6,
        }
        self._since, self._net = now, net
        if (nvml := self._nvml) is not None:
            # Someone may be updating the driver, or a GPU may have failed.
            with suppress(nvml.NVMLError):
                gpus = list(map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())))
                memory = [nvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in gpus]
                used = [nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in gpus]
                if gpus:
                    load["gpu"] = sum(used) / len(used)
                    load["gpu_memory"] = max(100.0 * each.used / each.total for each in memory)
        return load


def _network() -> tuple[int, int]:
    """Bytes that this host has sent and received."""
    interfaces = psutil.net_io_counters(pernic=True)
    counted = [each for name, each in interfaces.items() if name != "lo"]
    return sum(each.bytes_sent for each in counted), sum(each.bytes_recv for each in counted)


class StepTimes(NamedTuple):
    """The time of some steps.

    ``late_by`` has shape (ranks, 3), in the order of ``REASONS``: the seconds by which a rank's
    data, compute and start were later than the median over ranks, summed over the steps in which
    it came last.
    """

    steps: int
    parts: dict[str, float]  # the seconds of each part of a step, as a mean over ranks and steps
    samples_per_second: list[float]  # the samples per second of each rank
    last: NDArray[np.int64]  # the number of steps in which each rank came last to the collectives
    late_by: NDArray[np.float64]


def step_times(ranks: Sequence[Sequence[Step]]) -> StepTimes:
    """Where the time went in the steps of all ranks; a ValueError if no rank has any.

    Ranks that train at their own pace may have different numbers of them; then nobody comes last.
    """
    counts = [len(steps) for steps in ranks]
    if not any(counts):
        raise ValueError("no rank has taken a step")
    size = len(ranks)
    # A rank may have no step.
    tables = [np.array(steps, float).reshape(-1, 4) for steps in ranks]
    duration, data, blocked, samples = np.array([table.sum(0) for table in tables]).T
    last, late_by = np.zeros(size, np.int64), np.zeros((size, len(REASONS)))
    waiting = np.zeros(size)
    if len(set(counts)) == 1 and size > 1:
        took, loading, spent, _ = np.moveaxis(np.stack(tables), -1, 0)
        waiting = (spent - spent.min(0)).sum(1)
        who = spent.argmin(0)
        waited = np.flatnonzero(spent.max(0) > 0)
        last = np.bincount(who[waited], minlength=size)
        # All ranks end a step together: the one that began last took the shortest.
        own = np.stack([loading, took - loading - spent, -took], axis=-1)
        beyond = own - np.median(own, axis=0)
        np.add.at(late_by, who[waited], beyond[who[waited], waited])
    with np.errstate(invalid="ignore", divide="ignore"):
        speeds = np.nan_to_num(samples / duration)
    parts = (data, duration - data - blocked, waiting, blocked - waiting)
    means = [float(part.sum() / sum(counts)) for part in parts]
    return StepTimes(
        max(counts), dict(zip(PARTS, means, strict=True)), speeds.tolist(), last, late_by
    )


def busy(parts: Mapping[str, float]) -> float:
    """The part of the time in which ranks are not blocked: from 0 to 1.

    This is no speedup: ranks that share cores or a disk are busy, but slower than a single one.
    """
    whole = sum(parts.values())
    return (parts["data"] + parts["compute"]) / whole if whole else 0.0


@dataclass
class Totals:
    """The times of a whole run, added up: ``parts`` in seconds; ``hosts`` are by rank."""

    hosts: Sequence[str]
    steps: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _last: Any = 0
    _late_by: Any = 0

    def add(self, more: StepTimes) -> None:
        self.steps += more.steps
        for name, seconds in more.parts.items():
            self.parts[name] += more.steps * seconds
        self._last = self._last + more.last
        self._late_by = self._late_by + more.late_by

    def summary(self) -> dict[str, Any]:
        """How ``busy`` ranks were, ``parts`` of the time, and a slow rank.

        ``last`` holds the rank that came last most often, its host, the part of the steps, and
        which of ``REASONS`` made it late; None if no rank stands out.
        """
        whole = sum(self.parts.values())
        if not whole:
            return {"busy": 0.0, "parts": {}, "last": None}
        parts = {name: seconds / whole for name, seconds in self.parts.items()}
        found, size = None, len(self.hosts)
        if size > 1 and parts["waiting"] > _WORTH_NAMING and np.sum(self._last):
            rank = int(np.argmax(self._last))
            often = float(self._last[rank] / np.sum(self._last))
            if often > min(_BEYOND_CHANCE / size, 0.9):
                reason = REASONS[int(np.argmax(self._late_by[rank]))]
                found = {"rank": rank, "host": self.hosts[rank], "share": often, "reason": reason}
        return {"busy": busy(parts), "parts": parts, "last": found}

    def line(self) -> str:
        """The run in one line: ``ranks busy 73%; rank 3 on node2 was last in 71% of steps: data``.

        With one rank, the parts of its time: ``data 5%, compute 95%``.
        """
        found = self.summary()
        if len(self.hosts) == 1:
            percents = (f"{name} {part:.0%}" for name, part in found["parts"].items())
            return ", ".join(each for each in percents if not each.endswith(" 0%"))
        said = [f"ranks busy {found['busy']:.0%}"]
        if last := found["last"]:
            often = f"{last['share']:.0%} of steps: {last['reason']}"
            said.append(f"rank {last['rank']} on {last['host']} was last in {often}")
        return "; ".join(said)
