"""Exchanges the weights of a PyTorch model with a parameter server, after each step.

All parameters that train are exchanged, whichever of the model's optimizers steps. A parameter that
begins to train later, or that the script adds later, joins in a collective before the first step
that changes it. A step that ``GradScaler`` skips counts as a step without a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hvkit.communication import collectives
from hvkit.communication.collectives import require_equal
from hvkit.frameworks.pytorch.batch_norm import RunningStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.weights.weight_keeper import (
    WeightKeeper,
    flat_copy,
    of_one_kind,
    parameters_of,
    write,
)
from hvkit.parameter_server.client import Exchange, compare_iterations
from hvkit.strategies.parameter_server import ParameterServer
from hvkit.watch.calls import call

_STEP = "optimizer.step()"
# Begins the names of the server's weights in a checkpoint.
_SERVED = "served."


class _Vector(NamedTuple):
    """Parameters that travel together.

    Attributes:
        numbers: of the parameters.
        read: their values as this rank holds them since its last exchange, one after the other.
    """

    numbers: list[int]
    read: torch.Tensor


class ServedModel(WeightKeeper):
    """Exchanges the weights of one model with the server. Making it is a collective.

    Args:
        strategy: how far ranks may be ahead.
        parameters: in the same order on every rank.
        name: the same on every rank, and no other model's.
        checks: what the ranks compare before their first step.
        statistics: of normalisation layers, averaged where ``hvkit.settled`` shows the model.
    """

    compression = None
    equal_steps = False

    def __init__(
        self,
        strategy: ParameterServer,
        parameters: Iterable[nn.Parameter],
        name: str,
        checks: Checks,
        statistics: RunningStatistics | None = None,
    ) -> None:
        super().__init__(parameters, name, checks, statistics)
        self.strategy = strategy
        self._exchange = Exchange(strategy)
        self._vectors: list[_Vector] = []
        # The mean over ranks of what scripts have changed since the last exchange, by vector, as of
        # when the ranks met last.
        self._unsent: list[torch.Tensor] = []
        self._wire = Wire("weights")
        self._served: set[int] = set()
        # The server's weights by the parameter's number: those of a checkpoint until the first
        # step, and those that were shown last.
        self._resumed: dict[int, torch.Tensor] = {}
        self._shown: dict[int, torch.Tensor] = {}

    def _before_step(self, number: int) -> None:
        self._serve_new(f"{type(self._optimizer(number)).__name__}.step()")

    def _serve_new(self, label: str) -> None:
        """Have the server hold the parameters that this step is the first to train.

        A collective if there are any; before the first step also a comparison of the ranks.
        """
        held = dict.fromkeys(p for each in self._living() for p in parameters_of(each))
        numbers = [self._number[p] for p in held if p.requires_grad or p.grad is not None]
        new = [i for i in numbers if i not in self._served]
        if not new and self._exchange.begun:
            return
        with call(label, self._steps_ended + 1, self._name):
            self._require_same(new)
            if not self._exchange.begun and not self._resumed:
                self._checks.send(0, self._parameters)
                self._checks.receive(0)
            kinds = of_one_kind(self._parameters, new)
            weights = [[self._served_value(i) for i in kind] for kind in kinds]
            self._exchange.add([torch.cat(each).cpu().numpy() for each in weights])
        self._vectors += [_Vector(kind, self._flat(kind)) for kind in kinds]
        self._served.update(new)
        self._resumed.clear()

    def _require_same(self, new: list[int]) -> None:
        facts = [self._checks.label(i, self._parameters[i]) for i in new]
        advice = "train the same parameters on every rank"
        require_equal("list of parameters to train", facts, advice, _STEP)

    def _served_value(self, i: int) -> torch.Tensor:
        return self._resumed.get(i, flat_copy(self._parameters[i]))

    def _flat(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.cat([flat_copy(self._parameters[i]) for i in numbers])

    @torch.no_grad()
    def _end_step(self, number: int) -> None:
        """Send what the step has changed, and go on from the server's weights."""
        label = f"{type(self._optimizer(number)).__name__}.step()"
        with call(label, self._steps_ended, self._name):
            changes = [self._flat(each.numbers) - each.read for each in self._vectors]
            weights = self._exchange.exchange([each.cpu().numpy() for each in changes])
        for at, (vector, values) in enumerate(zip(self._vectors, weights, strict=True)):
            for i, piece in self._split(vector, values).items():
                write(self._parameters[i], piece)
            # Parameters of 16 bits hold these values rounded.
            self._vectors[at] = vector._replace(read=self._flat(vector.numbers))

    def _split(self, vector: _Vector, values: np.ndarray[Any, Any]) -> dict[int, torch.Tensor]:
        """A vector of the server's, by the parameter's number."""
        tensor = torch.from_numpy(values).to(vector.read.device)
        lengths = [flat_copy(self._parameters[i]).numel() for i in vector.numbers]
        return dict(zip(vector.numbers, torch.split(tensor, lengths), strict=True))

    def _meet(self) -> bool:
        compare_iterations()
        with torch.no_grad():
            self._unsent = [self._flat(each.numbers) - each.read for each in self._vectors]
        changed = any(bool(each.any()) for each in self._unsent)
        if any(collectives.gather("hvkit.settled", changed)):
            for n, each in enumerate(self._unsent):
                self._wire.wait(self._wire.start_mean(each, f"{self._name}.unsent.{n}"))
        return self._exchange.begun or bool(self._resumed)

    @torch.no_grad()
    def _show_agreed(self) -> None:
        self._shown = dict(self._resumed)
        if self._exchange.begun:
            served = zip(self._vectors, self._exchange.read(), self._unsent, strict=True)
            for vector, values, unsent in served:
                self._shown.update(self._split(vector, values + unsent.cpu().numpy()))
        for i, value in self._shown.items():
            write(self._parameters[i].data, value)
        self._average_statistics(keep=False)

    def put_back(self) -> None:
        """Hold this rank's own weights again."""
        super().put_back()
        self._shown = {}

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all."""
        self._exchange.close()
        self._exchange = Exchange(self.strategy)
        self._vectors = []
        self._served.clear()
        self._resumed.clear()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves: the server's weights, as shown now, the same on every rank."""
        return {f"{_SERVED}{i}": value.cpu().numpy() for i, value in self._shown.items()}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank holds its own weights again. If not, the server begins with
                the weights that all hold now.
        """
        self.begin_anew()
        if not in_round:
            return
        for key, array in arrays.items():
            i = int(key.removeprefix(_SERVED))
            self._resumed[i] = torch.tensor(array, device=self._parameters[i].device)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank besides the model: nothing."""
        return {}

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned."""
