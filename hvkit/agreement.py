"""What the ranks must agree on before they train, checked so that all of them hear of it."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from hvkit import runtime
from hvkit.errors import HvkitError, RanksDisagreeError
from hvkit.watch.failures import mark_as_shown_by

T = TypeVar("T")

# Errors that every rank raises as what they are. Others become HvkitError elsewhere.
_KEPT = (TypeError, ValueError, RanksDisagreeError)


def share(call: str, problem: Exception | None, value: T) -> list[T]:
    """The values of all ranks, in rank order, unless a rank has a problem; a collective.

    Args:
        call: what the user called, for ranks that call something else.
        problem: what went wrong on this rank, or None.
        value: what the others need of this rank.

    Raises:
        Exception: the first rank's problem, on every rank. Its type is kept if it is a TypeError,
            ValueError, RanksDisagreeError or OSError; others become HvkitError.
    """
    everyone = runtime.gather(call, (_portable(problem), value))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is None:
            continue
        if problem is not None:
            alike = str(theirs) == str(_portable(problem))
            raise mark_as_shown_by(problem, rank) if alike else problem
        raise mark_as_shown_by(_on(rank, theirs), rank)
    return [each for _, each in everyone]


def raise_together(problem: Exception | None, call: str = "distribute") -> None:
    """Raise on every rank if any rank has a problem; see :func:`share`."""
    share(call, problem, None)


def _portable(problem: Exception | None) -> Exception | None:
    """The problem as something that pickles and means the same on another rank."""
    if problem is None:
        return None
    if isinstance(problem, OSError):
        return OSError(problem.errno, problem.strerror or str(problem), problem.filename)
    kind = next((k for k in (*_KEPT[::-1], HvkitError) if isinstance(problem, k)), None)
    return kind(str(problem)) if kind else HvkitError(f"{type(problem).__name__}: {problem}")


def _on(rank: int, problem: Exception) -> Exception:
    # What an operating system says of a file needs no rank, since only rank 0 writes files.
    if isinstance(problem, OSError):
        return problem
    return type(problem)(f"on rank {rank}: {problem}")


def require_equal(what: str, facts: Sequence[str], fix: str, call: str = "distribute") -> None:
    """Raise on every rank unless the lists of facts are the same on all.

    Args:
        what: what the facts describe, to begin the message with: ``"model"``.
        facts: one line each, in an order that every rank keeps.
        fix: what the user should do.
        call: the name of what the user called.

    Raises:
        RanksDisagreeError: names the first fact that differs, and the ranks.
    """
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    if len(set(runtime.gather(call, digest))) == 1:
        return
    everyone = runtime.gather(call, list(facts))
    reference = everyone[0]
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != reference)
    error = RanksDisagreeError(
        f"the {what} of rank {other} differs from that of rank 0: "
        f"{_first_difference(reference, everyone[other], other)}; {fix}"
    )
    raise mark_as_shown_by(error, 0)


def _first_difference(reference: list[str], theirs: list[str], rank: int) -> str:
    for ours, other in zip(reference, theirs, strict=False):
        if ours != other:
            return f"{other} on rank {rank}, but {ours} on rank 0"
    longer, owner = (theirs, rank) if len(theirs) > len(reference) else (reference, 0)
    first = longer[min(len(theirs), len(reference))]
    return (
        f"{len(theirs)} entries on rank {rank}, {len(reference)} on rank 0; "
        f"only rank {owner} has {first}"
    )
