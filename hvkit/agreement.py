"""What the ranks must agree on before they train, checked so that all of them hear of it."""

import hashlib
from collections.abc import Sequence

from hvkit import runtime
from hvkit.errors import HvkitError, RanksDisagreeError

Problem = tuple[type[Exception], str]


def raise_together(problem: Exception | None, call: str = "distribute") -> None:
    """Raise on every rank if any rank has a problem; the first rank's is told everywhere.

    Args:
        problem: what went wrong on this rank, or None.
        call: the name of what the user called.
    """
    told = None if problem is None else (type(problem), str(problem))
    everyone = runtime.gather(call, told)
    if problem is not None:
        raise problem
    raise_first(everyone)


def raise_first(problems: Sequence[Problem | None]) -> None:
    """Raise the first of the ranks' problems, if there is one.

    Args:
        problems: type and text of what is wrong on each rank, the same list on all of them.
    """
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = problem
            known = kind if kind in (TypeError, ValueError) else HvkitError
            raise known(text if rank == runtime.rank() else f"on rank {rank}: {text}")


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
    raise RanksDisagreeError(
        f"the {what} of rank {other} differs from that of rank 0: "
        f"{_first_difference(reference, everyone[other], other)}; {fix}"
    )


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
