"""Measures on one rank how long each step takes, and how much of that passes in waits.

The clock observes hvkit's own waits (``hvkit.watch.spans``). A wait holds two things that one rank
cannot tell apart: others that are late, and the collective itself. ``step_shares`` separates them
once it has the steps of all ranks.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from hvkit.watch.spans import WAITING, Span, observe


class Step(NamedTuple):
    """One step of one rank, in seconds.

    Attributes:
        duration: from the end of the step before.
        data: of it, until the batch was there.
        blocked: of it, in collectives.
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
        """Begin the next step now; what has passed since the last one counts for none."""
        self._since = time.monotonic()
        self._data = self._blocked = 0.0

    def loaded(self, seconds: float) -> None:
        """Count time that passed until a batch was there."""
        self._data += seconds

    def blocked(self, seconds: float) -> None:
        """Count time in collectives of a graph, which no wait of Python surrounds."""
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
        # Agreements beside training, and checkpoints in the background, have threads of their own.
        if span.name == WAITING and threading.get_ident() == self._thread:
            self._blocked += span.ended - span.begun
