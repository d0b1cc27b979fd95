"""Turns the reports of all ranks into a sentence, and decides whether the run must end.

Ranks in calls that do not match will wait forever, and so will ranks that wait for one that has
ended. A rank outside of calls may be loading data or compiling for minutes: that is reported once,
and ends the run only after a much longer time. No sockets here, only decisions.

A call may need some ranks only, a group. Groups may be in different calls, and one may wait for
another that still trains.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from hvkit.errors import LaunchError, ranks_text
from hvkit.watch.calls import Status
from hvkit.watch.rank_errors import SAME_CALLS, SAME_STEPS

LIMIT_SET_BY = "--stall, HVKIT_STALL_LIMIT_SECONDS"
MISMATCH_AFTER = 5.0
"""Seconds after which ranks that wait in different calls do not just differ for a moment."""


@dataclass(frozen=True)
class Limits:
    """Seconds until a rank that others wait for is reported, and until it ends the run."""

    report: float = 60.0
    end: float = 1800.0

    @classmethod
    def from_environment(cls) -> Limits:
        """``HVKIT_STALL_SECONDS`` and ``HVKIT_STALL_LIMIT_SECONDS``, or the defaults."""
        report = _seconds("HVKIT_STALL_SECONDS", cls.report)
        return cls(report, max(report, _seconds("HVKIT_STALL_LIMIT_SECONDS", cls.end)))


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"{name} must be a positive number of seconds, got {text!r}")
    return seconds


About = tuple[str, int, tuple[int, ...]]
"""The key, the serial number and the ranks of a call, so that it is reported only once."""


@dataclass(frozen=True)
class Diagnosis:
    """A judgement about ranks that wait."""

    text: str
    ends: bool  # whether the run must end
    about: About = ("", 0, ())
    answered: bool = True  # by all ranks; if a process is stopped, Horovod cannot end the waits


def diagnose(
    ranks: Mapping[int, Status],
    ended: Mapping[int, str],
    report_after: float,
    end_after: float,
    reported: Container[About] = (),
) -> Diagnosis | None:
    """Judge the ranks' reports; None if all is well.

    ``ranks`` are those that have not ended, with a ``Status`` without ``where`` for one that does
    not answer; ``ended`` describes the others. ``reported`` has ``about`` of earlier diagnoses.
    """
    waiting = {rank: s for rank, s in ranks.items() if s.waits and s.seconds >= MISMATCH_AFTER}
    if not waiting:
        return None
    if ended:
        how = "; ".join(f"{ranks_text(numbers)} {end}" for end, numbers in _ranks_with(ended))
        return Diagnosis(f"{_waits(waiting)}; {how}: {SAME_CALLS}, and {SAME_STEPS}", True)
    crossed = _for_each_other(waiting)
    if crossed and not _on_their_way(crossed, report_after):
        return Diagnosis(f"{_waits(crossed)}: {SAME_CALLS}", True)
    groups = dict.fromkeys(s.ranks for s in waiting.values())
    limits = report_after, end_after
    found = (_of_group(each, ranks, waiting, bool(crossed), *limits) for each in groups)
    # One that ends the run comes first; then one that has not been reported.
    return min(filter(None, found), key=lambda d: (not d.ends, d.about in reported), default=None)


def _of_group(
    group: tuple[int, ...],
    ranks: Mapping[int, Status],
    all_waiting: Mapping[int, Status],
    mixed: bool,
    report_after: float,
    end_after: float,
) -> Diagnosis | None:
    """Judge the calls of a group; an empty one is all ranks. ``mixed``: some calls do not match."""
    waiting = {rank: s for rank, s in all_waiting.items() if s.ranks == group}
    longest = max(waiting.values(), key=lambda s: s.seconds)
    others = {r: s for r, s in ranks.items() if r not in waiting and (not group or r in group)}
    # A rank whose wait has just begun has reached the call, unless it waits for another group.
    missing = {r: s for r, s in others.items() if not s.waits or s.ranks != group}
    if others and not missing:
        return None
    about = (longest.key, longest.serial, group)
    if longest.seconds >= end_after:
        limit = f"the limit is {end_after:g} s ({LIMIT_SET_BY})"
        if missing:
            text = f"{_missing(missing, longest)}; {_waits(waiting)}; {limit}{_stacks(missing)}"
        else:
            why = SAME_CALLS if mixed else "the exchange between them does not end"
            text = f"{_waits(waiting)}: {why}; {limit}"
        return Diagnosis(text, True, about, answered=all(s.where for s in missing.values()))
    if longest.seconds >= report_after:
        if missing:
            return Diagnosis(_missing(missing, longest), False, about)
        if mixed:  # in some seconds it will be clear whether they make different calls
            return None
        text = f"{_waits(waiting)} for {longest.seconds:.0f} s: a slow network, or exchanges "
        return Diagnosis(text + "that do not match", False, about)
    return None


def _for_each_other(waiting: Mapping[int, Status]) -> dict[int, Status]:
    """The ranks that wait for each other in different calls, so that none of these will end."""

    def needs(rank: int, other: int) -> bool:
        status, of_other = waiting[rank], waiting[other]
        same = (status.key, status.ranks) == (of_other.key, of_other.ranks)
        return not same and (not status.ranks or other in status.ranks)

    # The ranks that each waits for, directly or through others.
    awaited = {a: {b for b in waiting if needs(a, b)} for a in waiting}
    for middle in waiting:
        for each in awaited.values():
            if middle in each:
                each |= awaited[middle]
    return {rank: status for rank, status in waiting.items() if rank in awaited[rank]}


def _on_their_way(waiting: Mapping[int, Status], report_after: float) -> bool:
    """Whether some ranks may only be slow to receive a result that the others already have.

    The others then wait in the next call, and were in this one before.
    """
    first = min(waiting.values(), key=lambda s: s.serial)
    if first.seconds >= report_after:
        return False
    return all(
        (s.key == first.key and s.serial == first.serial)
        or (s.serial == first.serial + 1 and s.before == first.key)
        for s in waiting.values()
    )


def _waits(waiting: Mapping[int, Status]) -> str:
    calls = {
        rank: f"{s.call}{_at(s)}{f' while handling {s.handling}' if s.handling else ''}"
        for rank, s in waiting.items()
    }
    return "; ".join(
        f"{ranks_text(numbers)} wait{'s' if len(numbers) == 1 else ''} in {call}"
        for call, numbers in _ranks_with(calls)
    )


def _missing(missing: Mapping[int, Status], longest: Status) -> str:
    """Which ranks have not reached the call, and where they are."""
    places = {r: f"at {s.where}" if s.where else "not answering" for r, s in missing.items()}
    lines = {r: f"in {s.call}, {places[r]}" if s.call else places[r] for r, s in missing.items()}
    call = f"{longest.call}{_at(longest)} for {longest.seconds:.0f} s"
    said = []
    for line, numbers in _ranks_with(lines):
        has, is_at = ("has", "it is") if len(numbers) == 1 else ("have", "they are")
        said.append(f"{ranks_text(numbers)} {has} not reached {call}; {is_at} {line}")
    return "; ".join(said)


def _stacks(missing: Mapping[int, Status]) -> str:
    """The stack of the first rank that others wait for."""
    for rank, status in sorted(missing.items()):
        if status.stack:
            return "\n    ".join([f"\n  rank {rank} is here:", *status.stack])
    return ""


def _ranks_with(texts: Mapping[int, str]) -> Iterable[tuple[str, list[int]]]:
    """Each text, with the ranks that it is about."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank], []).append(rank)
    return ranks.items()


def _at(status: Status) -> str:
    return f" ({status.where})" if status.where else ""
