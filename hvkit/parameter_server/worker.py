"""Exchanges the weights of a model with a parameter server, after each step.

All weights that train are exchanged, whichever of the model's optimizers steps. A weight that
begins to train later, or that the script adds later, joins in a collective before the first step
that changes it. A step that a loss scale skips counts as a step without a change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvkit.communication import collectives
from hvkit.communication.collectives import require_equal
from hvkit.parameter_server.client import Exchange, compare_iterations
from hvkit.strategies.parameter_server import ParameterServer
from hvkit.sync.local_weights import LocalWeightsKeeper, Weights
from hvkit.watch.calls import call

Array = np.ndarray[Any, Any]

# Prefix of the names of the server's weights in a checkpoint.
_SERVED = "served."


class _Vector(NamedTuple):
    """Weights that are sent as one vector."""

    numbers: list[int]
    read: Array


class ServerKeeper(LocalWeightsKeeper):
    """Exchanges the weights of one model with the server. Making it is a collective."""

    strategy: ParameterServer
    compression = None
    equal_steps = False

    def __init__(self, strategy: ParameterServer, weights: Weights, name: str) -> None:
        super().__init__(weights, name)
        self.strategy = strategy
        self._exchange = Exchange(strategy)
        self._vectors: list[_Vector] = []
        # By vector, the mean over ranks of the changes since the last exchange, at the time of the
        # last collective.
        self._unsent: list[Array] = []
        self._served: set[int] = set()
        # The server's weights by number: from a checkpoint, until a step trains them; and as shown
        # last.
        self._resumed: dict[int, Array] = {}
        self._shown: dict[int, Array] = {}

    def _before_step(self, number: int) -> None:
        """Give the server the weights that this step is the first to train; a collective if any."""
        trained = dict.fromkeys(i for each in self._optimizers for i in sorted(each.trained()))
        self._serve(number, trained)

    def _serve(self, number: int, trained: Iterable[int]) -> None:
        """Give the server weights that an optimizer is about to train."""
        new = [i for i in trained if i not in self._served]
        if not new and self._exchange.begun:
            return
        with call(self._optimizers[number].call, self._steps_ended + 1, self._name):
            self._require_same(new)
            lists = self.weights.by_dtype(new)
            found = {i: self._joined([i]) for each in lists for i in each} | self._resumed
            self._exchange.add([np.concatenate([found[i] for i in each]) for each in lists])
        self._vectors += [_Vector(numbers, self._joined(numbers)) for numbers in lists]
        self._served.update(new)
        for i in new:
            self._resumed.pop(i, None)

    def _require_same(self, new: list[int]) -> None:
        """Raise on every rank unless all begin to train the same weights; a collective."""
        noun = self.weights.noun
        facts = [self.weights.label(i) for i in new]
        advice = f"train the same {noun} on every rank"
        require_equal(f"list of {noun} to train", facts, advice, self.weights.step_call)
        if not self._exchange.begun and not self._resumed:
            self.weights.require_equal()

    def _joined(self, numbers: Sequence[int]) -> Array:
        return self.weights.to_numpy(self.weights.join([self.weights.read(i) for i in numbers]))

    def _changes(self) -> list[Array]:
        return [self._joined(each.numbers) - each.read for each in self._vectors]

    def _end_step(self, number: int) -> None:
        """Send the changes of the step, and continue with the server's weights."""
        with call(self._optimizers[number].call, self._steps_ended, self._name):
            served = self._exchange.exchange(self._changes())
        for at, (vector, values) in enumerate(zip(self._vectors, served, strict=True)):
            joined = self.weights.from_numpy(values, vector.numbers[0])
            pieces = self.weights.split(joined, vector.numbers)
            for i, piece in zip(vector.numbers, pieces, strict=True):
                self.weights.write(i, piece)
            # Weights of 16 bits hold these values rounded.
            self._vectors[at] = vector._replace(read=self._joined(vector.numbers))

    def _split(self, vector: _Vector, values: Array) -> dict[int, Array]:
        ends = np.cumsum([math.prod(self.weights.shape(i)) for i in vector.numbers])
        return dict(zip(vector.numbers, np.split(values, ends[:-1]), strict=True))

    def _compare_ranks(self) -> bool:
        compare_iterations()
        self._unsent = self._changes()
        if any(collectives.gather("hvkit.settled", any(each.any() for each in self._unsent))):
            for n, (vector, unsent) in enumerate(zip(self._vectors, self._unsent, strict=True)):
                of_weights = self.weights.from_numpy(unsent, vector.numbers[0])
                mean = self.weights.mean(of_weights, f"{self._name}.unsent.{n}")
                self._unsent[n] = self.weights.to_numpy(mean)
        return self._exchange.begun or bool(self._resumed)

    def _show_agreed(self) -> None:
        self._shown = dict(self._resumed)
        if self._exchange.begun:
            read = self._exchange.read([each.read for each in self._vectors])
            for vector, values, unsent in zip(self._vectors, read, self._unsent, strict=True):
                self._shown.update(self._split(vector, values + unsent))
        for i, value in self._shown.items():
            self.weights.show(i, self.weights.from_numpy(value, i))
        self._average_statistics(keep=False)

    def _replaced(self, i: int, local: Any, agreed: Any, chosen: Any) -> Any:
        if i not in self._served:
            return chosen
        # All ranks send the difference with their next step, and the server takes their mean.
        self._shown[i] = self.weights.to_numpy(self.weights.read(i))
        return local + (chosen - agreed)

    def end_rounds(self) -> None:
        """Give all ranks the server's weights, as at the end of training; a collective."""
        if not self._compare_ranks():
            return
        self._show_agreed()
        for at, (vector, unsent) in enumerate(zip(self._vectors, self._unsent, strict=True)):
            # The next step sends the script's changes, which the server lacks.
            self._vectors[at] = vector._replace(read=self._joined(vector.numbers) - unsent)
        self._shown = {}

    def put_back(self) -> None:
        super().put_back()
        self._shown = {}

    def start_over(self) -> None:
        self._exchange.close()
        self._exchange = Exchange(self.strategy)
        self._vectors = []
        self._served.clear()
        self._resumed.clear()

    def state(self) -> dict[str, Array]:
        return {f"{_SERVED}{i}": np.array(value) for i, value in self._shown.items()}

    def load_state(self, arrays: dict[str, Array], *, in_round: bool) -> None:
        self.start_over()
        if in_round:
            self._resumed = {int(key.removeprefix(_SERVED)): a for key, a in arrays.items()}
