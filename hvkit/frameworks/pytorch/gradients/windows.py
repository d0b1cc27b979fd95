"""Counts the backward passes of a step: a window of ``accumulate`` passes, or fewer.

``accumulate`` may not divide the number of batches of an epoch. Gradients of a shorter last window
are averaged in the pass over the last batch, if it comes from a DataLoader that ``hvkit.shard``
returned. Otherwise the step averages them.

All ranks must reduce in the same passes. A thread that fetches batches ahead may have the last one
at other passes on other ranks, so only batches count that the thread of ``backward()`` has taken. A
script that itself fetches one batch ahead reduces one pass too early, on all ranks, and again in
the step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
