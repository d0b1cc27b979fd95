"""The backward passes and the steps that go together: gradients are averaged before each step.

A step uses the gradients of a window of ``accumulate`` backward passes, or fewer: ``accumulate``
may not divide the number of batches of an epoch. Gradients of a shorter last window are averaged in
the pass over the last batch, if it comes from a DataLoader that ``hvkit.shard`` returned. Otherwise
the step averages them.

All ranks must reduce in the same passes. A thread that fetches batches ahead may have the last one
at other passes on other ranks, so only batches count that the thread of ``backward()`` has taken. A
script that itself fetches one batch ahead reduces one pass too early, on all ranks, and again in
the step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit import metrics
from hvkit.frameworks.pytorch.gradients.arrivals import running_pass
from hvkit.frameworks.pytorch.optimizers import before_unscaling
from hvkit.sync.update_hooks import Closure, Feature, Order, UpdateHooks
from hvkit.watch.calls import call


class _LastBatch:
    """The last batch of an epoch, which the script has now.

    Attributes:
        thread: identifies the one that has taken it.
        done: windows that have ended with a pass over it. An iterator that the script advances by
            hand may rest here for long.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.done: set[Window] = set()


_last_batches: list[_LastBatch] = []


@contextmanager
def last_batch() -> Iterator[None]:
    """Surrounds the time in which the script has the last batch of an epoch."""
    batch = _LastBatch()
    _last_batches.append(batch)
    try:
        yield
    finally:
        _last_batches.remove(batch)


class Window:
    """The passes of one model that count for the next step.

    Args:
        length: of a whole window.
        ends_with_epoch: whether the pass over an epoch's last batch ends with a reduction. The
            window may go on in the next epoch, and then another reduction must change nothing.

    Attributes:
        passes: how many there have been; several reductions may fall into one window.
        waiting: whether gradients wait for a reduction that no pass has made.
    """

    def __init__(self, length: int, *, ends_with_epoch: bool) -> None:
        self.length = length
        self.passes = 0
        self.waiting = False
        self._ends_with_epoch = ends_with_epoch
        self._last_batches: list[_LastBatch] = []
        self._reduces = True

    def begin_pass(self, thread: int) -> bool:
        """Whether the pass that begins now ends with a reduction.

        Args:
            thread: identifies the one that has called ``backward()``.
        """
        if self._ends_with_epoch:
            held = [each for each in list(_last_batches) if each.thread == thread]
            self._last_batches = [each for each in held if self not in each.done]
        self._reduces = bool(self._last_batches) or self.passes + 1 >= self.length
        return self._reduces

    def end_pass(self) -> bool:
        """Count a pass; return whether a reduction follows."""
        self.passes += 1
        self.waiting = True
        return self._reduces

    def reduced(self) -> None:
        """The gradients are averaged now."""
        self.waiting = False
        if self.passes >= self.length:
            self.passes = 0

    def end(self) -> None:
        """The next pass is the first of a new window."""
        self.passes = 0
        for each in self._last_batches:
            each.done.add(self)
        self._last_batches = []


class AveragedSteps:
    """The steps of the optimizers of one model, each of which follows a reduction.

    Args:
        name: of the model's reducer.
        window: the passes that count for a step.
        reduce: averages the gradients; a collective.
        using: called with an optimizer, and those inside it, whose step uses the gradients as they
            are now.
        used: called after a step.

    Attributes:
        done: optimizer steps so far; several optimizers that use one reduction take one.
        optimizers: those that step.
    """

    def __init__(
        self,
        name: str,
        window: Window,
        reduce: Callable[[], None],
        using: Callable[[Sequence[Optimizer]], None],
        used: Callable[[], None],
    ) -> None:
        self.done = 0
        self.optimizers: list[Optimizer] = []
        self._name = name
        self._window = window
        self._reduce = reduce
        self._using = using
        self._used = used
        # The optimizers whose last step came before the last reduction, by number.
        self._ready: set[int] = set()
        self._optimizers_watched = 0
        self._counted = False

    def watch(
        self, optimizers: Sequence[Optimizer], hooks: UpdateHooks, adopt: Callable[[], bool]
    ) -> None:
        """Make sure that each step of an optimizer follows a reduction on every rank.

        Args:
            optimizers: one that updates some of the parameters, and those inside it.
            hooks: around their steps.
            adopt: adds parameters that are new in the optimizers, and returns whether there were
                any.
        """
        number = self._optimizers_watched
        self._optimizers_watched += 1
        self.optimizers.extend(optimizers)

        def average(point: str) -> None:
            if adopt() or self._window.waiting or number not in self._ready:
                with call(point, self.done + 1, self._name):
                    self._reduce()
            self._window.end()

        def before(optimizer: Optimizer, closure: Closure | None) -> None:
            if running_pass() != -1:
                raise ValueError(
                    f"{type(optimizer).__name__}.step() was called while backward() was running, "
                    "before the gradients were averaged: call it after backward()"
                )
            if closure is not None:
                adopt()

        def gradients(optimizer: Optimizer) -> None:
            average(f"{type(optimizer).__name__}.step()")
            self._ready.discard(number)
            self._using(optimizers)

        hooks.add(
            Feature(
                Order.RANKS,
                before=before,
                gradients=gradients,
                renewed=lambda: self._window.waiting or number in self._ready,
                loss=_mean_of_ranks,
                after=self._end_step,
            )
        )
        for each in optimizers:
            before_unscaling(each, functools.partial(average, "GradScaler.unscale_()"))

    def _end_step(self, optimizer: Optimizer) -> None:
        self._used()
        # Several optimizers may use the gradients of one backward pass.
        self.done += not self._counted
        self._counted = True

    def reduced(self) -> None:
        """Note that the gradients are averaged now."""
        self._ready.update(range(self._optimizers_watched))
        self._counted = False


def _mean_of_ranks(loss: Any) -> torch.Tensor:
    """The loss that a closure returns to the optimizer.

    LBFGS decides by the loss how far to go and when to stop; all ranks have to decide alike.
    """
    mine = torch.as_tensor(loss).detach()
    return mine.new_tensor(metrics.average(float(mine)))
