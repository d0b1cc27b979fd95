"""Gradients that travel compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvkit.communication.exchanges import RunningExchanges
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import Bucket
from hvkit.sync.compression_state import CompressionState

# What a script can do that averages more than once in a step, by the call that does.
_FIXES = {
    "backward()": (
        "pass accumulate=, the number of backward passes before each step, to hvkit.distribute, "
        "and do not skip steps; where gradients pass through one model to train another, as in a "
        "GAN, set requires_grad_(False) on the first"
    ),
    "hvkit.reduce_gradients()": (
        "pass accumulate= one more than the backward passes of a step to hvkit.distribute, so that "
        "only this call averages"
    ),
}


def refuse_another_mean(state: CompressionState, call: str) -> None:
    """Raise if a residual counts for a mean that no update has used.

    Args:
        state: of the compression.
        call: what the script has called.

    Raises:
        ValueError: the compression keeps residuals, and this is a second reduction in a step.
    """
    if state.compression.keeps_state and state.pending:
        raise ValueError(
            f"{call} again before optimizer.step(): {state.compression} has already averaged the "
            "gradients of this step, and keeps what it has not sent for the next one: "
            f"{_FIXES[call]}"
        )


def refuse_scaled_step(state: CompressionState, scaler: Any, step: Callable[[], Any]) -> Any:
    """Raise if the scale of the gradients changes from step to step; otherwise step.

    Raises:
        ValueError: residuals of other steps would have another scale.
    """
    if scaler.is_enabled():
        raise ValueError(
            f"{state.compression} adds what earlier steps have not sent to the gradients of this "
            "one, but GradScaler scales each step's differently: train in bfloat16 without a "
            "GradScaler, or choose a compression without residuals"
        )
    return step()


class CompressedBucket(Bucket):
    """A bucket of float32 gradients that travel compressed.

    Args:
        name: the same on every rank, and no other bucket's.
        members: indices and parameters, at least one.
        state: of the compression, for all buckets of a model.
    """

    _keeps_formats = False

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], state: CompressionState
    ) -> None:
        super().__init__(name, members)
        self._large = False  # a compression gets the gradients as they are
        self._state = state
        self._running: RunningExchanges[torch.Tensor]

    def launch(self, wire: Wire) -> None:
        self.left = 0
        flow = self._state.reduce(self.indices, self._shapes, self.flat)
        self._running = RunningExchanges(wire.start, flow, self.name)
        self.handle = self._running.waiting

    def exchange(self, wire: Wire) -> None:
        self._running.next()
        self.handle = self._running.waiting

    def wait(self, wire: Wire) -> None:
        self.flat.copy_(self._running.result())
        del self._running  # which holds the mean
        self.handle = None
