"""Counts the backward passes of a step: a window of ``accumulate`` passes, or fewer.

``accumulate`` may not divide the number of batches of an epoch. Gradients of a shorter last window
are averaged in the pass over the last batch, if they come from a DataLoader that ``hvkit.shard``
returned. Otherwise the step averages them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_loaders_at_end = 0


@contextmanager
def last_batch() -> Iterator[None]:
    """Surrounds the time in which the script has the last batch of an epoch."""
    global _loaders_at_end
    _loaders_at_end += 1
    try:
        yield
    finally:
        _loaders_at_end -= 1


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
        self._reduces = True

    def begin_pass(self) -> bool:
        """Whether the pass that begins now ends with a reduction."""
        at_end = self._ends_with_epoch and _loaders_at_end > 0
        self._reduces = at_end or self.passes + 1 >= self.length
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
