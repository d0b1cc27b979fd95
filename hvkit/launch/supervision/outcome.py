"""How a run ended, and whose fault that was: plain arithmetic on what the ranks told."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

# Errors of a rank whose partners have gone: what follows from the first failure.
_CONSEQUENCES = ("RankLostError", "HorovodInternalError", "Horovod has been shut down")


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well.

    Attributes:
        rank: which.
        host: where.
        status: exit status, negative for a signal; ``None`` if it ended without a word.
        problem: what went wrong, if that was not in the command itself.
        last_lines: the last lines that it printed.
        asked: whether it was told to end.
    """

    rank: int
    host: str
    status: int | None
    problem: str | None = None
    last_lines: tuple[str, ...] = ()
    asked: bool = False

    @property
    def follows(self) -> bool:
        """Whether this comes from the failure of another rank."""
        text = "\n".join(self.last_lines)
        return self.asked or any(name in text for name in _CONSEQUENCES)

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

    Args:
        failures: in the order in which they became known.
    """
    causes = [failure for failure in failures if not failure.follows]
    return next(iter(causes or [f for f in failures if not f.asked]), None)


def report(failures: Sequence[Failure]) -> str:
    """What to tell about the failures of a run; empty if there were none."""
    first = culprit(failures)
    if first is None:
        return ""
    lines = [f"hvkit run: {first.describe()}"]
    if first.last_lines:
        lines[0] += "; its last lines:"
        lines += [f"    {line}" for line in first.last_lines]
    others = sorted({f.rank for f in failures if not f.asked} - {first.rank})
    if others:
        s = "s" if len(others) > 1 else ""
        lines.append(f"hvkit run: after that, rank{s} {ranges(others)} failed too")
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, neighbours joined: ``0-3, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
