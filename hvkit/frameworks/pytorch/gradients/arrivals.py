"""Follows backward passes: which gradients are final, and which buckets have all of theirs.

A hook on each parameter runs for every gradient of every step, so it does little: work is moved to
once per bucket, or once per layout, where possible.

A backward pass may run inside another one. Reentrant checkpointing (``torch.utils.checkpoint`` with
``use_reentrant=True``), reversible layers and the like call ``backward()`` while ``backward()``
computes their gradients. Autograd numbers such a nested pass as any other, and calls back at its
end. But the gradients are final, and the script's pass counts, only at the end of the outermost
one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvkit.frameworks.pytorch.gradients.bucket_layout import Layout
from hvkit.frameworks.pytorch.gradients.buckets import Bucket, are_dense

running_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Autograd's number of the pass that this thread is in; -1 outside of any."""

# Gradients that a bucket misses while passes accumulate: no pass has as many.
_NEVER = 1 << 60


class Arrivals:
    """The hooks on the parameters of one model.

    Args:
        begin_pass: prepares for the first gradient of a backward pass, given autograd's number of
            the pass; it calls ``begin``.
        send: sends a bucket, given its gradients.
        lock: held meanwhile; parameters on several devices have their hooks called from several
            threads.

    Attributes:
        task: autograd's number of the pass that is running; None between passes.
        whole: that of the script's own pass: another one if the running pass is nested in it.
        outdated: buckets that had gone out before one of their gradients changed.
    """

    def __init__(
        self,
        begin_pass: Callable[[int], None],
        send: Callable[[Bucket, list[torch.Tensor | None]], None],
        lock: threading.RLock,
    ) -> None:
        self.task: int | None = None
        self.whole: int | None = None
        self.outdated: set[Bucket] = set()
        self._begin_pass = begin_pass
        self._send = send
        self._lock = lock
        self._layout: Layout | None = None
        # By parameter: what calls its hook, and the bucket that the hook counts for.
        self._hooks: dict[int, RemovableHandle] = {}
        self._hooked: dict[int, Bucket | None] = {}
        self._number: dict[torch.Tensor, int] = {}
        # The bucket that goes out with the next gradient, when all hooks of its last have run.
        self._full: Bucket | None = None

    def add(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Count the gradients of a parameter."""
        self._number[parameter] = number
        self._hooks[number] = _hook(parameter, self._arrival(None))
        self._hooked[number] = None

    def follow(self, layout: Layout) -> None:
        """Count for the buckets of a layout."""
        self._layout = layout
        arrivals = {id(bucket): self._arrival(bucket) for bucket in layout.buckets}
        outside = self._arrival(None)
        for i, hook in self._hooks.items():
            bucket = layout.of.get(i)
            # Frozen parameters have no use for theirs, and thaw to the same bucket, often.
            if bucket is not self._hooked[i] and i in layout.trained:
                # In place, because this may run inside one of them.
                hooks: Any = hook.hooks_dict_ref()
                hooks[hook.id] = arrivals[id(bucket)] if bucket else outside
                self._hooked[i] = bucket

    def begin(self, task: int, whole: int, *, accumulates: bool) -> None:
        """Count anew for a pass.

        Args:
            task: autograd's number of it.
            whole: that of the script's own pass, in which it runs.
            accumulates: whether buckets wait for the gradients of a later pass.
        """
        assert self._layout is not None
        self._full = None
        # Drop what a failed pass has left in the buckets.
        for bucket in self._layout.buckets:
            if bucket.handle is None:
                bucket.reset()
                if accumulates:
                    bucket.left = _NEVER
            else:
                self.outdated.add(bucket)
        self.whole = whole
        self.task = task  # last: other threads go on when they see it

    def end(self) -> None:
        """The pass is over; what is not sent yet is the caller's."""
        self.task = self.whole = None
        self._full = None

    def _arrival(self, bucket: Bucket | None) -> Callable[[torch.Tensor], None]:
        """The hook of all parameters in a bucket, called when a gradient is final.

        One function for all of them stays in the processor's caches. It keeps nothing: Python's
        garbage collector does not see what these hooks of PyTorch's refer to, so anything that
        leads from them back to a parameter would stay in memory for good.
        """
        of_model = weakref.ref(self)
        of_hook = _no_bucket if bucket is None else weakref.ref(bucket)

        def arrived(parameter: torch.Tensor) -> None:
            arrivals = of_model()
            if arrivals is None:  # the model is gone, the script has kept the parameter
                return
            at = of_hook()
            task = running_pass()
            if task != arrivals.task:
                arrivals._begin_pass(task)
                assert arrivals._layout is not None
                at = arrivals._layout.of.get(arrivals._number[parameter])
            elif arrivals._full is not None:
                arrivals._send_full()
            if at is not None:
                at.left -= 1
                if at.left <= 0:
                    arrivals._is_full(at)

        return arrived

    def _is_full(self, bucket: Bucket) -> None:
        """Send a bucket that has all gradients soon, or note that it has gone out too early."""
        assert self._layout is not None
        with self._lock:
            self._send_full()
            if bucket.handle is not None:
                self.outdated.add(bucket)
            elif bucket in self._layout.buckets[:-1]:
                self._full = bucket

    def _send_full(self) -> None:
        with self._lock:
            bucket, self._full = self._full, None
            if bucket is None or bucket.handle is not None:
                return
            gradients = bucket.gradients()
            # One that is there twice makes a bucket look full.
            if are_dense(gradients):
                self._send(bucket, gradients)


def _no_bucket() -> None:
    """In place of a reference to a bucket."""


def _hook(parameter: torch.nn.Parameter, function: Callable[[torch.Tensor], None]) -> Any:
    """Call ``function`` when a gradient is final, also if the parameter is frozen now.

    PyTorch takes the hook only from parameters that require a gradient, and keeps it when that
    changes.
    """
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)
    return handle


