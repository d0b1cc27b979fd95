"""Code around each update of the optimizers of a model whose ranks exchange weights.

An update is ``optimizer.apply``, which ``fit``, ``apply_gradients`` and custom loops call, eagerly
and inside graphs. Graphs call functions of the values of variables that are updated together.
"""

from __future__ import annotations

import functools
import json
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any
from weakref import WeakMethod, finalize, ref

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import Variable as KerasVariable  # keras.Variable of 3.5 is a subclass

from hvkit import threads
from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.backends import backend_variable, not_converted
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.optimizers import (
    calls_of_apply,
    inner_optimizer,
    parts_of,
    variables_of,
)
from hvkit.frameworks.keras.tensorflow.weight_vectors import STEP, Array, Variables
from hvkit.frameworks.keras.tensorflow.wire import (
    GraphWait,
    graph_counter,
    nothing,
    refuse_tf_distribute,
    refuse_xla,
)
from hvkit.sync.local_weights import LocalWeightsSync
from hvkit.watch.rank_errors import mark_as_shown_by, raised_in_graph

# An attribute of an optimizer that does not scale the loss.
_UPDATES = "_hvkit_updates"


class UpdatesSync(LocalWeightsSync):
    """Exchanges the weights of a model, by variables that are updated together, as ``updated``."""

    weights: Variables

    def __init__(self, *args: Any) -> None:  # of the sync of a strategy
        super().__init__(*args)
        self.updated: list[UpdatedVariables] = []
        # Weak: the optimizers keep them. Their variables count also when they are gone.
        self._updates: list[ref[Updates]] = []

    def count_updates(self, updates: Updates) -> int:
        self._updates.append(ref(updates))
        return len(self._updates) - 1

    def updated_together(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables:
        """The object for variables that an optimizer updates together; perhaps a new one."""
        return self._known(updates, variables) or self._new(updates, variables)

    def _known(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables | None:
        ids = {id(v) for v in variables}
        known = self._of_optimizer(updates.number)
        return next((each for each in known if ids == {id(v) for v in each.variables}), None)

    def _of_optimizer(self, number: int) -> list[UpdatedVariables]:
        return [each for each in self.updated if each.optimizer_number == number]

    def _new(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables:
        self.weights.add(variables)
        new = UpdatedVariables(variables, self.weights, updates, len(self.updated))
        self.updated.append(new)
        self._add_optimizer(new)
        return new

    @abstractmethod
    def before_update(
        self, updated: UpdatedVariables, compare: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        """Begin, and ``compare`` the ranks; return the operations that this takes."""

    @abstractmethod
    def after_update(self, updates: Updates, updated: UpdatedVariables) -> None:
        """Exchange weights at the end of a step or round."""


class Updates:
    """Code around the updates of one optimizer, which keeps this object.

    A ``LossScaleOptimizer`` around it skips an update if the gradients overflow; this runs around
    skipped updates, too. ``calls`` are those of ``apply`` so far, which syncs count, for graphs;
    a step has ``per_step``, as the optimizer may accumulate gradients.
    """

    def __init__(
        self,
        sync: UpdatesSync,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self.checks = checks
        self._sync = sync
        self.optimizer = ref(optimizer)
        self.per_step: int = optimizer.gradient_accumulation_steps or 1
        self._before_update = before_update
        self._updating = False
        self.calls = graph_counter(dtype=tf.int64)
        self.number = sync.count_updates(self)
        apply = optimizer.apply

        # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
        @not_converted
        def apply_within(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            self.around(optimizer, apply, grads, trainable_variables)

        optimizer.apply = apply_within
        vars(optimizer)[_UPDATES] = self
        _include_skipped_updates()

    def count_from_optimizer(self) -> None:
        """Go on where the optimizer is, between two steps or while it accumulates gradients."""
        if (optimizer := self.optimizer()) is not None:
            self.calls.assign(calls_of_apply(optimizer))

    def around(
        self,
        optimizer: Any,
        apply: Callable[[Sequence[Any], Any], None],
        grads: Sequence[Any],
        trainable_variables: Any,
    ) -> None:
        """Surround an update by this optimizer, or by one that scales its loss."""
        grads, variables = (
            list(grads),
            variables_of(inner_optimizer(optimizer), trainable_variables),
        )
        given = None if trainable_variables is None else variables  # Keras checks the number
        if self._updating or not grads or variables is None:
            apply(grads, given)
            return
        refuse_xla("optimizer.apply")
        refuse_tf_distribute()
        self._sync.refuse_step()
        self._before_update(variables)
        if not optimizer.built:
            # Not after the comparison: TensorFlow could not initialise the new variables before it
            # runs the graph, and would run the graph in which no weights were synchronised.
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
        updated = self._sync.updated_together(self, [backend_variable(v) for v in variables])
        begun = self._sync.before_update(updated, lambda: self.checks(grads, variables))
        with tf.control_dependencies(begun):
            self._updating = True
            try:
                apply(grads, given)
            finally:
                self._updating = False
        self._sync.after_update(self, updated)


@functools.cache
def _include_skipped_updates() -> None:
    """Surround updates of ``LossScaleOptimizer``, whose instance ``compile`` makes later."""
    scaler = keras.optimizers.LossScaleOptimizer
    apply = scaler.apply

    @not_converted
    def apply_within(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        updates: Updates | None = vars(inner_optimizer(self)).get(_UPDATES)
        if updates is None:
            apply(self, grads, trainable_variables)
        else:
            updates.around(self, functools.partial(apply, self), grads, trainable_variables)

    scaler.apply = apply_within


# Bytes.
_LARGE = 1 << 17

Method = Callable[[int], None]
"""A method of a sync that gets the number of an ``UpdatedVariables``."""


class UpdatedVariables:
    """Variables that an optimizer updates together; an optimizer for ``hvkit.sync``."""

    call = STEP

    def __init__(
        self,
        variables: list[tf.Variable],
        of: Variables,
        updates: Updates,
        number: int,
    ) -> None:
        self.variables = variables
        self.of = of
        self.numbers = of.numbers(variables)
        self.optimizer_number = updates.number
        self.number = number
        self.rounds = 0
        # Graphs pass on each group in one vector.
        self._vectors = [
            run for numbers in of.by_dtype(self.numbers) for run in _in_groups(of, numbers)
        ]
        self._wait = GraphWait(f"{of.name}.updated.{number}", group=of.group)
        # Not ``updates``, which the optimizer keeps.
        self._calls, self._per_step = updates.calls, updates.per_step
        self._optimizer = updates.optimizer
        self._changed: Future[list[Array]]
        self.counted = graph_counter(dtype=tf.int64)
        self.begun = graph_counter(False)

    @functools.cached_property
    def _queue(self) -> Any:
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.queue.FIFOQueue(10, [tf.bool], [()])

    @functools.cached_property
    def _round_ends(self) -> SimpleQueue[Callable[[], None] | None]:
        """Functions for a thread: a new one for each round would cost TensorFlow a millisecond."""
        functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threads.start("hvkit-round", _call_all, functions)
        finalize(self, functions.put, None)
        return functions

    def begin_by(self, method: Method) -> tf.Tensor:
        """Call a method that reads the variables unless ``begun``; return what to wait for."""
        weak = WeakMethod(method)

        def begin() -> tf.Tensor:
            if tf.executing_eagerly():
                method(self.number)
                return self.begun.assign(True)
            done = tf.TensorSpec([], tf.bool)
            (begun,) = _in_turn(lambda: _in_numpy(self._read, weak, self._joined(), [done]))
            return self.begun.assign(begun)

        return tf.cond(self.begun, nothing, begin)

    def change_by(self, method: Method, *, in_thread: bool) -> tf.Tensor:
        """Call a method that reads and sets the variables; a branch of ``tf.cond``.

        In a graph it gets and sets copies. With ``in_thread`` the graph has it called in a thread
        and waits in a queue, which takes none of TensorFlow's threads, as a function of Python does
        that waits for other ranks. There may be only one.
        """
        if tf.executing_eagerly():
            method(self.number)
            return nothing()
        weak = WeakMethod(method)

        def changed() -> list[tf.Tensor]:
            vectors = self._joined()
            specs = [tf.TensorSpec(v.shape, v.dtype) for v in vectors]
            if not in_thread:
                return _in_numpy(self._set, weak, vectors, specs)
            (begun,) = _in_numpy(self._start, weak, vectors, [tf.TensorSpec([], tf.bool)])
            with tf.control_dependencies([self._wait.around(begun, self._dequeue)]):
                return _in_numpy(self._result, None, [], specs)

        for numbers, vector in zip(self._vectors, _in_turn(changed), strict=True):
            self.of.assign_joined(numbers, vector)
        return nothing()

    def _joined(self) -> list[tf.Tensor]:
        return [self.of.joined(numbers) for numbers in self._vectors]

    def _read(self, method: WeakMethod[Method], vectors: Sequence[Array]) -> list[Array]:
        self._set(method, vectors)
        return [np.array(True)]

    def _set(self, method: WeakMethod[Method], vectors: Sequence[Array]) -> list[Array]:
        bound = method()
        assert bound is not None, "a graph trains a model that is gone"
        with self.of.given(self._vectors, vectors) as changed:
            bound(self.number)
            return changed()

    def _start(self, method: WeakMethod[Method], vectors: Sequence[Array]) -> list[Array]:
        self._changed = Future()
        self._round_ends.put(functools.partial(self._run, method, vectors))
        return [np.array(True)]

    def _run(self, method: WeakMethod[Method], vectors: Sequence[Array]) -> None:
        try:
            self._changed.set_result(self._set(method, vectors))
        except BaseException as error:
            self._changed.set_exception(error)
        self._queue.enqueue(True)

    def _dequeue(self, begun: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([begun]), tf.device("CPU:0"):
            return self._queue.dequeue()

    def _result(self, _: None, __: Sequence[Array]) -> list[Array]:
        changed = self._changed
        del self._changed
        return changed.result()

    @property
    def steps(self) -> int:
        return int(self.counted.numpy())

    @steps.setter
    def steps(self, number: int) -> None:
        self.counted.assign(number)

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken since the script began, also with others."""
        return -(-int(self._calls.numpy()) // self._per_step)

    @property
    def taken(self) -> int:
        optimizer = self._optimizer()
        return 0 if optimizer is None else calls_of_apply(optimizer)

    def updates(self) -> set[int]:
        return set(self.numbers)

    trained = updates

    def _rates(self) -> list[str]:
        return [] if (it := self._optimizer()) is None else list(map(_rate, parts_of(it)))

    def checksum_of_rates(self) -> int:
        return zlib.crc32("\n".join(self._rates()).encode())

    def require_same_training(self, call: str) -> None:
        group = self.of.group
        gathered = collectives.gather(call, self._rates(), group)
        for rank, of_rank in zip(group.members, gathered, strict=True):
            for first, other in zip(gathered[0], of_rank, strict=True):
                if first != other:
                    error = RanksDisagreeError(
                        f"the learning rate of an optimizer is {first} on rank {group.first} but "
                        f"{other} on rank {rank}: set the same rate on every rank"
                    )
                    raise mark_as_shown_by(error, group.first)


def _call_all(functions: SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := functions.get()) is not None:
        function()
        del function  # which keeps its object


def _rate(optimizer: Any) -> str:
    """The rate that the script has set, not a schedule's value: skipped updates leave it behind."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return f"{type(rate).__name__}({json.dumps(rate.get_config(), default=repr)})"
    return repr(float(rate)) if isinstance(rate, KerasVariable) else type(rate).__name__


def _in_groups(of: Variables, numbers: list[int]) -> list[list[int]]:
    """Variables of one dtype in groups: to join large ones costs more than to pass them on."""
    small = [i for i in numbers if of.nbytes(i) < _LARGE]
    large = [[i] for i in numbers if of.nbytes(i) >= _LARGE]
    return [small, *large] if small else large


def _in_turn(build: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Call a function that adds functions of NumPy, or collectives, to a graph.

    Graphs run these one after another, in the order of the program: with two optimizers in a graph,
    TensorFlow would otherwise run their collectives at the same time.
    """
    # TensorFlow keeps the order of operations that use the same variable.
    with tf.control_dependencies([_turn().assign_add(1, read_value=False)]):
        results = build()
    with tf.control_dependencies(results):
        _turn().assign_add(1, read_value=False)
    return results


@functools.cache
def _turn() -> tf.Variable:
    return graph_counter(dtype=tf.int64)


def _in_numpy(
    method: Callable[[Any, Sequence[Array]], list[Array]],
    key: Any,
    inputs: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
) -> list[tf.Tensor]:
    """The results of a method on arrays, in a graph, which keeps the arrays and not its object."""
    weak = WeakMethod(method)

    def call(*arrays: Array) -> list[Array]:
        with raised_in_graph():
            bound = weak()
            assert bound is not None, "a graph trains a model that is gone"
            return bound(key, arrays)

    found = tf.numpy_function(call, inputs, [each.dtype for each in results])
    return [tf.ensure_shape(each, spec.shape) for each, spec in zip(found, results, strict=True)]
