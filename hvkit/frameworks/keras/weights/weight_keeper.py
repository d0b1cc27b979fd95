"""The weights of a model whose ranks train alone: as vectors, and around each optimizer's updates.

An update is ``optimizer.apply``, which ``fit``, ``apply_gradients`` and custom loops call, eagerly
and inside graphs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvkit.communication import collectives
from hvkit.communication.group import everyone
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.batch_norm import average_statistics
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait, widened
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.comparisons import require_same
from hvkit.frameworks.keras.graph_refusals import refuse_tf_distribute, refuse_xla
from hvkit.frameworks.keras.optimizers import inner_optimizer
from hvkit.frameworks.keras.refusals import remember_updated
from hvkit.sync.chunking import chunks
from hvkit.sync.fingerprints import first_unlike
from hvkit.sync.shown_weights import AgreedView
from hvkit.watch.calls import waiting_for_all_ranks

Array = NDArray[Any]

STEP = "optimizer.apply()"
"""The user's call that trains."""

# What surrounds the updates of an optimizer, not of one that scales the loss.
_around: WeakKeyDictionary[Any, ref[Updates]] = WeakKeyDictionary()


class WeightKeeper(AgreedView):
    """What exchanges the weights of one model after its optimizers' updates.

    Args:
        model: a distributed one.
        name: the same on every rank, and no other keeper's.
        with_statistics: whether to average the statistics of batch-norm layers with the weights.
    """

    alone = True

    def __init__(self, model: keras.Model, name: str, with_statistics: bool) -> None:
        super().__init__()
        # Weak: hvkit keeps this object as long as the model.
        self._model = ref(model)
        self._name = name
        self._wire = Wire("weights")
        # What is shown to callbacks, in the order of ``_values``.
        self._for_callbacks: list[tuple[Any, Any]] = []
        self._statistics = GraphWait(f"{name}.statistics") if with_statistics else None

    @abstractmethod
    def rebase(self, point: str = "fit") -> None:
        """Begin with weights that the script has set, where no round has begun; a collective.

        Called when an epoch of ``fit`` begins.

        Args:
            point: the name of the call that the user made.
        """

    def show_callbacks(self) -> None:
        """Show the agreed weights to callbacks, which may set others; a collective."""
        self.show()
        self._for_callbacks = self._values()

    def keep_what_callbacks_set(self) -> None:
        """Let weights that callbacks have set replace this rank's own; a collective.

        Raises:
            RanksDisagreeError: callbacks have set other weights on some ranks.
        """
        if self._own is None or not self._for_callbacks:
            return
        shown = self._for_callbacks
        labels = self._labels([variable for variable, _ in shown])
        given = [i for i, (v, agreed) in enumerate(shown) if not _same(v.numpy(), agreed)]
        if (unlike := first_unlike(collectives.gather("fit", given))) is not None:
            i, by, not_by = unlike
            raise RanksDisagreeError(
                f"callbacks have set {labels[i]} at the end of an epoch on rank {by} but not on "
                f"rank {not_by}: set the same weights on every rank"
            )
        self._make_same("fit", [shown[i][0] for i in given])
        for i in given:
            variable, agreed = shown[i]
            chosen = variable.numpy()
            self._own[i] = variable, self._replaced(variable, self._own[i][1], agreed, chosen)
            shown[i] = variable, chosen

    @abstractmethod
    def _replaced(self, variable: tf.Variable, own: Array, agreed: Array, chosen: Array) -> Array:
        """This rank's value of a variable, which callbacks have set from agreed to chosen."""

    def put_back(self) -> None:
        """Hold this rank's own weights again."""
        self._for_callbacks = []
        super().put_back()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Hold this rank's own weights for a while, inside ``settled``."""
        self.keep_what_callbacks_set()
        with super().unsettled():
            yield

    def _make_same(self, point: str, variables: Sequence[tf.Variable]) -> None:
        """Let ranks hold the same values where they differ by rounding; a collective.

        Args:
            point: the name of the call that the user made.
            variables: the same ones on every rank.

        Raises:
            RanksDisagreeError: they differ by more.
        """
        labels = [f"{label} set by the script or a callback," for label in self._labels(variables)]
        if not variables or require_same(point, labels, variables):
            return
        for n, together in enumerate(pieces(variables)):
            own = tf.concat([flat_values(v) for v in together], axis=0)
            with waiting_for_all_ranks():
                mean = self._wire.mean(own, f"{self._name}.same.{n}")
            for v, piece in zip(together, split(mean, together), strict=True):
                v.assign(shaped(piece, v))

    @abstractmethod
    def end_rounds(self) -> None:
        """Have all ranks hold the same weights, as at the end of training; a collective."""

    def _average_statistics(self) -> None:
        """Average the statistics of batch-norm layers over ranks; a collective."""
        if self._statistics and (model := self._model()) is not None:
            average_statistics(model, self._statistics, everyone())

    def _weights(self) -> list[tf.Variable]:
        model = self._model()
        return [] if model is None else [backend_variable(w) for w in model.weights]

    def require_same_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Raise on every rank unless an optimizer updates the same variables on all; a collective.

        Raises:
            RanksDisagreeError: names the first one that differs, and the ranks.
        """
        labels = zip(self._labels(variables), variables, strict=True)
        facts = [f"{label} of shape {tuple(v.shape)}" for label, v in labels]
        advice = "update the same variables on every rank"
        collectives.require_equal("list of variables to update", facts, advice, STEP)

    @abstractmethod
    def _updated(self) -> list[tf.Variable]:
        """What the optimizers update, also beside the model's weights."""

    def _labels(self, variables: Sequence[tf.Variable]) -> list[str]:
        """Names for messages. Not paths: Keras numbers layers, and a rank may have made more."""
        weights = () if (model := self._model()) is None else model.weights
        names = {id(backend_variable(w)): f"weight {i}, {w.name}," for i, w in enumerate(weights)}
        return [names.get(id(v), "a variable") for v in variables]

    def _every_variable(self) -> list[tf.Variable]:
        """The model's weights, and variables that optimizers update beside them; each once."""
        return list({id(v): v for v in (*self._weights(), *self._updated())}.values())

    def _values(self) -> list[tuple[Any, Any]]:
        return [(variable, variable.numpy()) for variable in self._every_variable()]

    def _set_values(self, values: list[tuple[Any, Any]]) -> None:
        for weight, value in values:
            weight.assign(value)


