"""The learning rates in saved states follow the number of ranks: plain arithmetic.

The states are those of PyTorch's optimizers and schedulers. A rate that was saved was multiplied by
the factor of the ranks that saved it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

# What the parameter groups hold: the rate, and what schedulers have put beside it.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
# What schedulers hold themselves. A user's own absolute bounds (eta_min, min_lrs) are not among
# them: the script hands them over unscaled on any number of ranks.
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


@dataclass(frozen=True)
class Ratio:
    """From the factor of the ranks that saved to that of the ranks that resume."""

    saved: float = 1.0
    now: float = 1.0

    def of(self, rate: Any) -> Any:
        """The rate for the ranks that resume; the same object where the factors are equal."""
        return rate if self.saved == self.now else rate * self.now / self.saved


def rescale_groups(
    groups: list[MutableMapping[str, Any]], ratio: Ratio
) -> list[tuple[float, float]]:
    """Rescale the rates in an optimizer's parameter groups; returns (before, after) of each lr."""
    changes = []
    for group in groups:
        before = group.get("lr")
        for key in _IN_GROUPS:
            if group.get(key) is not None:
                group[key] = ratio.of(group[key])
        if before is not None:
            changes.append((float(before), float(group["lr"])))
    return changes


def rescale_scheduler(state: MutableMapping[str, Any], ratio: Ratio) -> None:
    """Rescale the rates in a scheduler's state, and in those of the schedulers inside it."""
    for key in _IN_SCHEDULERS:
        if isinstance(state.get(key), list | tuple):
            state[key] = type(state[key])(ratio.of(rate) for rate in state[key])
    for inner in state.get("_schedulers", ()):
        rescale_scheduler(inner, ratio)
