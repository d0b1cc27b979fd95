"""Follows backward passes: which gradients are final, and after which pass they are averaged.

A hook on each parameter runs for every gradient of every step, so it does little: work is moved to
once per bucket, or once per layout, where possible.

A step uses the gradients of a window of ``accumulate`` backward passes, or fewer: ``accumulate``
may not divide the number of batches of an epoch. Gradients of a shorter last window are averaged in
the pass over the last batch, if it comes from a DataLoader that ``hvkit.shard`` returned. Otherwise
the step averages them. All ranks must reduce in the same passes. A thread that fetches batches
ahead may have the last one at other passes on other ranks, so only batches count that the thread of
``backward()`` has taken. A script that itself fetches one batch ahead reduces one pass too early,
on all ranks, and again in the step.

A backward pass may run inside another one: reentrant checkpointing (``torch.utils.checkpoint`` with
``use_reentrant=True``), reversible layers and the like call ``backward()`` while ``backward()``
computes their gradients. Autograd gives such a nested pass an id like any other, and calls back at
its end. But the gradients are final, and the script's pass counts, only at the end of the
outermost.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hvkit.frameworks.pytorch.gradients import loss_counts
from hvkit.frameworks.pytorch.gradients.bucket_layout import Layout
from hvkit.frameworks.pytorch.gradients.buckets import Bucket
from hvkit.frameworks.pytorch.gradients.gradient_lists import lists, running_pass
from hvkit.frameworks.pytorch.gradients.reduction import Reduction
from hvkit.frameworks.pytorch.step_hooks import Feature, Order, UpdateHooks
from hvkit.watch.calls import of_run
from hvkit.watch.spans import DATA, REDUCTION, Span, mark, observe, observers

# Gradients that a bucket misses while passes accumulate: no pass has as many.
_NEVER = 1 << 60
# As an id of a pass.
_NONE = -2


class GradientHooks:
    """The hooks on the parameters of one model.

    ``begin_pass`` is called before the first gradient of the script's own backward pass, and
    returns whether it ends with a reduction. If not, buckets wait for the gradients of a later one.
    """

    def __init__(
        self, reduction: Reduction, begin_pass: Callable[[], bool], end_pass: Callable[[int], None]
    ) -> None:
        # Autograd's ids of the pass that is running, and of the script's own, in which it may be
        # nested.
        self._running = lists().number()
        self._running.value = _NONE
        self.outermost: int | None = None
        self._reduction = reduction
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        watch_nested_passes(end_pass)
        self._followed: Layout | None = None
        # By parameter: the hook's handle, and the bucket that the hook counts for.
        self._hooks: dict[int, RemovableHandle] = {}
        self._hooked: dict[int, Bucket | None] = {}
        # The bucket to send with the next gradient, when all hooks of its last have run.
        self._full: Bucket | None = None
        self._is_any_full = lists().number()

    def add(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Count the gradients of a parameter."""
        self._hooked[index] = None
        # PyTorch takes the hook only while a gradient is required, and keeps it when that changes.
        trained = parameter.requires_grad
        parameter.requires_grad_(True)
        hook: Any = self._hook(None)
        self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trained)

    def follow(self, layout: Layout) -> None:
        """Count for the buckets of a layout."""
        if layout is self._followed:
            return
        self._followed = layout
        hook_of = {bucket: self._hook(bucket) for bucket in (None, *layout.buckets)}
        for i, hook in self._hooks.items():
            bucket = layout.bucket_of.get(i)
            # Frozen parameters need none, and often return to the same bucket.
            if bucket is not self._hooked[i] and i in layout.usual.trained:
                # In place, because this may run inside one of them.
                hooks: Any = hook.hooks_dict_ref()
                hooks[hook.id] = hook_of[bucket]
                self._hooked[i] = bucket

    def _begin(self, pass_id: int) -> None:
        """Start to count the gradients of a pass, from its first one on."""
        with self._reduction.lock:
            outermost = outermost_pass(pass_id)
            # Another thread was here first, or a nested pass begins or ends.
            if outermost == self.outermost:
                self._running.value = pass_id
                return
            if pass_id == outermost:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(functools.partial(self._end_pass, pass_id))
            reduces = self._begin_pass()
            layout = self._reduction.layouts.current
            self.follow(layout)
            self._hold(None)
            # Drop gradients of a pass that failed.
            for bucket in layout.buckets:
                if bucket.handle is None:
                    bucket.reset()
                    if not reduces:
                        bucket.left.value = _NEVER
                else:
                    self._reduction.outdated.add(bucket)
            self.outermost = outermost
            self._running.value = pass_id  # last: other threads go on when they see it

    def end(self) -> None:
        """The pass is over; what is not sent yet is the caller's."""
        self._running.value, self.outermost = _NONE, None
        self._hold(None)

    def _hold(self, bucket: Bucket | None) -> None:
        """Send this bucket with the next gradient."""
        self._full = bucket
        self._is_any_full.value = bucket is not None

    def _hook(self, bucket: Bucket | None) -> Callable[[torch.Tensor], None]:
        """The hook of all parameters in a bucket, called when a gradient is final.

        One function for all of them stays in the processor's caches. It keeps nothing: Python's
        garbage collector does not see what these hooks of PyTorch's refer to, so anything that
        leads from them back to a parameter would stay in memory for good.
        """
        of_model = weakref.ref(self)
        of_hook: Callable[[], Bucket | None] = weakref.ref(bucket) if bucket else lambda: None

        def otherwise(parameter: torch.Tensor) -> None:
            hooks = of_model()
            if hooks is None:  # the model is gone, the script has kept the parameter
                return
            bucket = of_hook()
            pass_id = running_pass()
            if pass_id != hooks._running.value:
                hooks._begin(pass_id)
                layout = hooks._reduction.layouts.current
                bucket = layout.bucket_of.get(hooks._reduction.checks.index_of[parameter])
            elif hooks._full is not None:
                hooks._send_full()
            if bucket is not None:
                bucket.left.value -= 1
                if bucket.left.value <= 0:
                    hooks._is_full(bucket)

        left = bucket.left if bucket else lists().number()
        return lists().hook(self._running, self._is_any_full, left, otherwise)

    def _is_full(self, bucket: Bucket) -> None:
        """Send a bucket that has all gradients soon, or note that it was sent too early."""
        with self._reduction.lock:
            self._send_full()
            if bucket.handle is not None:
                self._reduction.outdated.add(bucket)
            elif bucket in self._reduction.layouts.current.buckets[:-1]:
                self._hold(bucket)

    def _send_full(self) -> None:
        with self._reduction.lock:
            bucket = self._full
            self._hold(None)
            if bucket is None or bucket.handle is not None:
                return
            # One that is there twice makes a bucket look full.
            if bucket.is_dense():
                self._reduction.send(bucket)


