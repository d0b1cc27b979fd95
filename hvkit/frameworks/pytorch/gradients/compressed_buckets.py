"""Gradients and weights that travel compressed, and what the compression keeps between steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hvkit.communication.exchanges import Exchange
from hvkit.compression import Compression
from hvkit.compression.compression import Reduction, Shape, State
from hvkit.frameworks.pytorch.collectives import ops
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import Bucket, shape_of
from hvkit.strategies.strategy import Averaging

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


class CompressionState:
    """What a compression keeps of each parameter.

    Args:
        compression: how float32 gradients or weights travel.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        # By the parameter's index: what counts, and what will once an update has used the means.
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.pending: dict[int, dict[str, torch.Tensor]] = {}

    def suits(self, dtype: torch.dtype) -> bool:
        """Whether vectors of this dtype travel so.

        Raises:
            ValueError: they cannot, and must not travel otherwise.
        """
        suits = dtype is torch.float32 or not self.compression.float32_only
        if not suits and self.compression.exclusive:
            raise ValueError(
                f"{self.compression} is for parameters of at most 32 bits, got {dtype}: use "
                "model.float(), or hvkit.Synchronous()"
            )
        return suits

    def of(self, indices: Sequence[int], shapes: Sequence[Shape], like: torch.Tensor) -> State:
        """The state of some parameters, new ones included."""
        for i, shape in zip(indices, shapes, strict=True):
            if i not in self.kept:
                self.kept[i] = {
                    name: ops.constant(array, like)
                    for name, array in self.compression.begin(shape).items()
                }
        names = self.kept[indices[0]].keys()
        return {name: [self.kept[i][name] for i in indices] for name in names}

    def suggest(self, indices: Sequence[int], state: State) -> None:
        """Take over a new state, for when an update has used the means."""
        for at, i in enumerate(indices):
            self.pending[i] = {name: values[at] for name, values in state.items()}

    def arrays(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """What is kept under these names, for a checkpoint: by name and parameter."""
        return {
            f"{name}.{i}": state[name].cpu().numpy()
            for i, state in self.kept.items()
            for name in names
        }

    def load(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Set what ``arrays`` returned."""
        for key, array in arrays.items():
            name, _, index = key.partition(".")
            p = parameters[int(index)]
            begun = self.of([int(index)], [shape_of(p)], p)
            begun[name][0].copy_(torch.from_numpy(array))

    def commit(self, used: Container[int]) -> None:
        """Keep the new state of the parameters that an update has used."""
        self.kept.update({i: state for i, state in self.pending.items() if i in used})
        self.pending.clear()

    def keeper(
        self,
        strategy: Averaging,
        compression: Compression | None,
        parameters: Sequence[torch.Tensor],
    ) -> CompressionKeeper | None:
        """What shows this to checkpoints; None if the compression keeps nothing.

        Args:
            strategy: as passed to ``distribute``.
            compression: as passed to ``distribute``.
            parameters: of the model; they may grow.
        """
        if not self.compression.keeps_state:
            return None
        return CompressionKeeper(strategy, compression, self, parameters)

    def refuse_another_mean(self, call: str) -> None:
        """Raise if a residual counts for a mean that no update has used.

        Args:
            call: what the script has called.

        Raises:
            ValueError: the compression keeps residuals, and this is a second reduction in a step.
        """
        if self.compression.keeps_state and self.pending:
            raise ValueError(
                f"{call} again before optimizer.step(): {self.compression} has already "
                "averaged the gradients of this step, and keeps what it has not sent for the next "
                f"one: {_FIXES[call]}"
            )

    def refuse_scaled_step(self, scaler: Any, step: Callable[[], Any]) -> Any:
        """Raise if the scale of the gradients changes from step to step; otherwise step.

        Raises:
            ValueError: residuals of other steps would have another scale.
        """
        if scaler.is_enabled():
            raise ValueError(
                f"{self.compression} adds what earlier steps have not sent to the gradients "
                "of this one, but GradScaler scales each step's differently: train in bfloat16 "
                "without a GradScaler, or choose a compression without residuals"
            )
        return step()


class CompressionKeeper:
    """A ``hvkit.sync.port.Keeper`` of what a compression of gradients keeps.

    Args:
        strategy: as passed to ``distribute``.
        compression: as passed to ``distribute``.
        state: of the compression that carries the gradients.
        parameters: of the model; they may grow.
    """

    local, equal_steps = False, True

    def __init__(
        self,
        strategy: Averaging,
        compression: Compression | None,
        state: CompressionState,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.strategy = strategy
        self.compression = compression
        self._state = state
        self._parameters = parameters

    def arrive(self) -> None:
        """No agreement runs during training."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The weights are the same on all ranks at any time."""
        yield

    unsettled = settled

    def begin_anew(self) -> None:
        """Forget what the compression keeps."""
        self._state.kept.clear()
        self._state.pending.clear()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank."""
        return self._state.arrays(self._state.compression.common)

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned."""
        self.begin_anew()
        self._state.load(arrays, self._parameters)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals."""
        return self._state.arrays(self._state.compression.own)

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        self._state.load(arrays, self._parameters)


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
        self._flow: Reduction
        self._exchanges = 0

    def launch(self, wire: Wire) -> None:
        self.left = 0
        held = self._state.of(self.indices, self._shapes, self.flat)
        reduce = self._state.compression.reduce
        self._flow = reduce(self.flat, self._shapes, held, ops, wire)
        self._exchanges = 0
        self._start(next(self._flow), wire)

    def exchange(self, wire: Wire) -> None:
        assert self.handle is not None
        result, self.handle = wire.wait(self.handle), None
        try:
            following = self._flow.send(result)
        except StopIteration as end:
            mean, state = end.value
            self.flat.copy_(mean)
            self._state.suggest(self.indices, state)
        else:
            self._start(following, wire)

    def wait(self, wire: Wire) -> None:
        while self.handle is not None:
            self.exchange(wire)

    def _start(self, exchange: Exchange, wire: Wire) -> None:
        name = f"{self.name}.{self._exchanges}"
        self._exchanges += 1
        self.handle = wire.start(exchange, name)