class Updates(ABC):
    """What runs around the updates of one optimizer, whose ``apply`` keeps this object.

    A ``LossScaleOptimizer`` around it skips an update if the gradients overflow; this runs around
    skipped updates, too.

    Args:
        keeper: of the model.
        optimizer: one that updates variables, not one that scales the loss.
        checks: what the ranks compare before their first update.
        before_update: called with the variables at the start of each update.
    """

    def __init__(
        self,
        keeper: WeightKeeper,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self.checks = checks
        self._keeper = keeper
        self._before_update = before_update
        self._updating = False
        apply = optimizer.apply

        # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply_within(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is None and optimizer.built:
                variables, given = optimizer._trainable_variables, None
            else:
                variables = given = trainable_variables
            self.around(optimizer, lambda: apply(grads, given), grads, variables)

        optimizer.apply = apply_within
        _around[optimizer] = ref(self)
        _include_skipped_updates()

    def around(
        self, optimizer: Any, update: Callable[[], None], grads: Sequence[Any], variables: Any
    ) -> None:
        """Call ``update``, and what belongs around it.

        Args:
            optimizer: the one that updates, or the ``LossScaleOptimizer`` around it.
            update: applies the gradients.
            grads: ``tf.Tensor``, ``tf.IndexedSlices`` or None.
            variables: that the update will change; None if the optimizer does not know them yet.
        """
        if self._updating or not grads or variables is None:
            update()
            return
        refuse_xla("optimizer.apply")
        refuse_tf_distribute()
        self._keeper.refuse_step()
        remember_updated(variables)
        self._before_update(variables)
        if not optimizer.built:
            # Not after the comparison: TensorFlow then could not initialise what this makes before
            # it runs the graph, and would run the one in which no weights were synchronised.
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
        weights = [backend_variable(v) for v in variables]
        with tf.control_dependencies(self._before(grads, variables, weights)):
            self._updating = True
            try:
                update()
            finally:
                self._updating = False
        self._after(weights)

    @abstractmethod
    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        """Compare the ranks before their first update; return the operations that this takes.

        Args:
            grads: as in ``around``.
            variables: as in ``around``.
            weights: the same as TensorFlow's own.
        """

    @abstractmethod
    def _after(self, weights: list[tf.Variable]) -> None:
        """Exchange weights if it is time."""


def _same(array: Array, other: Array) -> bool:
    """Whether two arrays of one shape and dtype have the same bits."""
    return np.array_equal(array.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def pieces(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Variables of one dtype, some at a time to bound the memory for copies."""
    kinds: dict[tf.DType, list[tf.Variable]] = {}
    for v in variables:
        kinds.setdefault(wide(v.dtype), []).append(v)
    for kind in kinds.values():
        for run in chunks([int(np.prod(v.shape)) * v.dtype.size for v in kind]):
            yield [kind[at] for at in run]


def ids(variables: Sequence[tf.Variable]) -> list[int]:
    return [id(v) for v in variables]


def split(vector: tf.Tensor, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """A vector, cut into one for each variable."""
    pieces: list[tf.Tensor] = tf.split(vector, [int(np.prod(v.shape)) for v in variables])
    return pieces


def shaped(vector: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    return tf.cast(tf.reshape(vector, variable.shape), variable.dtype)


def wide(dtype: tf.DType) -> tf.DType:
    """The dtype in which a variable's values travel."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def flat_values(variable: tf.Variable) -> tf.Tensor:
    """The values as a vector, in the dtype in which they travel."""
    return widened(tf.reshape(variable.value(), [-1]))


def in_numpy(
    method: Callable[..., list[Array]],
    keys: Sequence[int],
    inputs: Sequence[tf.Tensor],
    dtypes: list[tf.DType],
) -> list[Any]:
    """The results of a method on NumPy arrays, in eager code and in graphs.

    Graphs call such methods one after another, in the order of the program: with two optimizers in
    a graph, TensorFlow would otherwise run their collectives at the same time.

    Args:
        method: of ``keys`` and a list of arrays. A graph does not keep its object.
        keys: ids of variables.
        inputs: the arrays.
        dtypes: of the results.
    """
    weak = WeakMethod(method)

    def call(*arrays: Array) -> list[Array]:
        function = weak()
        assert function is not None
        return function(keys, [np.asarray(each) for each in arrays])

    if tf.executing_eagerly():
        return call(*(each.numpy() for each in inputs))
    # TensorFlow keeps the order of operations that use the same variable.
    with tf.control_dependencies([_turn().assign_add(1, read_value=False)]):
        results: list[Any] = tf.numpy_function(call, inputs, dtypes)
    with tf.control_dependencies(results):
        _turn().assign_add(1, read_value=False)
    return results


@functools.cache
def _turn() -> tf.Variable:
    """Counts the methods that graphs have called and left."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)


@functools.cache
def _include_skipped_updates() -> None:
    """Surround the whole update of each ``LossScaleOptimizer``, which may skip that inside.

    This changes the class, because ``compile`` makes the instance later.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    apply = scaler.apply

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_within(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = inner_optimizer(self)
        reference = _around.get(inner)
        updates = reference() if reference else None
        if updates is None:
            apply(self, grads, trainable_variables)
            return
        grads = list(grads)
        variables = trainable_variables
        if variables is None and inner.built:
            variables = inner._trainable_variables
        updates.around(self, lambda: apply(self, grads, trainable_variables), grads, variables)

    scaler.apply = apply_within