class _Nested:
    """A call of ``backward()`` inside another.

    Attributes:
        outermost: the number of the pass that the script has started.
        numbers: those of the passes that this call has started, as far as they are known.
    """

    def __init__(self, outermost: int) -> None:
        self.outermost = outermost
        self.numbers: set[int] = set()


# Those that run now, the innermost last.
_nested: list[_Nested] = []
# The numbers of outermost passes whose end is awaited.
_awaited: set[int] = set()
# The threads in which the script's own calls of ``backward()`` run.
_callers: list[int] = []


def calling_thread() -> int:
    """Identifies the thread in which the script has called ``backward()``.

    Gradients on GPUs are computed in other threads.
    """
    return _callers[-1] if _callers else threading.get_ident()


def outermost(number: int) -> int:
    """The number of the script's pass that contains a pass, or that it is itself.

    Args:
        number: of a pass that runs now. It may run in another thread than the call that has
            started it, as passes on GPUs do.
    """
    for each in reversed(_nested):
        if number in each.numbers:
            return each.outermost
    if not _nested or any(each.outermost == number for each in _nested):
        return number
    _nested[-1].numbers.add(number)
    return _nested[-1].outermost


@functools.cache
def watch_nested_passes(end: Callable[[int], None]) -> None:
    """Call ``end`` when an outermost pass ends in which others have run, with its number.

    Nested passes may hold all gradients of a model. Then no hook of a parameter runs in the
    outermost pass, from which one could wait for its end.
    """
    run = torch.autograd.backward

    # A compiled function may call backward(): the hooks on parameters are not to be traced.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(run)
    def backward(*args: Any, **kwargs: Any) -> None:
        if (number := running_pass()) == -1:
            thread = threading.get_ident()
            _callers.append(thread)
            try:
                run(*args, **kwargs)
            finally:
                _callers.remove(thread)
            return
        whole = outermost(number)
        if number == whole and whole not in _awaited:
            _awaited.clear()  # what failed passes have left
            _awaited.add(whole)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(end, whole))
        _nested.append(_Nested(whole))
        try:
            run(*args, **kwargs)
        finally:
            _nested.pop()

    torch.autograd.backward = backward
