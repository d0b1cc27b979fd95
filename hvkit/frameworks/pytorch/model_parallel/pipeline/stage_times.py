"""How long a rank of a pipeline computes its stages, and how long it waits for those of others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hvkit.watch.calls import working
from hvkit.watch.spans import mark, observers


class StageTimes:
    """The times of one rank. With a GPU they are those of the host, which runs ahead.

    Attributes:
        computed: seconds in which it computed its stages.
        passed: seconds of its forward and backward passes.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was before, also the first part of the current pass."""
        self.computed = self.passed = 0.0
        self._since = time.monotonic()

    @property
    def bubble(self) -> float:
        """The share of its passes in which the rank did not compute: from 0 to 1."""
        return 1 - self.computed / self.passed if self.passed else 0.0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds a forward or backward pass."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.passed += time.monotonic() - self._since

    @contextmanager
    def computing(self, what: str, microbatch: int, stage: int) -> Iterator[None]:
        """Surrounds what a stage computes for a micro-batch; a span of a timeline.

        Args:
            what: ``forward``, ``backward``, or a part of them.
            microbatch: its number in the batch, from 0.
            stage: its number in the model, from 0.
        """
        with working():
            begun = time.monotonic()
            yield
            ended = time.monotonic()
        self.computed += ended - begun
        if observers:
            mark(f"{what} {microbatch} of stage {stage}", begun, ended)
