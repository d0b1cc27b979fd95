"""The ranks at one moment, from reports that come one after another.

Ranks report where they are at each full second of the clock (``hvkit.watch.heartbeat``), and so at
the same instant, as far as their hosts' clocks agree. The supervisor keeps the last reports of each
rank, and ``hvkit top`` shows all ranks at the newest second that all of them have reported: a rank
whose report came first does not seem to be steps behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypedDict

# Seconds for which reports are kept, and without one after which nobody waits for a rank's next.
_KEPT = 8
_ANSWERS_WITHIN = 3.0


class RankReport(TypedDict, total=False):
    """Where a rank is; moments are as of ``time.monotonic``."""

    call: str
    """The call of hvkit that it is in; empty outside of any."""
    waits: float
    """For how many seconds it has waited there."""
    where: str
    """The line of the script."""
    step: int
    """The last optimizer step."""
    moved: float
    """When the first report with this step came."""
    speed: float | None
    """Samples a second, with ``hvkit.Monitor``."""
    at: float
    """When it was there."""


class RankReports:
    """The last reports of one rank, each at a second of this host's clock."""

    def __init__(self) -> None:
        # The host's clock may be another one: the quickest of the last reports says which.
        self._delays: deque[float] = deque(maxlen=_KEPT)
        self._kept: deque[tuple[int, RankReport]] = deque(maxlen=_KEPT)
        self._arrived = 0.0

    @property
    def newest(self) -> RankReport:
        """The last report; empty before the first."""
        return self._kept[-1][1] if self._kept else {}

    def take(self, report: RankReport, made: float, arrived: float, monotonic: float) -> None:
        """Keep a report, with its second as ``at``, as of ``time.monotonic``.

        Args:
            report: where the rank was.
            made: when, by the clock of the rank's host; seconds since 1970.
            arrived: when it came, by this host's clock.
            monotonic: the same moment, as of ``time.monotonic``.
        """
        self._delays.append(arrived - made)
        self._arrived = arrived
        second = round(made + min(self._delays))
        if self._kept and self._kept[-1][0] == second:
            self._kept.pop()
        self._kept.append((second, {**report, "at": monotonic - (arrived - second)}))

    def newest_second(self, now: float) -> int | None:
        """The second of the last report; None if the rank has been silent for some seconds."""
        return self._kept[-1][0] if self._kept and now - self._arrived < _ANSWERS_WITHIN else None

    def at(self, second: int) -> RankReport:
        """The last report up to this second, or the oldest one that is kept."""
        before = [report for made, report in self._kept if made <= second]
        return before[-1] if before else self._kept[0][1] if self._kept else {}


def at_one_moment(running: Sequence[RankReports], now: float) -> list[RankReport]:
    """The reports of ranks at the newest second that all have reported.

    Args:
        running: the ranks; those that have been silent for some seconds delay nobody.
        now: this host's clock; seconds since 1970.
    """
    newest = [second for each in running if (second := each.newest_second(now)) is not None]
    if not newest:
        return [each.newest for each in running]
    return [each.at(min(newest)) for each in running]
