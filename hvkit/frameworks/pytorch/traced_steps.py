"""Marks a script's steps and backward passes in the timeline of a run.

hvkit sees the end of a backward pass, where it averages gradients, and the ends of updates. For
``hvkit run --timeline``, it also marks how long the script's ``backward()`` takes as a whole,
and each step: from its first batch, if a monitor loads it, or else from the end of the step before.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.gradients.backward_passes import running_pass
from hvkit.frameworks.pytorch.step_hooks import UpdateHooks
from hvkit.sync.update_hooks import Feature, Order
from hvkit.watch.calls import of_run
from hvkit.watch.spans import DATA, REDUCTION, Span, mark, observe

# When batches were asked for, and the step of the last reduction, in the order of events.
_batches: deque[float] = deque(maxlen=100)
_reduced: deque[int | None] = deque(maxlen=1)


def trace_steps(hooks: UpdateHooks) -> None:
    """Mark the steps of an optimizer, and backward passes."""
    _trace_backward()
    hooks.add(Feature(Order.TIMELINE, after=_Steps().end))


class _Steps:
    """The steps of one optimizer."""

    def __init__(self) -> None:
        self._taken = 0
        self._ended = time.monotonic()

    def end(self, optimizer: Optimizer) -> None:
        """Mark the step that has ended."""
        now = time.monotonic()
        self._taken += 1
        begun = next((each for each in _batches if each >= self._ended), self._ended)
        self._ended = now
        mark("step", begun, now, of_run(self._taken))


@functools.cache
def _trace_backward() -> None:
    observe(_see)
    run = torch.autograd.backward

    @functools.wraps(run)
    def backward(*args: Any, **kwargs: Any) -> None:
        if running_pass() != -1:  # inside another: part of that one
            run(*args, **kwargs)
            return
        begun = time.monotonic()
        _reduced.clear()
        try:
            run(*args, **kwargs)
        finally:
            step = _reduced[0] if _reduced else None
            mark("backward()", begun, time.monotonic(), step)

    torch.autograd.backward = backward


def _see(span: Span) -> None:
    if span.name == DATA:
        _batches.append(span.begun)
    elif span.name == REDUCTION:
        _reduced.append(span.step)
