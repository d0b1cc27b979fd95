"""The parameters of a PyTorch model as vectors, and its optimizers' steps, for local training."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.communication.exchanges import RunningExchanges
from hvkit.compression import Compression
from hvkit.compression.compression import Shape
from hvkit.frameworks.pytorch import ops, wire
from hvkit.frameworks.pytorch.buffers import RunningStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.learning_rate import checksum_of_rates
from hvkit.frameworks.pytorch.optimizers import is_left_to_rank, parameters_of, scaler_hooks
from hvkit.frameworks.pytorch.step_hooks import Feature, Order, UpdateHooks
from hvkit.strategies.strategy import Rounds
from hvkit.sync.compression_state import CompressionState
from hvkit.sync.local_weights import Weights
from hvkit.sync.rounds import RoundSync


class ParameterVectors(Weights):
    """The parameters of a model, and statistics that are averaged with them."""

    step_call = "optimizer.step()"

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        checks: Checks,
        statistics: RunningStatistics | None,
    ) -> None:
        self.checks = checks
        self._statistics = statistics
        self.group = checks.group
        self._wire = wire.Wire("weights", self.group)
        self.in_order: list[nn.Parameter] = checks.parameters
        self.add(parameters)

    def add(self, weights: Iterable[nn.Parameter]) -> None:
        for p in weights:
            self.checks.add(p)

    def __contains__(self, weight: torch.Tensor) -> bool:
        return weight in self.checks.index_of

    def number(self, parameter: torch.Tensor) -> int:
        return self.checks.index_of[parameter]

    def label(self, i: int) -> str:
        return self.checks.label(i)

    def shape(self, i: int) -> Shape:
        return wire.real_shape(self.in_order[i])

    def nbytes(self, i: int) -> int:
        return self.in_order[i].nbytes

    def vector_dtype(self, i: int) -> tuple[torch.dtype, torch.device] | None:
        p = self.in_order[i]
        has_mean = p.is_floating_point() or p.is_complex()
        return (wire.wire_dtype(p.dtype), p.device) if has_mean else None

    def read(self, i: int) -> torch.Tensor:
        return wire.to_vector(self.in_order[i])

    def write(self, i: int, vector: torch.Tensor) -> None:
        wire.set_from_vector(self.in_order[i], vector)

    def show(self, i: int, vector: torch.Tensor) -> None:
        # Not known to autograd: a graph that still needs its backward pass may hold the parameter.
        wire.set_from_vector(self.in_order[i].data, vector)

    def equals(self, i: int, vector: torch.Tensor) -> bool:
        p = self.in_order[i].detach()
        return torch.equal(p, wire.shaped_like(p, vector).to(p.dtype))

    def join(self, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(vectors))

    def to_numpy(self, vector: torch.Tensor) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = vector.cpu().numpy()
        return array

    def from_numpy(self, array: np.ndarray[Any, Any], i: int) -> torch.Tensor:
        return torch.tensor(array, device=self.in_order[i].device)

    def mean(self, vector: torch.Tensor, name: str) -> torch.Tensor:
        return self._wire.wait(self._wire.start_mean(vector, name))

    def values(self) -> list[tuple[Any, Any]]:
        values: list[tuple[Any, Any]] = [(p, p.detach().clone()) for p in self.in_order]
        if self._statistics:
            values.append((self._statistics, self._statistics.read()))
        return values

    def set_values(self, values: list[tuple[Any, Any]]) -> None:
        for thing, value in values:
            if isinstance(thing, RunningStatistics):
                thing.write(value, also_in_evaluation=True)
            else:
                thing.data.copy_(value)

    def average_statistics(self, name: str, *, keep: bool) -> None:
        if self._statistics:
            self._statistics.average(self.group, name, also_in_evaluation=not keep)

    def require_equal(self) -> None:
        if self.checks.due:
            self.checks.send()
            self.checks.receive()

    def require_close(self, call: str, note: str, vectors: Mapping[int, torch.Tensor]) -> bool:
        return self.checks.require_same(call, note, vectors)


def round_sync(
    strategy: Rounds, weights: ParameterVectors, name: str, compression: Compression | None
) -> RoundSync:
    sender = wire.Wire("weights", weights.group)
    state = CompressionState(compression, ops, sender) if compression else None
    start = functools.partial(RunningExchanges, sender.start)
    return RoundSync(strategy, weights, name, start, state)


class SteppedOptimizer:
    """A ``HookedOptimizer`` for an optimizer and those inside it, whose hooks lead here: weak."""

    def __init__(
        self, optimizers: Sequence[Optimizer], hooks: UpdateHooks, parameters: ParameterVectors
    ) -> None:
        self.call = f"{type(optimizers[0]).__name__}.step()"
        self.steps = 0
        self.rounds = 0
        self.taken = 0
        self._parameters = parameters
        # Weak as well: hooks hold what they call.
        self._hooks = weakref.ref(hooks)
        self._optimizers = [weakref.ref(each) for each in optimizers]

    def attach(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        def ended() -> None:
            self.taken += 1
            after()

        def count_scaled_step(scaler: Any, step: Callable[[], Any]) -> Any:
            """Let ``GradScaler`` step or skip, and count both."""
            count = self.taken
            result = step()
            if self.taken == count:
                before()
                ended()
            return result

        _in_local_training.add(self._parameters)
        hooks = self._hooks()
        assert hooks is not None
        hooks.add(Feature(Order.RANKS, before=lambda *_: before(), after=lambda _: ended()))
        for reference in self._optimizers:
            if (optimizer := reference()) is not None:
                scaler_hooks(optimizer).step = count_scaled_step

    def updates(self) -> set[int]:
        return {self._parameters.number(p) for p in self._updated()}

    def trained(self) -> set[int]:
        # Momentum moves a parameter that was frozen, as long as it has a gradient.
        trained = (p for p in self._updated() if p.requires_grad or p.grad is not None)
        return {self._parameters.number(p) for p in trained}

    def checksum_of_rates(self) -> int:
        return checksum_of_rates(self._living())

    def require_same_training(self, call: str) -> None:
        self._parameters.checks.require_same_parameters(call)
        self._parameters.checks.require_same_rates(self._living(), call)

    def _living(self) -> list[Optimizer]:
        """The optimizer, if the script still has it."""
        optimizer = self._optimizers[0]()
        return [] if optimizer is None else [optimizer]

    def _updated(self) -> Iterator[torch.Tensor]:
        # One on the meta device is another rank's of a mesh.
        return (p for p in parameters_of(*self._living()) if not (p.is_meta or is_left_to_rank(p)))


_in_local_training: weakref.WeakSet[ParameterVectors] = weakref.WeakSet()


def has_local_weights(parameter: torch.Tensor) -> bool:
    """Whether a model with local weights has this parameter."""
    return any(parameter in parameters for parameters in _in_local_training)
