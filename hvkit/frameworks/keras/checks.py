"""Checks that all ranks hold the same weights, and that they do different work.

Compared are weights that a layer made trainable, also while they are frozen, the state of
optimizers, and what layers have adapted to. Left out is what may differ between ranks: the
statistics of layers, the states of random generators, and gradients that an optimizer is still
accumulating.

On TensorFlow, ``Checks`` compares before the first update, after 1, 2, 4, 8, ... updates or every
``check_every``: the ranks exchange fingerprints before they average gradients, in eager code and in
``tf.function`` graphs. NumPy computes the fingerprints in both, in a branch of the graph that other
steps do not take. ``fit`` also compares at the end of each epoch, optimizers included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, WeakSet

import keras
import numpy as np

from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.backends import ON_TENSORFLOW, backend_variable, outside_graphs
from hvkit.frameworks.keras.divided_state import ids_of_slots
from hvkit.frameworks.keras.initial_state import compared_in_adapted
from hvkit.frameworks.keras.optimizers import inner_optimizer
from hvkit.frameworks.keras.refusals import is_distributed, stays_the_same, weights_of_distributed
from hvkit.runtime import Group
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import WIDTH, Compared, Rows

if ON_TENSORFLOW:
    import tensorflow as tf

    from hvkit.frameworks.keras.tensorflow.wire import (
        Wire,
        graph_counter,
        nothing,
        raise_unless_empty,
        values_of,
    )


# The distance from 1 to the next number.
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def compared_in(compared: Any) -> tuple[list[Compared], list[Rows]]:
    """What must be equal on all ranks; of another model, what it shares with a distributed one."""
    adapted: list[Compared] = []
    rows: list[Rows] = []
    if isinstance(compared, keras.Model):
        shared = weights_of_distributed()
        variables = [v for v in made_trainable(compared) if id(v) in shared]
        if is_distributed(compared):
            adapted, rows = compared_in_adapted(compared)
    elif not stays_the_same(inner_optimizer(compared)):
        variables = []
    else:
        local = {id(v) for v in _accumulators(compared)} | ids_of_slots([compared])
        variables = [v for v in compared.variables if id(v) not in local]
    with outside_graphs():
        rows = [*(fingerprints.fingerprint(v.numpy()) for v in variables), *rows]
        return [*labels_of(variables), *adapted], rows


def require_same_weights(
    call: str, model: keras.Model, optimizers: Sequence[Any], group: Group
) -> None:
    found = [compared_in(each) for each in (model, *optimizers)]
    compared = [each for labels, _ in found for each in labels]
    rows = [row for _, fingerprinted in found for row in fingerprinted]
    fingerprints.require_same(call, compared, rows, group)


def require_same(call: str, labels: Sequence[str], variables: Sequence[Any], group: Group) -> bool:
    """``require_same_weights`` of variables; return whether they are the same bit for bit."""
    compared = [Compared(each, unit(v)) for each, v in zip(labels, variables, strict=True)]
    rows = [fingerprints.fingerprint(v.numpy()) for v in variables]
    return fingerprints.require_same(call, compared, rows, group)


def made_trainable(model: Any) -> list[Any]:
    """The model's weights, without the state that layers keep for themselves; each once."""
    layers = model._flatten_layers()
    return list({id(v): v for each in layers for v in each._trainable_variables}.values())


def _accumulators(optimizer: Any) -> list[Any]:
    """The gradients accumulated since the last update, which are not averaged yet."""
    inner = inner_optimizer(optimizer)
    parts = [inner, *getattr(inner, "optimizers", ())]
    return [v for part in parts for v in getattr(part, "_accumulated_gradients", ())]


def labels_of(variables: Sequence[Any]) -> list[Compared]:
    return [Compared(getattr(v, "path", v.name), unit(v)) for v in variables]


def unit(variable: Any) -> float:
    """The distance from 1 to the next number of the variable's dtype; 0 if it is exact."""
    return _UNITS.get(keras.backend.standardize_dtype(variable.dtype), 0.0)


# More updates than any training takes; twice as many still are an int64.
_NEVER = 2**62

# Models whose weights were compared before their first update.
_updated: WeakSet[Any] = WeakSet()


