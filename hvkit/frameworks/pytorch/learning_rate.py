"""Multiplies the learning rates of a PyTorch optimizer while an update reads them.

``param_groups[i]["lr"]`` is the user's: scripts, schedulers, loggers and checkpoints read and write
it at any time. It holds the multiplied rate only while ``step()`` updates.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.optimizers import (
    closure_of,
    hook_steps_of_parents,
    leaves_update_to_parent,
    with_closure,
)
from hvkit.learning_rate import Multiplier

Hooks = OrderedDict[int, Callable[..., Any]]


class RateInStep:
    """Multiplies the rates of one optimizer inside its ``step()``.

    Hooks do this, because they also run if a script compiles ``optimizer.step`` or has kept it from
    before the call. PyTorch skips the hooks after a step that raises, so this replaces ``step`` on
    the instance as well; pickled optimizers leave that out.
    """

    def __init__(self, multiplier: Multiplier) -> None:
        self.steps_done = 0
        """Optimizer steps so far; a checkpoint sets it when training resumes."""
        self._multiplier = multiplier
        # How many nested steps are running, and how many were when the rate was multiplied.
        self._depth = 0
        self._multiplied_at = 0
        # Functions that give rates the user's value again.
        self._restores: list[Callable[[], None]] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Make the optimizer's updates use the multiplied rates.

        If an optimizer steps another one with the same groups, attach to both.
        """
        # Not compiled, so that torch.compile compiles the update as it would without hvkit.
        hook_steps_of_parents(type(optimizer))
        uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
        before = optimizer.register_step_pre_hook(uncompiled(self._before))
        after = optimizer.register_step_post_hook(uncompiled(self._after))
        end = uncompiled(self._end)
        step = optimizer.step

        # A method, because schedulers made later expect one. functools.wraps copies the mark that
        # schedulers made earlier have left on the step, for which they look.
        @functools.wraps(step)
        def step_at_multiplied_rate(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # The user's own hooks read and set the user's rate.
            cast(Hooks, optimizer._optimizer_step_pre_hooks).move_to_end(before.id)
            cast(Hooks, optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)
            try:
                return step(*args, **kwargs)
            finally:
                end()

        optimizer.step = MethodType(step_at_multiplied_rate, optimizer)  # type: ignore[method-assign]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A step that calls its parent's runs the hooks twice. Before that call it may set the
        # user's rate itself.
        self._depth += 1
        kind = type(optimizer)
        if self._restores or leaves_update_to_parent(kind, self._depth):  # type: ignore[arg-type]
            return None
        self._multiply(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            return None
        return with_closure(self._at_the_users_rate(optimizer, closure), args, kwargs)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth < self._multiplied_at:
            self._restore()
        if self._depth == 0:
            self.steps_done += 1

    def _end(self) -> None:
        """Clean up after the step, also after a failed one."""
        self._depth = 0
        self._restore()

    def _at_the_users_rate(
        self, optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """The user's closure; while it runs, it reads and sets the user's rate."""

        def at_the_users_rate() -> Any:
            self._restore()
            loss = closure()
            self._multiply(optimizer)
            return loss

        return at_the_users_rate

    def _multiply(self, optimizer: Optimizer) -> None:
        self._multiplied_at = self._depth
        if self.steps_done < self._multiplier.warmup_steps:
            _refuse_graph_capture()
        by = self._multiplier.at(self.steps_done)
        if by == 1:
            return
        done: set[int] = set()
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:
                continue
            # Several groups may share a tensor, and compiled steps and CUDA graphs remember its
            # address, so change it in place; but never write to one that gradients flow to.
            in_place = isinstance(rate, torch.Tensor) and not rate.requires_grad
            if in_place and id(rate) not in done:
                done.add(id(rate))
                self._restores.append(_multiply_in_place(rate, by))
            group["lr"] = multiplied = rate if in_place else rate * by
            self._restores.append(functools.partial(_restore_group, group, rate, multiplied, by))

    def _restore(self) -> None:
        restores, self._restores = self._restores, []
        for restore in restores:
            restore()


def _multiply_in_place(rate: torch.Tensor, by: float) -> Callable[[], None]:
    """Multiply a tensor; return a function that restores the user's value."""
    with torch.no_grad():
        users = rate.clone()
        rate.mul_(by)
    version = rate._version

    def restore() -> None:
        with torch.no_grad():
            if rate._version == version:
                rate.copy_(users)
            else:  # an optimizer that lowers its rate itself
                rate.div_(by)

    return restore


def _restore_group(group: dict[str, Any], rate: Any, multiplied: Any, by: float) -> None:
    # An optimizer that lowers its rate itself has set another rate.
    group["lr"] = rate if group["lr"] is multiplied else group["lr"] / by


def _refuse_graph_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimizer.step() was captured into a CUDA graph during the warm-up of the learning "
            "rate; all replays would use the rate of this step: capture it after the warm-up, or "
            "pass warmup_steps=0 to hvkit.distribute"
        )
