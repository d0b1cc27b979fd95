"""Scaling and warm-up: the factor by which an update multiplies the user's learning rate.

N ranks with batch size B take one step where a single process takes N. The linear rule multiplies
the rate by N. That is too much for the first steps, so a warm-up raises the rate gradually. Both
are from Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017). The
square-root rule keeps the variance of the update: Krizhevsky, "One weird trick for parallelizing
convolutional neural networks" (2014).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hvkit.argument_checks import check_count, check_number, check_one_of

LRScaling = Literal["none", "linear", "sqrt"]
LR_SCALINGS = get_args(LRScaling)


@dataclass(frozen=True)
class Multiplier:
    """The factor of each optimizer step; in a warm-up it grows linearly from the first step's."""

    full: float = 1.0
    first: float = 1.0
    warmup_steps: int = 0

    @property
    def changes_nothing(self) -> bool:
        return self.full == 1 and (self.first == 1 or not self.warmup_steps)

    def at(self, step: int) -> float:
        """The factor of step ``step``, counted from 0."""
        if step >= self.warmup_steps:
            return self.full
        return self.first + (self.full - self.first) * step / self.warmup_steps


def make_multiplier(lr_scaling: str, size: int, warmup_steps: int) -> Multiplier:
    """The multiplier on ``size`` ranks.

    A warm-up starts at the rate that suits a single process. With scaling, that is the user's rate.
    Without, the user has set the rate for all ranks together, and by the linear rule a single
    process needs one ``size``-th of it.
    """
    check_one_of("lr_scaling", lr_scaling, LR_SCALINGS)
    full = {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[lr_scaling]
    first = 1.0 / size if lr_scaling == "none" else 1.0
    return Multiplier(full, first if warmup_steps else full, warmup_steps)


def describe(rates: Sequence[tuple[float, Multiplier | None]], lr_scaling: str, size: int) -> str:
    """One line about the rates that the user has set and the rates that a step uses.

    Each optimizer or parameter group has a rate and the multiplier of its updates; None for the
    step length of LBFGS. ``size`` is the number of ranks with batches of their own.
    """
    by_multiplier: dict[Multiplier | None, list[float]] = {}
    for rate, multiplier in rates:
        by_multiplier.setdefault(multiplier, []).append(rate)
    said = [_multiplied(each, by, lr_scaling, size) for by, each in by_multiplier.items()]
    return "; ".join(said) or "no learning rate"


def _multiplied(
    rates: Sequence[float], multiplier: Multiplier | None, lr_scaling: str, size: int
) -> str:

    def times(factor: float) -> str:
        return ", ".join(dict.fromkeys(f"{rate * factor:g}" for rate in rates))

    if multiplier is None:
        return f"step length {times(1)} of LBFGS, never scaled"
    if multiplier.changes_nothing and size == 1:  # the ranks divide one model
        return f"learning rate {times(1)}"
    if multiplier.changes_nothing:
        return (
            f"learning rate {times(1)}, not scaled (the global batch is {size} times one rank's: "
            f'lr_scaling="linear" would use {times(size)})'
        )
    used, rule = times(multiplier.full), f'lr_scaling="{lr_scaling}"'
    if multiplier.warmup_steps:
        used = (
            f"{times(multiplier.first)} at first and {used} after {multiplier.warmup_steps} steps"
        )
        rule += ", warm-up"
    return f"learning rate {times(1)}; steps use {used} ({rule})"


def length_of_warmup(steps: int, epochs: float, steps_per_epoch: int | None) -> int:
    """The length of the warm-up in optimizer steps, from either argument."""
    steps = check_count("warmup_steps", steps, 0)
    if steps_per_epoch is not None:
        steps_per_epoch = check_count("steps_per_epoch", steps_per_epoch)
    epochs = check_number("warmup_epochs", epochs, least=0)
    if not epochs:
        return steps
    if steps:
        raise ValueError(
            f"warmup_steps={steps} and warmup_epochs={epochs:g} were both given: choose one"
        )
    if steps_per_epoch is None:
        raise ValueError(
            f"warmup_epochs={epochs:g} needs steps_per_epoch, a rank's optimizer steps in an "
            "epoch: steps_per_epoch=len(loader) for a sharded loader"
        )
    return round(epochs * steps_per_epoch)
