"""Which rank failed first, and the lines that ``hvkit run`` prints about it; no input or output."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hvkit.errors import ranks_text
from hvkit.launching.supervision.tracebacks import Raised, raised
from hvkit.log import shortened

# Printed by a rank whose error another one shows, or has (``hvkit.watch.rank_errors``).
_SAME, _OF_ANOTHER = "ends with the same", "ends for the error of rank"

# Errors of a rank that has lost other ranks: consequences of another failure.
# ``hvkit.watch.watcher`` prints the last two, about a wait that Horovod does not end.
_CONSEQUENCES = (
    *("RankLostError", "HorovodInternalError", "Horovod has been shut down", _SAME, _OF_ANOTHER),
    *("after it should have ended", "it cannot reach rank 0"),
)

# The last line of a traceback, and any line of its messages.
_EXCEPTION = re.compile(r"(?:\s+\| )?([\w.]+(?:Error|Exception|Interrupt|Exit|Group)\b.*)")
_MESSAGE = re.compile(r"(?:\s+\| )?\S")

# Signals that the failure of another rank does not cause.
_VIOLENT = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}

# Characters of an error in the reason for a restart.
_LONGEST_ERROR = 300

# Seconds within which the order of failures is unreliable.
_SIMULTANEOUS = 1.0


@dataclass(frozen=True)
class Failure:
    """A rank that did not end with exit status 0."""

    rank: int
    host: str
    status: int | None  # negative for a signal; None if none arrived
    at: float  # seconds of this host's monotonic clock
    problem: str | None = None  # if not in the command itself
    last_lines: tuple[str, ...] = ()  # as far as they may explain why it ended
    all_last_lines: tuple[str, ...] = ()
    traceback: tuple[str, ...] = ()  # at the end of standard error; empty if something follows
    refused: bool = False  # hvkit has raised its exception, because of a wrong argument
    stopped: bool = False  # it was being ended when it ended
    lost: bool = False  # its host stopped answering

    @property
    def text(self) -> str:
        return "\n".join([*self.all_last_lines, *self.last_lines])

    @property
    def is_consequence(self) -> bool:
        """Whether its last lines blame another rank."""
        return _blames_another(self.text)

    def is_same_as(self, other: Failure) -> bool:
        """Whether both ranks ended with the same error, which only one of them may have shown."""
        shown_there = re.search(rf"{_SAME} \w+ as rank {other.rank}\b", self.text)
        return bool(shown_there) or (bool(self.error) and self.error == other.error)

    @property
    def error(self) -> str:
        """The last line that names an exception; empty if there is none."""
        found = map(_EXCEPTION.match, reversed(self.last_lines))
        return next((error[1] for error in found if error), "")

    @property
    def raised(self) -> Raised | None:
        """The exception that ended it, with its lines; None if none did.

        Python's exit status is 1 then, unless the rank was stopped at that moment.
        """
        ended = self.status == 1 or (self.stopped and not self.violent)
        found = raised(self.traceback) if ended and not self.is_consequence else None
        return None if found is None else replace(found, refused=self.refused)

    @property
    def violent(self) -> bool:
        """Whether it crashed or was killed, which makes other ranks fail."""
        return self.status is None or -self.status in _VIOLENT

    @property
    def exit_status(self) -> int:
        """The exit status as a shell returns it: 128 and the number of a signal."""
        if self.status is None:
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    def describe(self) -> str:
        """One line about what happened."""
        who = f"rank {self.rank} on {self.host}"
        if self.problem is not None:
            return f"{who}: {self.problem}"
        if self.status is None:
            return f"{who} vanished: it and its watcher died without an exit status"
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            name = names.get(-self.status, "unknown")
            return f"{who} was killed by signal {-self.status} ({name})"
        return f"{who} ended with exit status {self.status}"


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure that caused the others; ``None`` if no rank failed by itself.

    It is the earliest one, but the times are not exact: when a rank is killed, MPI ends others
    within milliseconds. Of failures at about the same time, a violent one is the cause. A rank that
    has raised an error may have been stopped while it still waited for the others to end.
    """
    by_themselves = [failure for failure in failures if not failure.stopped]
    if not by_themselves:
        return None
    causes = [failure for failure in by_themselves if not failure.is_consequence]
    causes = causes or [failure for failure in failures if failure.raised] or by_themselves
    first = min(failure.at for failure in causes)
    simultaneous = [failure for failure in causes if failure.at - first < _SIMULTANEOUS]
    return min(simultaneous, key=lambda failure: (not failure.violent, failure.at))


