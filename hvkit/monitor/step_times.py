"""How long each step of a rank takes, and where the time of all ranks' steps went.

A clock on each rank observes hvkit's own waits (``hvkit.watch.spans``). A wait includes two times
that a single rank cannot separate: until the last rank arrives, and the collective itself.
Arithmetic on the steps of all ranks separates them. In a step that all ranks end together, the rank
that came last to the collectives waited for nobody, so it was blocked only for as long as the
collectives took. Other ranks were blocked for longer: the difference is their waiting. No common
clock is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvkit.watch.spans import WAITING, Span, observe

PARTS = ("data", "compute", "waiting", "allreduce")
"""Parts of a step's time: loading the batch; forward, backward, update and the script's own code;
waiting for other ranks; collectives."""

REASONS = ("data", "compute", "between steps")
"""Why a rank comes last; "between steps" is work of the script that belongs to no step."""

# A rank is reported as slow if all ranks waited for more than this part of their time, and it was
# last so many times more often than by chance.
_WORTH_NAMING = 0.05
_BEYOND_CHANCE = 1.5


class Step(NamedTuple):
    """One step of one rank, in seconds.

    Attributes:
        duration: from the end of the step before.
        data: the part of it in which the batch was loaded.
        blocked: the part of it in collectives.
        samples: in the batch.
    """

    duration: float
    data: float
    blocked: float
    samples: float

    def waiting(self, seconds: float) -> Step:
        """The step with so many further seconds in a collective at its end."""
        return self._replace(duration=self.duration + seconds, blocked=self.blocked + seconds)


class StepClock:
    """Takes the time of this thread's steps."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._blocked = 0.0
        self.begin()
        observe(self._see)

    def begin(self) -> None:
        """Begin the next step now; the time since the last one belongs to no step."""
        self._since = time.monotonic()
        self._data = self._blocked = 0.0

    def loaded(self, seconds: float) -> None:
        """Count time in which a batch was loaded."""
        self._data += seconds

    def loaded_until_now(self) -> None:
        """Count all time of this step so far as loading its batch."""
        self._data = time.monotonic() - self._since

    def blocked(self, seconds: float) -> None:
        """Count time in collectives of a graph, which mark no spans."""
        self._blocked += seconds

    def end(self, samples: float) -> Step:
        """End the step, and begin the next one."""
        now = time.monotonic()
        step = Step(now - self._since, self._data, self._blocked, samples)
        self._since, self._data, self._blocked = now, 0.0, 0.0
        return step

    def close(self) -> None:
        """Observe no more waits."""
        observe(self._see, False)

    def _see(self, span: Span) -> None:
        # Agreements that overlap training, and background checkpoints, have threads of their own.
        if span.name == WAITING and threading.get_ident() == self._thread:
            self._blocked += span.ended - span.begun


@dataclass(frozen=True)
class StepShares:
    """The time of some steps.

    Attributes:
        steps: how many.
        seconds: of a step, mean over ranks and steps.
        parts: by the names in ``PARTS``, seconds of a step, mean over ranks and steps.
        samples_per_second: by rank.
        last: by rank, in how many steps it came last to the collectives.
        late_by: by rank, the seconds by which its data, its compute and the start of its steps were
            later than the median over ranks, summed over the steps in which it came last: an array
            of shape (ranks, 3), in the order of ``REASONS``.
    """

    steps: int
    seconds: float
    parts: dict[str, float]
    samples_per_second: list[float]
    last: NDArray[np.int64]
    late_by: NDArray[np.float64]


