"""One thing found wrong, or worth knowing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was found and what to do.

    Attributes:
        severity: ``problem`` for what keeps ranks from running, or from running right; ``note``
            for what may be meant so.
        what: what was found.
        fix: what to do about it.
    """

    severity: Literal["problem", "note"]
    what: str
    fix: str


def problem(what: str, fix: str) -> Finding:
    """What keeps ranks from running, or from running right."""
    return Finding("problem", what, fix)


def note(what: str, fix: str) -> Finding:
    """What may be meant so."""
    return Finding("note", what, fix)