def report(failures: Sequence[Failure], other_hosts: Collection[str] = (), cause: str = "") -> str:
    """The lines about the failures of a run; empty if no rank failed by itself."""
    first = first_failure(failures)
    if first is None:
        return ""
    if cause and first.is_consequence:
        return f"hvkit run: {cause}"
    lines = [f"hvkit run: {_described(first, failures, other_hosts)}"]
    if first.last_lines:
        lines[0] += "; its last lines:" if not first.lost else f"; last lines of rank {first.rank}:"
        lines += [f"    {line}" for line in first.last_lines]
    named = {f.rank for f in failures if f.lost} if first.lost else {first.rank}
    by_themselves = {f.rank: f for f in failures if not f.stopped}
    others = sorted(by_themselves.keys() - named)
    same = [rank for rank in others if by_themselves[rank].is_same_as(first)]
    if same:
        lines.append(f"hvkit run: {ranks_text(same)} ended with the same error")
    if rest := [rank for rank in others if rank not in same]:
        lines.append(f"hvkit run: after that, {ranks_text(rest)} failed too")
    return "\n".join(lines)


def hidden_tracebacks(failures: Sequence[Failure], cause: str = "") -> set[int]:
    """The ranks whose tracebacks are not shown: the reported one, the same, consequences."""
    first = first_failure(failures)
    if first is None:
        return set()
    # If other last lines take its place in the report, it is shown as it arrived.
    whole = first.last_lines[: len(first.traceback)] == first.traceback
    shown = () if (cause and first.is_consequence) or not whole else first.traceback

    def is_needless(failure: Failure) -> bool:
        traceback = failure.traceback
        if not traceback or failure is first:
            return bool(traceback and shown)
        if shown and _messages(traceback) == _messages(shown):
            return True
        # Lines after the exception's may be the script's own.
        return bool(_EXCEPTION.match(traceback[-1])) and _blames_another("\n".join(traceback))

    return {failure.rank for failure in failures if is_needless(failure)}


def in_one_line(
    failures: Sequence[Failure], other_hosts: Collection[str] = (), cause: str = ""
) -> str:
    """Why a run has ended, in one line with the error if there is one; empty if no rank failed."""
    first = first_failure(failures)
    if first is None:
        return ""
    if cause and first.is_consequence:
        return cause
    error = (
        f": {shortened(first.error, _LONGEST_ERROR)}" if first.error and not first.violent else ""
    )
    return f"{_described(first, failures, other_hosts)}{error}"


def _blames_another(text: str) -> bool:
    return any(name in text for name in _CONSEQUENCES)


def _messages(traceback: Sequence[str]) -> list[str]:
    """A traceback without files and lines."""
    return [line for line in traceback if _MESSAGE.match(line)]


def _described(first: Failure, failures: Sequence[Failure], other_hosts: Collection[str]) -> str:
    """What happened; if hosts were lost, which with their ranks, and the likely reason."""
    if not first.lost:
        return first.describe()
    ranks: dict[str, list[int]] = {}
    for failure in failures:
        if failure.lost:
            ranks.setdefault(failure.host, []).append(failure.rank)
    listed = ", ".join(f"{host} ({ranks_text(sorted(ranks[host]))})" for host in sorted(ranks))
    if len(ranks) > 1 and ranks.keys() == set(other_hosts):
        return f"no sign of life from any other host: {listed}: this host's network is down"
    hosts = "they" if len(ranks) > 1 else "it"
    return f"no sign of life from {listed}: {hosts} or the network is down"
