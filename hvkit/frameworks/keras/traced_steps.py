"""Marks the steps of ``fit``, and the waits inside their graph, in the timeline of a run."""

from __future__ import annotations

import time
from typing import Any

import keras

from hvkit.frameworks.keras.collectives.graph_collectives import blocked_in_graphs
from hvkit.host.run_reports import timeline_wanted
from hvkit.watch.spans import WAITING, mark


def marks() -> list[keras.callbacks.Callback]:
    """The callback that marks steps, in runs with a timeline."""
    return [Marked()] if timeline_wanted() else []


class Marked(keras.callbacks.Callback):  # type: ignore[misc]
    """Marks steps, and the waits inside their graph, in the timeline of the run."""

    never_stops = True

    def __init__(self) -> None:
        super().__init__()
        blocked_in_graphs.measure()
        self._begun = 0.0
        self._blocked = blocked_in_graphs.seconds()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remember when the step begins."""
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Mark the step, and its waits as one at the end of the last of them."""
        now, blocked = time.monotonic(), blocked_in_graphs.seconds()
        step = int(self.model.optimizer.iterations.numpy()) if self.model.optimizer else None
        if waited := blocked - self._blocked:
            ended = blocked_in_graphs.ended() - time.time() + now
            mark(WAITING, ended - waited, ended, step)
        mark("step", self._begun, now, step)
        self._blocked = blocked
