"""When ``hvkit run`` starts a run again, and after which pause; no input or output."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvkit.launching.supervision.supervised_run import Outcome
from hvkit.launching.supervision.tracebacks import Raised

# Seconds before a restart: of the first after progress, and of the longest.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


@dataclass
class Restarts:
    """Decides after each end of the ranks whether to start them again.

    Restarts are limited only while there is no progress: a newer checkpoint restores the budget. So
    a run goes on as long as it makes progress, and a script that always fails stops soon. A try
    that has to resume an older checkpoint, because the host with the newest one was lost, reduces
    the budget by one until the run is further than before. Each restart without progress doubles
    the pause before the next. Leaving after SIGTERM is no failure. If the code of the script is
    wrong, it raises the same exception at the same line in two tries in a row, before its first
    step; it would do so again, so there is no further restart. Errors of files, networks or memory
    may not occur again.

    Args:
        most: how many failures in a row without progress are followed by a restart; 0 for none.

    Attributes:
        made: how many restarts there were.
        repeated: the exception that ended two tries in a row before any step; None if none did.
    """

    most: int
    made: int = 0
    repeated: Raised | None = None
    _raised: Raised | None = field(default=None, repr=False)
    _without_progress: int = field(default=0, repr=False)
    _newest: int = field(default=-1, repr=False)
    _best: int = field(default=-1, repr=False)
    _went_back: int = field(default=0, repr=False)

    def again(self, outcome: Outcome) -> bool:
        """Whether to start the ranks again."""
        if outcome.status == 0 or not outcome.restartable:
            return False
        before, self._raised = self._raised, outcome.raised
        if before is not None and before.lasts and before == outcome.raised:
            self.repeated = before
            return False
        progress = outcome.saved is not None and outcome.saved > self._newest
        if outcome.saved is not None:
            if outcome.saved < self._newest:
                self._went_back += 1
            self._newest = outcome.saved
            if self._newest > self._best:
                self._best, self._went_back = self._newest, 0
        if progress:
            self._without_progress = self._went_back
        if self._without_progress >= self.most:
            return False
        self._without_progress += not (outcome.preempted and progress)
        self.made += 1
        return True

    @property
    def end(self) -> str:
        """For messages: why a run that has failed is not started again."""
        if self.repeated is None:
            return f"gives up after {self.budget}"
        return f"gives up: {self.repeated} again, before any step: another restart would not help"

    @property
    def pause(self) -> float:
        """Seconds to wait before the restart."""
        doublings = min(max(self._without_progress - 1, 0), 10)
        return float(min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE))

    @property
    def budget(self) -> str:
        """For messages: ``restart 5 (2 of at most 3 without a newer checkpoint)``."""
        used = f"{self._without_progress} of at most {self.most} without a newer checkpoint"
        return f"restart {self.made} ({used if self._without_progress else 'not counted'})"
