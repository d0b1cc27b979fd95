"""Makes each step of an optimizer follow a reduction of its gradients, and counts the steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.gradients.nested_passes import running_pass
from hvkit.frameworks.pytorch.gradients.nonfinite import WithoutGradients
from hvkit.frameworks.pytorch.gradients.windows import Window
from hvkit.frameworks.pytorch.optimizers import (
    Closure,
    before_unscaling,
    closure_of,
    with_averaged_loss,
    with_closure,
)
from hvkit.watch.calls import call


class AveragedSteps:
    """The steps of the optimizers of one model.

    Args:
        name: of the model's reducer.
        window: the passes that count for a step.
        reduce: averages the gradients; a collective.
        using: called with an optimizer whose step uses the gradients as they are now.
        used: called after a step.
        skips: returns whether the steps that follow the last reduction change nothing.

    Attributes:
        done: optimizer steps so far; several optimizers that use one reduction take one.
        optimizers: those that step.
    """

    def __init__(
        self,
        name: str,
        window: Window,
        reduce: Callable[[], None],
        using: Callable[[Optimizer], None],
        used: Callable[[], None],
        skips: Callable[[], bool],
    ) -> None:
        self.done = 0
        self.optimizers: list[Optimizer] = []
        self._name = name
        self._window = window
        self._reduce = reduce
        self._using = using
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

        def average(point: str) -> None:
            if adopt() or self._window.waiting or not self._reduced_for[key]:
                with call(point, self.done + 1, self._name):
                    self._reduce()
            self._window.end()

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            if key in self._stepping:  # a step that calls the step of its parent class
                self._inside[key] += 1
                return None
            closure = closure_of(args, kwargs)
            if running_pass() != -1:
                raise ValueError(
                    f"{type(optimizer).__name__}.step() was called while backward() was running, "
                    "before the gradients were averaged: call it after backward()"
                )
            if closure is None:
                average(f"{type(optimizer).__name__}.step()")
                self._reduced_for[key] = False
                self._stepping.add(key)
                self._begin(optimizer)
                return None

            def averaging() -> Any:
                loss = closure()
                average(f"{type(optimizer).__name__}.step()")
                self._reduced_for[key] = False
                return loss

            adopt()
            self._stepping.add(key)
            return with_closure(self._leaving_out(averaging, optimizer), args, kwargs)

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

        before_unscaling(optimizer, functools.partial(average, "GradScaler.unscale_()"))
        # Not compiled with a step that is: what it looks at differs from step to step.
        uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
        optimizer.register_step_pre_hook(uncompiled(before))
        optimizer.register_step_post_hook(after)

    def _leaving_out(self, closure: Closure, optimizer: Optimizer) -> Closure:
        """A closure after which a step that is skipped finds no gradients."""
        averaged = with_averaged_loss(closure)

        def run() -> Any:
            loss = averaged()
            self._begin(optimizer)
            return loss

        return run

    def _begin(self, optimizer: Optimizer) -> None:
        """Before an update from the gradients as they are now."""
        self._using(optimizer)
        if self._skips():
            self._without.begin(optimizer)

    def reduced(self) -> None:
        """Note that the gradients are averaged now."""
        self._reduced_for = dict.fromkeys(self._reduced_for, True)
        self._stepping.clear()
        self._inside.clear()
        self._counted = False
