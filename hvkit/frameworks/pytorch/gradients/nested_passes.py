"""Finds the script's own backward pass for a pass that runs inside it.

Reentrant checkpointing (``torch.utils.checkpoint`` with ``use_reentrant=True``), reversible layers
and the like call ``backward()`` while ``backward()`` computes their gradients. Autograd numbers
such a nested pass as any other, and calls back at its end. But the gradients are final, and the
script's pass counts, only at the end of the outermost one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

running_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Autograd's number of the pass that this thread is in; -1 outside of any."""


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
