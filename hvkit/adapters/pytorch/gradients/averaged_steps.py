"""Makes each step of an optimizer follow a reduction of its gradients, and counts the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.adapters.pytorch.gradients.nonfinite import WithoutGradients
from hvkit.adapters.pytorch.optimizers import (
    Closure,
    closure_of,
    with_averaged_loss,
    with_closure,
)
from hvkit.watch.calls import call


class AveragedSteps:
    """The steps of the optimizers of one model.

    Args:
        name: of the model's reducer.
        waiting: returns whether gradients wait for a reduction that no backward pass has made.
        reduce: averages the gradients; a collective.
        used: called after a step.
        skips: returns whether the steps that follow the last reduction change nothing.

    Attributes:
        done: optimizer steps so far; several optimizers that use one reduction take one.
        optimizers: those that step.
    """

    def __init__(
        self,
        name: str,
        waiting: Callable[[], bool],
        reduce: Callable[[], None],
        used: Callable[[], None],
        skips: Callable[[], bool],
    ) -> None:
        self.done = 0
        self.optimizers: list[Optimizer] = []
        self._name = name
        self._waiting = waiting
        self._reduce = reduce
        self._used = used
        self._skips = skips
        self._without = WithoutGradients()
        # By optimizer: whether a reduction has come since its last step, and whether it is
        # stepping now.
        self._reduced_for: dict[int, bool] = {}
        self._stepping: set[int] = set()
        # How many steps of parent classes run inside that one.
        self._inside: Counter[int] = Counter()
        self._counted = False

    def watch(self, optimizer: Optimizer, adopt: Callable[[], bool]) -> None:
        """Make sure that each step of this optimizer follows a reduction on every rank.

        Args:
            optimizer: one that updates some of the parameters.
            adopt: adds parameters that are new in the optimizer, and returns whether there were
                any.
        """
        key = id(optimizer)
        self.optimizers.append(optimizer)
        self._reduced_for[key] = False

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            if key in self._stepping:  # a step that calls the step of its parent class
                self._inside[key] += 1
                return None
            self._stepping.add(key)
            closure = closure_of(args, kwargs)
            if torch._C._current_graph_task_id() != -1:
                raise ValueError(
                    f"{type(optimizer).__name__}.step() was called while backward() was running, "
                    "before the gradients were averaged: call it after backward()"
                )
            overlooked = adopt() or self._waiting() or not self._reduced_for[key]
            if overlooked and closure is None:
                with call(f"{type(optimizer).__name__}.step()", self.done + 1, self._name):
                    self._reduce()
            self._reduced_for[key] = False
            if closure is None:
                if self._skips():
                    self._without.begin(optimizer)
                return None
            return with_closure(self._leaving_out(closure, optimizer), args, kwargs)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._inside[key]:
                self._inside[key] -= 1
                return
            self._stepping.discard(key)
            self._without.end()
            self._used()
            # Several optimizers may use the gradients of one backward pass.
            self.done += not self._counted
            self._counted = True

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _leaving_out(self, closure: Closure, optimizer: Optimizer) -> Closure:
        """A closure after which a step that is skipped finds no gradients."""
        averaged = with_averaged_loss(closure)

        def run() -> Any:
            loss = averaged()
            if self._skips():
                self._without.begin(optimizer)
            return loss

        return run

    def reduced(self) -> None:
        """Note that the gradients are averaged now."""
        self._reduced_for = dict.fromkeys(self._reduced_for, True)
        self._stepping.clear()
        self._inside.clear()
        self._counted = False