def shares(ranks: Sequence[Sequence[Step]]) -> StepShares:
    """Where the time went in the steps of all ranks.

    Args:
        ranks: by rank, its steps; ranks that train at their own pace may have different numbers of
            them, and then nobody comes last.

    Raises:
        ValueError: no rank has a step.
    """
    counts = [len(steps) for steps in ranks]
    if not any(counts):
        raise ValueError("no rank has taken a step")
    size = len(ranks)
    # A rank may have no step.
    tables = [np.array(steps, float).reshape(-1, 4) for steps in ranks]
    totals = np.array([table.sum(0) for table in tables])
    duration, data, blocked, samples = totals.T
    last, late_by = np.zeros(size, np.int64), np.zeros((size, len(REASONS)))
    waiting = np.zeros(size)
    if len(set(counts)) == 1 and size > 1:
        whole = np.stack(tables)
        took, loading, spent = whole[:, :, 0], whole[:, :, 1], whole[:, :, 2]
        shortest = spent.min(0)
        waiting = (spent - shortest).sum(1)
        who = spent.argmin(0)
        waited = spent.max(0) > 0
        last = np.bincount(who[waited], minlength=size)
        # All ranks end a step together: the one that began last took the shortest.
        own = np.stack([loading, took - loading - spent, -took], axis=-1)
        beyond = own - np.median(own, axis=0)
        for step in np.flatnonzero(waited):
            late_by[who[step]] += beyond[who[step], step]
    steps = sum(counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = np.nan_to_num(samples / duration)
    means = {
        "data": data.sum() / steps,
        "compute": (duration - data - blocked).sum() / steps,
        "waiting": waiting.sum() / steps,
        "allreduce": (blocked - waiting).sum() / steps,
    }
    return StepShares(
        steps=max(counts),
        seconds=float(duration.sum() / steps),
        parts={name: float(value) for name, value in means.items()},
        samples_per_second=[float(each) for each in speed],
        last=last,
        late_by=late_by,
    )


def busy(parts: Mapping[str, float]) -> float:
    """The part of the time in which ranks are not blocked: from 0 to 1.

    This is no speedup: ranks that share cores or a disk are busy, but slower than a single one.

    Args:
        parts: seconds, or parts of the time, by the names in ``PARTS``.
    """
    whole = sum(parts.values())
    return (parts["data"] + parts["compute"]) / whole if whole else 0.0


@dataclass
class Totals:
    """The shares of a whole run, added up.

    Args:
        hosts: by rank, the name of its host.
    """

    hosts: Sequence[str]
    steps: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _last: Any = 0
    _late_by: Any = 0

    def add(self, more: StepShares) -> None:
        """Add the shares of further steps."""
        self.steps += more.steps
        self.seconds += more.steps * more.seconds
        for name, seconds in more.parts.items():
            self.parts[name] += more.steps * seconds
        self._last = self._last + more.last
        self._late_by = self._late_by + more.late_by

    def summary(self) -> dict[str, Any]:
        """How ``busy`` ranks were, ``parts`` of the time, and a slow rank.

        ``last`` holds the rank that came last most often, its host, the part of the steps, and
        which of ``REASONS`` made it late; None if no rank stands out.
        """
        if not self.seconds:
            return {"busy": 0.0, "parts": {}, "last": None}
        parts = {name: seconds / self.seconds for name, seconds in self.parts.items()}
        found = None
        size = len(self.hosts)
        if size > 1 and parts["waiting"] > _WORTH_NAMING and np.sum(self._last):
            rank = int(np.argmax(self._last))
            often = float(self._last[rank] / np.sum(self._last))
            if often > min(_BEYOND_CHANCE / size, 0.9):
                reason = REASONS[int(np.argmax(self._late_by[rank]))]
                found = {
                    "rank": rank,
                    "host": self.hosts[rank],
                    "share": often,
                    "reason": reason,
                }
        return {"busy": busy(parts), "parts": parts, "last": found}

    def line(self) -> str:
        """The run in one line: ``ranks busy 73%; rank 3 on node2 was last in 71% of steps: data``.

        With one rank, the parts of its time: ``data 5%, compute 95%``.
        """
        result = self.summary()
        if len(self.hosts) == 1:
            shares = {name: f"{share:.0%}" for name, share in result["parts"].items()}
            return ", ".join(f"{name} {share}" for name, share in shares.items() if share != "0%")
        said = f"ranks busy {result['busy']:.0%}"
        if (last := result["last"]) is not None:
            said += (
                f"; rank {last['rank']} on {last['host']} was last in {last['share']:.0%} of "
                f"steps: {last['reason']}"
            )
        return said
