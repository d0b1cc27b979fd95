"""The variables of a Keras model as vectors, in eager code and in functions that graphs call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvkit.communication import collectives
from hvkit.communication.exchanges import Mean
from hvkit.compression.compression import Shape
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.buffers import average_statistics
from hvkit.frameworks.keras.checks import made_trainable, require_same, unit
from hvkit.frameworks.keras.tensorflow.wire import GraphWait, NamedCollectives, Wire, widened
from hvkit.runtime import Group
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared
from hvkit.sync.local_weights import Weights
from hvkit.watch.calls import waiting_for_all_ranks

Array = NDArray[Any]

# The name of an array that belongs to one variable.
_NUMBERED = re.compile(r"(.*[.-])(\d+)")

STEP = "optimizer.apply()"
"""The user's call that trains."""


class Variables(Weights):
    """Variables that ranks agree on, by number.

    Vectors are NumPy arrays, on which arithmetic costs less than on eager tensors. In a function
    that a graph calls, ``given`` holds the variables' values, since the graph may read and write
    the variables themselves at any moment.

    A weight gets its number when an optimizer first updates it; others get theirs when the ranks
    first show the agreed weights.
    """

    step_call = STEP
    noun = "variables"

    def __init__(self, model: keras.Model, name: str, with_statistics: bool, group: Group) -> None:
        self.name = name
        self.group = group
        # Weak: hvkit keeps this object as long as the model.
        self._model = ref(model)
        self._statistics: GraphWait | None = None
        if with_statistics:
            self._statistics = GraphWait(f"{name}.statistics", group=group)
        self.in_order: list[tf.Variable] = []
        self._lengths: list[int] = []
        self._collectives = NamedCollectives(Wire("weights", group))
        self._number: dict[int, int] = {}
        self._given: dict[int, Array] = {}
        self._in_function = False

    def add(self, weights: Iterable[tf.Variable]) -> None:
        for v in weights:
            if id(v) not in self._number:
                self._number[id(v)] = len(self.in_order)
                self.in_order.append(v)
                self._lengths.append(int(np.prod(v.shape)))

    def numbers(self, variables: Iterable[tf.Variable]) -> list[int]:
        return [self._number[id(v)] for v in variables]

    @contextmanager
    def given(
        self, groups: Sequence[list[int]], vectors: Sequence[Array]
    ) -> Iterator[Callable[[], list[Array]]]:
        """Set values in a function that a graph calls; yield one that returns new vectors."""
        for numbers, vector in zip(groups, vectors, strict=True):
            self._given.update(zip(numbers, self.split(vector, numbers), strict=True))
        self._in_function = True
        try:
            yield lambda: [self.join([self._given[i] for i in numbers]) for numbers in groups]
        finally:
            self._in_function = False
            self._given.clear()

    def joined(self, numbers: Sequence[int]) -> tf.Tensor:
        return tf.concat([flat_values(self.in_order[i]) for i in numbers], axis=0)

    def assign_joined(self, numbers: Sequence[int], vector: tf.Tensor) -> None:
        pieces = tf.split(vector, [self._lengths[i] for i in numbers])
        for i, piece in zip(numbers, pieces, strict=True):
            self.in_order[i].assign(shaped(piece, self.in_order[i]))

    def __contains__(self, weight: Any) -> bool:
        return id(weight) in self._number

    def of_model(self) -> list[tf.Variable]:
        """The model's weights, as long as it is there; also those that no optimizer updates."""
        model = self._model()
        return [] if model is None else [backend_variable(w) for w in model.weights]

    def by_position(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by a variable's position in the model, without those of the script's variables.

        Checkpoints keep these: numbers depend on the order in which variables were trained.
        """
        position = {id(weight): i for i, weight in enumerate(self.of_model())}
        found = {}
        for name, array in arrays.items():
            if match := _NUMBERED.fullmatch(name):
                variable = self.in_order[int(match[2])]
                if id(variable) in position:
                    found[f"{match[1]}{position[id(variable)]}"] = array
        return found

    def by_number(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        weights = self.of_model()
        found = {}
        for name, array in arrays.items():
            if match := _NUMBERED.fullmatch(name):
                variable = weights[int(match[2])]
                self.add([variable])
                found[f"{match[1]}{self._number[id(variable)]}"] = array
        return found

    def label(self, i: int) -> str:
        return self.labels([self.in_order[i]])[0]

    def labels(self, variables: Sequence[tf.Variable]) -> list[str]:
        """Names for messages. Not paths: Keras numbers layers, and a rank may have made more."""
        weights = () if (model := self._model()) is None else model.weights
        names = {id(backend_variable(w)): f"weight {i}, {w.name}," for i, w in enumerate(weights)}
        return [names.get(id(v), "a variable") for v in variables]

    def shape(self, i: int) -> Shape:
        return tuple(self.in_order[i].shape)

    def vector_dtype(self, i: int) -> tf.DType | None:
        dtype = self.in_order[i].dtype
        return wide(dtype) if dtype.is_floating or dtype.is_complex else None

    def nbytes(self, i: int) -> int:
        return self._lengths[i] * int(self.in_order[i].dtype.size)

    def read(self, i: int) -> Array:
        if i in self._given:
            return self._given[i]  # which nothing changes in place
        values: Array = flat_values(self.in_order[i]).numpy()
        return values

    def write(self, i: int, vector: Array) -> None:
        if i in self._given:
            self._given[i] = self._rounded(i, vector)
        else:
            # A copy: the variable may change its memory in place.
            self.in_order[i].assign(shaped(tf.constant(vector), self.in_order[i]))

    def equals(self, i: int, vector: Array) -> bool:
        return bool((self._rounded(i, vector) == self.read(i)).all())

    def _rounded(self, i: int, vector: Array) -> Array:
        dtype = self.in_order[i].dtype.as_numpy_dtype
        return vector if vector.dtype == dtype else vector.astype(dtype).astype(vector.dtype)

    def mean(self, vector: Array, name: str) -> Array:
        with waiting_for_all_ranks(self.group.process_set):
            mean: Array = self._collectives.exchange(Mean(vector), name)
        return mean

    def values(self) -> list[tuple[Any, Any]]:
        self.add(self.of_model())
        return [(variable, variable.numpy()) for variable in self.in_order]

    def set_values(self, values: list[tuple[Any, Any]]) -> None:
        for variable, value in values:
            variable.assign(value)

    def average_statistics(self, name: str = "", *, keep: bool = True) -> None:
        """As in ``Weights``; inside ``given`` it is left to the graph, after its forward pass."""
        if not self._in_function and self._statistics and (model := self._model()) is not None:
            average_statistics(model, self._statistics, self.group)

    def require_equal(self) -> None:
        model = self._model()
        made = [] if model is None else [backend_variable(v) for v in made_trainable(model)]
        # Not the state of layers, such as statistics, which differ between ranks.
        state = {id(v) for v in self.of_model()} - {id(v) for v in made}
        further = [v for v in self.in_order if id(v) not in state]
        compared = list({id(v): v for v in (*made, *further)}.values())
        require_same(STEP, self.labels(compared), compared, self.group)

    def require_same_list(self, variables: Sequence[tf.Variable]) -> None:
        """Raise on every rank unless all update the same variables; a collective."""
        labels = zip(self.labels(variables), variables, strict=True)
        facts = [f"{label} of shape {tuple(v.shape)}" for label, v in labels]
        advice = "update the same variables on every rank"
        what = "list of variables to update"
        collectives.require_equal(what, facts, advice, STEP, self.group)

    def require_close(self, call: str, note: str, vectors: Mapping[int, Array]) -> bool:
        labels = self.labels([self.in_order[i] for i in vectors])
        compared = [
            Compared(f"{label.removesuffix(',')}{note}", unit(self.in_order[i]))
            for label, i in zip(labels, vectors, strict=True)
        ]
        rows = [fingerprints.fingerprint(each) for each in vectors.values()]
        return fingerprints.require_same(call, compared, rows, self.group)


def shaped(vector: Any, variable: tf.Variable) -> tf.Tensor:
    return tf.cast(tf.reshape(vector, variable.shape), variable.dtype)


def wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def flat_values(variable: tf.Variable) -> tf.Tensor:
    return widened(tf.reshape(variable.value(), [-1]))