class Checks:
    """Compares the ranks at updates of one optimizer, by default after 1, 2, 4, 8, ... of them."""

    def __init__(
        self,
        name: str,
        model: keras.Model,
        group: Group,
        every: int | None = None,
        *,
        first_only: bool = False,
    ) -> None:
        self._group = group
        self._wire = Wire("checks", group)
        self._name = name
        self._model = model
        self._every = _NEVER if first_only else every
        self._compared: list[Compared] = []
        self._done = graph_counter(dtype=tf.int64)
        self._next = graph_counter(dtype=tf.int64)
        self._gradients_pending = graph_counter(True)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Compare in some updates; a collective, once every rank has reached the update.

        Returns the operations that must run before the update, in a graph. The comparison of
        gradients is not among them, so that averaging can begin while backward computes the last
        ones. In a graph the error is an InvalidArgumentError, which ``fit`` translates.
        """
        dense = [values_of(g) for g in gradients if g is not None]
        tf.cond(self._gradients_pending, lambda: self._compare_gradients(dense), nothing)
        compares = self._done >= self._next
        compared = tf.cond(compares, lambda: self._compare_weights(variables), nothing)
        with tf.control_dependencies([compared]):
            return [self._done.assign_add(1)]

    def skip_weights(self) -> None:
        """Never compare weights: those of ranks that resume in a round differ."""
        self._next.assign(_NEVER)

    def _compare_weights(self, variables: Sequence[Any]) -> tf.Tensor:
        # Passed as inputs, so that TensorFlow reads them between the last update and this one.
        values = [backend_variable(v).value() for v in variables]
        labels = labels_of(variables)
        # TensorFlow never frees a graph's NumPy functions: they must not keep the model.
        rows_of: Callable[[], Any] = WeakMethod(self._fingerprint)
        judge: Callable[[], Any] = WeakMethod(self._judge)
        rows = _in_numpy(lambda *arrays: rows_of()(labels, arrays), values, tf.int64, [None, WIDTH])
        gathered = self._of_all_ranks(rows, "weights")
        text = _in_numpy(lambda rows: judge()(rows), [gathered], tf.string, [])
        with tf.control_dependencies([raise_unless_empty(text, RanksDisagreeError, self._group)]):
            planned = self._next.assign(self._done + (self._every or tf.maximum(self._done, 1)))
        with tf.control_dependencies([planned]):
            return nothing()

    def _fingerprint(self, labels: list[Compared], arrays: Sequence[Any]) -> Rows:
        # Nothing writes to them meanwhile.
        frozen = [v for v in made_trainable(self._model) if not v.trainable]
        adapted, rows = compared_in_adapted(self._model)
        self._compared = [*labels, *labels_of(frozen), *adapted]
        return np.array(
            [*map(fingerprints.fingerprint, [*arrays, *(v.numpy() for v in frozen)]), *rows]
        )

    def _judge(self, gathered: Rows) -> bytes:
        rows = gathered.reshape(self._wire.size, -1, WIDTH)
        exact = self._model not in _updated
        text = fingerprints.judge(rows, self._compared, exact, self._group)
        _updated.add(self._model)
        return text.encode()

    def _compare_gradients(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        def hashed(*arrays: Any) -> Rows:
            return fingerprints.of_gradients(list(map(fingerprints.fingerprint, arrays)))[None]

        local_rows = _in_numpy(hashed, gradients, tf.int64, [1, 2])
        gathered = self._of_all_ranks(local_rows, "work")
        group = self._group  # the function must not keep this object
        done = _in_numpy(
            lambda rows: fingerprints.warn_of_equal_work(rows, group), [gathered], tf.bool, []
        )
        return self._gradients_pending.assign(tf.logical_not(done))

    def _of_all_ranks(self, rows: tf.Tensor, what: str) -> tf.Tensor:
        with tf.device("CPU:0"):
            return self._wire.gather(rows, f"{self._name}.check.{what}")


def _in_numpy(
    function: Callable[..., Any], inputs: Sequence[Any], dtype: tf.DType, shape: list[int | None]
) -> tf.Tensor:
    """The result of a function of NumPy arrays, in eager code and in graphs."""
    result = tf.numpy_function(function, inputs, dtype)
    if not tf.executing_eagerly():
        result.set_shape(shape)
    return result