class _LastBatch:
    """The last batch of an epoch, which a thread of the script has now."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # Windows that have ended with a pass over it. An iterator that the script advances by hand
        # may rest here for long.
        self.done: set[AccumulationWindow] = set()


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


class AccumulationWindow:
    """The passes of one model that count for the next step, up to ``length``.

    With ``ends_with_epoch`` the pass over an epoch's last batch reduces. The window may go on in
    the next epoch, and then another reduction must change nothing.
    """

    def __init__(self, length: int, *, ends_with_epoch: bool) -> None:
        self.length = length
        self.passes = 0  # so far; one window may contain several reductions
        self.waiting = False  # whether gradients wait for a reduction
        self._ends_with_epoch = ends_with_epoch
        self._last_batches: list[_LastBatch] = []
        self._reduces = True

    def begin_pass(self, *, reduces: bool) -> bool:
        """Whether the pass that begins ends with a reduction, as each does if it ``reduces``."""
        if self._ends_with_epoch:
            # Gradients on a GPU come in another thread than that of the script's call.
            thread = _callers[-1] if _callers else threading.get_ident()
            taken = [each for each in list(_last_batches) if each.thread == thread]
            self._last_batches = [each for each in taken if self not in each.done]
        self._reduces = reduces or bool(self._last_batches) or self.passes + 1 >= self.length
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


def refuse_in_pass(call: str) -> None:
    """Raise if a backward pass is running: gradients are complete, and averaged, at its end."""
    if running_pass() != -1:
        raise ValueError(
            f"{call} was called while backward() was running, before all gradients are there: "
            "call it after backward()"
        )


# Calls of ``backward()`` that run inside others now, the innermost last: autograd's ids of the pass
# that the script has started, and of those that the call has started, as far as known.
_nested: list[tuple[int, set[int]]] = []
# The ids of outermost passes whose end is awaited.
_awaited: set[int] = set()
# The threads in which the script's own calls of ``backward()`` run.
_callers: list[int] = []
# When batches were asked for, and the step of the last reduction, in the order of events.
_batches: deque[float] = deque(maxlen=100)
_reduced: deque[int | None] = deque(maxlen=1)


def outermost_pass(pass_id: int) -> int:
    """The id of the script's pass that contains a running one, perhaps of another thread."""
    for outermost, pass_ids in reversed(_nested):
        if pass_id in pass_ids:
            return outermost
    if not _nested or any(outermost == pass_id for outermost, _ in _nested):
        return pass_id
    outermost, pass_ids = _nested[-1]
    pass_ids.add(pass_id)
    return outermost


@functools.cache
def watch_nested_passes(end: Callable[[int], None]) -> None:
    """Call ``end`` with the id of an outermost pass that ends and in which others have run.

    These may hold all gradients of a model. Then no hook of a parameter runs in the outermost pass.
    """
    run = torch.autograd.backward

    # A compiled function may call backward(): the hooks on parameters are not to be traced.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(run)
    def backward(*args: Any, **kwargs: Any) -> None:
        if (pass_id := running_pass()) == -1:
            thread, begun = threading.get_ident(), time.monotonic()
            _callers.append(thread)
            _reduced.clear()
            loss_counts.note(args[0] if args else kwargs.get("tensors"))
            try:
                run(*args, **kwargs)
            finally:
                _callers.remove(thread)
                if _note_span in observers:
                    step = _reduced[0] if _reduced else None
                    mark("backward()", begun, time.monotonic(), step)
            return
        outermost = outermost_pass(pass_id)
        if pass_id == outermost and outermost not in _awaited:
            _awaited.clear()  # what failed passes have left
            _awaited.add(outermost)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(end, outermost))
        _nested.append((outermost, set()))
        try:
            run(*args, **kwargs)
        finally:
            _nested.pop()

    torch.autograd.backward = backward


def trace_steps(hooks: UpdateHooks) -> None:
    """Mark the steps of an optimizer, and the script's backward passes, for ``--timeline``.

    A step begins with its first batch if a monitor loads it, else at the end of the step before.
    """
    if _note_span not in observers:
        observe(_note_span)
    taken, ended = 0, time.monotonic()

    def end(optimizer: Optimizer) -> None:
        nonlocal taken, ended
        taken, before, ended = taken + 1, ended, time.monotonic()
        begun = next((each for each in _batches if each >= before), before)
        mark("step", begun, ended, of_run(taken))

    hooks.add(Feature(Order.TIMELINE, after=end))


def _note_span(span: Span) -> None:
    if span.name == DATA:
        _batches.append(span.begun)
    elif span.name == REDUCTION:
        _reduced.append(span.step)
