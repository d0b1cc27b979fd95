"""How a run ended, and whose fault that was: plain arithmetic on what the ranks told."""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvkit.watch.verdict import ranks_text

# Errors of a rank whose partners have gone: what follows from the first failure.
_CONSEQUENCES = (
    *("RankLostError", "HorovodInternalError", "Horovod has been shut down"),
    "hvkit: rank",  # ... ends with the error of another
)

# Signals that no error of a partner leads to.
_VIOLENT = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}

_TOGETHER = 1.0
"""Seconds within which the order of failures is not trusted."""


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well.

    Attributes:
        rank: which.
        host: where.
        status: exit status, negative for a signal; ``None`` if it ended without a word.
        at: when that was, in seconds of this host's monotonic clock.
        problem: what went wrong, if that was not in the command itself.
        last_lines: the last lines that it printed.
        asked: whether it was told to end.
        lost: whether its host gave no sign of life any more.
    """

    rank: int
    host: str
    status: int | None
    at: float
    problem: str | None = None
    last_lines: tuple[str, ...] = ()
    asked: bool = False
    lost: bool = False

    @property
    def follows(self) -> bool:
        """Whether it says itself that another rank failed."""
        text = "\n".join(self.last_lines)
        return any(name in text for name in _CONSEQUENCES)

    @property
    def violent(self) -> bool:
        """Whether it was ended from outside, or by a fault; the errors of others come from that."""
        return self.status is None or -self.status in _VIOLENT

    @property
    def exit_status(self) -> int:
        """As a shell has it: 128 and the number of the signal."""
        if self.status is None:
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    def describe(self) -> str:
        """What happened, in a line."""
        who = f"rank {self.rank} on {self.host}"
        if self.problem is not None:
            return f"{who}: {self.problem}"
        if self.status is None:
            return f"{who} ended without a word, with the process that watched it"
        if self.status < 0:
            return f"{who} was killed by signal {-self.status} ({_name(-self.status)})"
        return f"{who} ended with exit status {self.status}"


def culprit(failures: Sequence[Failure]) -> Failure | None:
    """The failure that the others follow from, if there is any.

    That is the first, but what is known of times is not exact: MPI ends a rank whose partner was
    killed within milliseconds. Of failures at about the same time a violent one is the cause.
    """
    own = [failure for failure in failures if not failure.asked]
    causes = [failure for failure in own if not failure.follows] or own
    if not causes:
        return None
    first = min(failure.at for failure in causes)
    together = [failure for failure in causes if failure.at - first < _TOGETHER]
    return min(together, key=lambda failure: (not failure.violent, failure.at))


def report(failures: Sequence[Failure], elsewhere: Collection[str] = ()) -> str:
    """What to tell about the failures of a run; empty if there were none.

    Args:
        failures: in the order in which they became known.
        elsewhere: the hosts of the run besides this one.
    """
    first = culprit(failures)
    if first is None:
        return ""
    lines = [f"hvkit run: {_lost(failures, elsewhere) if first.lost else first.describe()}"]
    if first.last_lines:
        lines[0] += "; its last lines:" if not first.lost else f"; last lines of rank {first.rank}:"
        lines += [f"    {line}" for line in first.last_lines]
    named = {f.rank for f in failures if f.lost} if first.lost else {first.rank}
    others = sorted({f.rank for f in failures if not f.asked} - named)
    if others:
        lines.append(f"hvkit run: after that, {ranks_text(others)} failed too")
    return "\n".join(lines)


def _lost(failures: Sequence[Failure], elsewhere: Collection[str]) -> str:
    """Which hosts were lost, and what that means."""
    ranks: dict[str, list[int]] = {}
    for failure in failures:
        if failure.lost:
            ranks.setdefault(failure.host, []).append(failure.rank)
    listed = ", ".join(f"{host} ({ranks_text(sorted(ranks[host]))})" for host in sorted(ranks))
    if len(ranks) > 1 and ranks.keys() == set(elsewhere):
        return f"no sign of life from any other host: {listed}: this host's network is down"
    what = "they" if len(ranks) > 1 else "it"
    return f"no sign of life from {listed}: {what} or the network is down"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
