"""The learning rates of a PyTorch optimizer, multiplied where an update reads them.

``param_groups[i]["lr"]`` is the user's: scripts, schedulers, loggers and checkpoints read and write
it at any time. Only while ``step()`` updates does it hold the multiplied rate.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from hvkit.adapters.pytorch.optimizers import (
    closure_of,
    hook_steps_of_parents,
    leaves_update_to_parent,
    with_closure,
)
from hvkit.learning_rate import Multiplier

Hooks = OrderedDict[int, Callable[..., Any]]


class RateInStep:
    """Multiplies the rates of one optimizer inside its ``step()``.

    Hooks do it, which also run where a script has kept ``optimizer.step`` from before or compiles
    it. PyTorch leaves out the hooks after a step that raises, so ``step`` is replaced on the
    instance as well; optimizers leave it out when they are pickled.
    """

    def __init__(self, multiplier: Multiplier) -> None:
        self.steps_done = 0
        """Optimizer steps so far; a checkpoint sets it when training resumes."""
        self._multiplier = multiplier
        # How many steps are running inside each other, and how many when the rate was multiplied.
        self._depth = 0
        self._multiplied_at = 0
        self._put_backs: list[Callable[[], None]] = []

    def attach(self, optimizer: Optimizer) -> None:
        """From now on the optimizer's updates use the multiplied rates.

        Of an optimizer and one that it steps, which share their groups, both are attached.
        """
        # torch.compile takes the update alone, which is then compiled as it is without hvkit.
        hook_steps_of_parents(type(optimizer))
        uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
        before = optimizer.register_step_pre_hook(uncompiled(self._before))
        after = optimizer.register_step_post_hook(uncompiled(self._after))
        end = uncompiled(self._end)
        step = optimizer.step

        # A method, since schedulers that are made later expect one. One that was made earlier has
        # left its mark on the step that it wrapped, and looks for it.
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
        # The step of a subclass that calls its parent's runs the hooks twice; until then it may
        # set the user's rate itself.
        self._depth += 1
        kind = type(optimizer)
        if self._put_backs or leaves_update_to_parent(kind, self._depth):  # type: ignore[arg-type]
            return None
        self._multiply(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            return None
        return with_closure(self._at_the_users_rate(optimizer, closure), args, kwargs)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth < self._multiplied_at:
            self._put_back()
        if self._depth == 0:
            self.steps_done += 1

    def _end(self) -> None:
        """After the step, also where it has failed."""
        self._depth = 0
        self._put_back()

    def _at_the_users_rate(
        self, optimizer: Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """The user's closure, which may read and set the rate."""

        def at_the_users_rate() -> Any:
            self._put_back()
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
            # A tensor may be shared between groups, and is known by its address to compiled steps
            # and CUDA graphs. One that gradients flow to has to stay as it is.
            in_place = isinstance(rate, torch.Tensor) and not rate.requires_grad
            if in_place and id(rate) not in done:
                done.add(id(rate))
                self._put_backs.append(_multiply_in_place(rate, by))
            group["lr"] = multiplied = rate if in_place else rate * by
            self._put_backs.append(functools.partial(_put_back, group, rate, multiplied, by))

    def _put_back(self) -> None:
        put_backs, self._put_backs = self._put_backs, []
        for put_back in put_backs:
            put_back()


def _multiply_in_place(rate: torch.Tensor, by: float) -> Callable[[], None]:
    """Multiply a tensor; returns what gives it the user's value again."""
    with torch.no_grad():
        users = rate.clone()
        rate.mul_(by)
    version = rate._version

    def put_back() -> None:
        with torch.no_grad():
            if rate._version == version:
                rate.copy_(users)
            else:  # an optimizer that lowers its rate itself
                rate.div_(by)

    return put_back


def _put_back(group: dict[str, Any], rate: Any, multiplied: Any, by: float) -> None:
    # An optimizer that lowers its rate itself has put another one there.
    group["lr"] = rate if group["lr"] is multiplied else group["lr"] / by


def _refuse_graph_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimizer.step() is captured into a CUDA graph during the warm-up of the learning "
            "rate, whose replays would all use the rate of this step: capture it after the "
            "warm-up, or pass warmup_steps=0 to hvkit.distribute"
        )
