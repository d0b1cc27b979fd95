"""Local weights of NNX: each rank trains a copy, and all agree on it every so many steps.

With ``LocalSGD`` and ``DiLoCo`` each rank trains its copy of the model on its device, and its
compiled step sends nothing. The optimizer counts its steps in a variable. In ``hvkit.batch``,
before the next step, the ranks read it, and agree on weights at the end of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from hvkit.communication.allreduce import allreduce
from hvkit.communication.exchanges import Exchange, Mean, RunningExchanges
from hvkit.frameworks.jax import batches
from hvkit.frameworks.jax.arrays import with_numbers
from hvkit.runtime import Group, all_ranks
from hvkit.strategies.strategy import Rounds
from hvkit.sync.fingerprints import Compared, fingerprint, require_same
from hvkit.sync.local_weights import Weights
from hvkit.sync.rounds import RoundSync

Vector = NDArray[Any]


class NnxWeights(Weights):
    """The variables of a module, with vectors of NumPy.

    The variables have the same names and order on every rank; statistics are averaged with them.
    ``show`` may just write: the arrays that a backward pass holds do not change.
    """

    step_call = "optimizer.update()"

    def __init__(
        self, variables: Mapping[str, Any], statistics: Sequence[Any], group: Group
    ) -> None:
        self.group = group
        self._names = list(variables)
        self.in_order = list(variables.values())
        self._number = {id(v): i for i, v in enumerate(self.in_order)}
        self._statistics = list(statistics)

    def add(self, weights: Iterable[Any]) -> None:
        raise NotImplementedError("a module of NNX has all its variables in distribute")

    def __contains__(self, weight: Any) -> bool:
        return id(weight) in self._number

    def numbers(self, variables: Iterable[Any]) -> set[int]:
        return {self._number[id(v)] for v in variables if v in self}

    def label(self, i: int) -> str:
        return f"parameter {self._names[i]}"

    def _array(self, i: int) -> jax.Array:
        array: jax.Array = self.in_order[i].get_value()
        return array

    def shape(self, i: int) -> tuple[int, ...]:
        array = self._array(i)
        return (*array.shape, 2) if array.dtype.kind == "c" else tuple(array.shape)

    def vector_dtype(self, i: int) -> np.dtype[Any] | None:
        return _wire_dtype(self._array(i).dtype)

    def nbytes(self, i: int) -> int:
        return int(self._array(i).nbytes)

    def read(self, i: int) -> Vector:
        return _flat(self._array(i))

    def write(self, i: int, vector: Vector) -> None:
        self.in_order[i].set_value(_shaped_like(self._array(i), vector))

    def equals(self, i: int, vector: Vector) -> bool:
        array = self._array(i)
        return np.array_equal(np.asarray(array), np.asarray(_shaped_like(array, vector)))

    def mean(self, vector: Vector, name: str) -> Vector:
        return allreduce(vector)

    def values(self) -> list[tuple[Any, Any]]:
        return [(v, v.get_value()) for v in (*self.in_order, *self._statistics)]

    def same(self, value: Any, other: Any) -> bool:
        return np.array_equal(np.asarray(value), np.asarray(other), equal_nan=True)

    def set_values(self, values: list[tuple[Any, Any]]) -> None:
        for variable, value in values:
            variable.set_value(value)

    def average_statistics(self, name: str, *, keep: bool) -> None:
        for variable in self._statistics:
            array = variable.get_value()
            if _wire_dtype(array.dtype) is not None:
                variable.set_value(_shaped_like(array, allreduce(_flat(array))))

    def require_equal(self) -> None:
        self.require_close("batch", "", {i: self.read(i) for i in range(len(self))})

    def require_close(self, call: str, note: str, vectors: Mapping[int, Vector]) -> bool:
        return require_same(
            call,
            [Compared(f"{self.label(i)}{note}") for i in vectors],
            [fingerprint(vector) for vector in vectors.values()],
            self.group,
        )


def _wire_dtype(dtype: Any) -> np.dtype[Any] | None:
    """The dtype of the vector for an array of some dtype; None if it has no mean."""
    if dtype in (ml_dtypes.bfloat16, np.float16):
        return np.dtype(np.float32)
    dtype = np.dtype(dtype)
    return dtype.type(0).real.dtype if dtype.kind in "fc" else None


def _flat(array: Any) -> Vector:
    host = np.asarray(array).reshape(-1)
    dtype = _wire_dtype(host.dtype)
    assert dtype is not None
    return host.view(dtype).copy() if host.dtype.kind == "c" else host.astype(dtype)


def _shaped_like(array: Any, vector: Vector) -> Any:
    if array.dtype.kind == "c":
        vector = vector.view(array.dtype)
    return with_numbers(array, np.asarray(vector).reshape(array.shape))


def _start(exchange: Exchange, name: str) -> Callable[[], Vector]:
    """Start a mean in host memory, the only exchange of these strategies without compression."""
    assert isinstance(exchange, Mean)
    vector: Vector = exchange.vector
    return lambda: allreduce(vector)


class NnxRounds(RoundSync):
    """Ends rounds in ``hvkit.batch``, and before agreed weights are shown."""

    counted: CountedOptimizer  # the model's optimizer

    def show(self) -> bool:
        if not self.shows_agreed:
            self.counted.count_steps()
        return super().show()

    def wait_for_agreements(self, numbers: Container[int] | None = None) -> None:
        if numbers is None and not self.shows_agreed:
            self.counted.count_steps()
        super().wait_for_agreements(numbers)

    def start_over(self) -> None:
        self.counted.forget_steps()  # a checkpoint has set the optimizer's own count
        super().start_over()


class CountedOptimizer:
    """Implements ``hvkit.sync.local_weights.HookedOptimizer`` for an ``nnx.Optimizer``.

    Its steps are counted where the script takes the next batch.
    """

    def __init__(self, optimizer: Any, model: Any, weights: NnxWeights) -> None:
        self.call = "optimizer.update()"
        self.steps = 0
        self.rounds = 0
        self.taken = 0
        self._optimizer = ref(optimizer)
        self._seen = int(optimizer.step.get_value())
        self._begun = False
        updated = jax.tree.leaves(
            nnx.state(model, optimizer.wrt), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
        self._updates = weights.numbers(updated)
        self._before: Callable[[], None] = lambda: None
        self._after: Callable[[], None] = lambda: None

    def attach(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after

    def next_batch(self) -> None:
        if self._optimizer() is not None:
            self.count_steps()
            self._begun = True
            self._before()

    def count_steps(self) -> None:
        """End each step that was taken since this was last called; a collective."""
        if (optimizer := self._optimizer()) is None:
            return
        now = int(optimizer.step.get_value())
        new, self._seen = now - self._seen, now
        if new and not self._begun:
            raise ValueError(
                f"optimizer.update() has been called {new} times, and hvkit.batch not before: "
                "rounds of steps end in hvkit.batch, so pass each batch through it"
            )
        for _ in range(new):
            self.taken += 1
            self._after()

    def forget_steps(self) -> None:
        if (optimizer := self._optimizer()) is not None:
            self._seen = int(optimizer.step.get_value())

    def updates(self) -> set[int]:
        return set() if self._optimizer() is None else self._updates

    def trained(self) -> set[int]:
        return self.updates()

    def checksum_of_rates(self) -> int:
        return 0  # rates are inside of Optax

    def require_same_training(self, call: str) -> None:
        """Nothing to compare: a step changes what the optimizer was made for."""


# A sync lives as long as its model.
_syncs: WeakKeyDictionary[Any, NnxRounds] = WeakKeyDictionary()


def train_locally(strategy: Rounds, model: Any, optimizer: Any) -> NnxRounds:
    nodes = list(nnx.iter_graph(model))  # each once
    weights = {"/".join(map(str, path)): v for path, v in nodes if isinstance(v, nnx.Param)}
    statistics = [v for _, v in nodes if isinstance(v, nnx.BatchStat)]
    of_model = NnxWeights(weights, statistics, all_ranks())
    name = all_ranks().numbered("hvkit.jax")
    sync = NnxRounds(strategy, of_model, name, partial(RunningExchanges, _start))
    sync.counted = CountedOptimizer(optimizer, model, of_model)
    sync.watch(sync.counted, lambda: False)
    _syncs[model] = sync
    if next_batch not in batches.before_local_batch:
        batches.before_local_batch.append(next_batch)
    return sync


def next_batch() -> None:
    """Before a step of models with local weights: end rounds; a collective."""
    for sync in list(_syncs.values()):
        if not sync.shows_agreed:
            sync.counted.next_batch()
