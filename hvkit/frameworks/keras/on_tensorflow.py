"""The steps of ``distribute`` for Keras on TensorFlow.

hvkit attaches nearly everything to the instances: to methods of the optimizer, and to the ``call``
of a model that has no weights yet. Their classes stay Keras's, so saved files do not mention hvkit.

An update on TensorFlow is a part of a graph, so it has no hooks as PyTorch's has. Code around it
wraps methods of the optimizer, the outermost first::

    method                       wrapped by                      what it does there
    apply                        tensorflow/averaged_updates     refuses, averages the gradients;
                                 (averaged_apply)                may leave the update out
    or, with local weights:      tensorflow/local_updates        compares ranks, begins a round;
                                 (apply_within)                  ends it, or writes to the server
    apply                        optimizers                      the rate counts as multiplied
                                 (apply_at_multiplied_rate)      until the update ends
    apply                        monitor/keras                   measures the gradients that the
                                 (measured)                      update uses
    build,                       divided_state                   no state for the variables of
    add_variable_from_reference                                  other ranks
    _get_current_learning_rate   optimizers (rate)               multiplies the rate
    _backend_update_step         divided_state (update_own)      updates this rank's variables,
                                                                 sends them to all

``LossScaleOptimizer`` calls the ``apply`` of the optimizer inside it. ``compile`` makes it later,
so hvkit replaces methods of the class: ``check_finite`` and others in ``optimizers``, so that all
ranks skip the updates that one process would, and with local weights ``apply`` in
``tensorflow/local_updates``, so that an update that it skips counts, too.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvkit import runtime
from hvkit.frameworks.keras import buffers, initial_state, refusals
from hvkit.frameworks.keras.backends import backend_variable, have_values
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.divided_state import ids_of_slots, nbytes
from hvkit.frameworks.keras.fit import FitState, combine_results
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.optimizers import calls_of_apply, share_scale, updating
from hvkit.frameworks.keras.port import KerasPort
from hvkit.frameworks.keras.tensorflow import averaged_updates
from hvkit.frameworks.keras.tensorflow.averager import GradientAverager, SampleCounts, sync_of
from hvkit.frameworks.keras.tensorflow.local_updates import Updates
from hvkit.frameworks.keras.tensorflow.local_weights import ServedModel, TensorFlowRoundSync
from hvkit.frameworks.keras.tensorflow.weight_vectors import Variables
from hvkit.frameworks.keras.tensorflow.wire import (
    GraphWait,
    Wire,
    blocked_in_graphs,
    refuse_tf_distribute,
    values_of,
)
from hvkit.host.run_reports import timeline_wanted
from hvkit.runtime import Group
from hvkit.strategies import ParameterServer
from hvkit.strategies.strategy import Averaging, Rounds
from hvkit.sync.port import Options, Record, Sync, warn_of_own_batches
from hvkit.watch.spans import WAITING, mark

_SYNC = "_hvkit_sync"


class KerasOnTensorFlowPort(KerasPort):
    """Implements ``hvkit.sync.port.Port``."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        if runtime.size() > 1:
            for model in models:
                refuse_tf_distribute(model)
        super().__init__(models, optimizers, options)
        self.averagers: list[GradientAverager] = []
        self._samples: SampleCounts | None = None
        self._average_at_end: Callable[[], None] = lambda: None
        self._synchronised: dict[int, Any] = {}
        # Models whose weights no rank has sent yet.
        self._pending = list(models)
        self._optimizers_pending = True

    def _name(self) -> str:
        return self.group.numbered("hvkit")

    def synchronise(self) -> None:
        self._synchronise_batch_norm()
        for model, built in zip(self.models, self._have_weights(), strict=True):
            if built:
                self._synchronise_before_it_computes(model)
            else:
                self._in_first_call(model, self._synchronise_in_first_call)

    def _synchronise_model(self, model: Any) -> None:
        self._synchronise(model.weights)
        self._pending = [each for each in self._pending if each is not model]
        if not self._pending:
            self._synchronise_optimizers()

    def _synchronise_before_it_computes(self, model: Any) -> None:
        layers = initial_state.AdaptedLayers(model)
        self._synchronise_model(model)
        layers.copy_from_first(self.group)

    def _synchronise(self, weights: Sequence[Any]) -> None:
        self._synchronised.update((id(backend_variable(w)), w) for w in weights)
        initial_state.synchronise(weights, self.group)

    def _synchronise_optimizers(self) -> None:
        if self._optimizers_pending:
            self._optimizers_pending = False
            divided = ids_of_slots(self.optimizers)
            trained = self.model.trainable_variables
            initial_state.synchronise_optimizers(self.optimizers, trained, self.group, divided)

    def _synchronise_in_first_call(self, model: Any) -> None:
        self._synchronise_batch_norm()
        if model in self._pending:
            self._synchronise_before_it_computes(model)

    def _synchronise_batch_norm(self) -> None:
        if self.options.batch_norm == "local":
            return
        everything = self.options.batch_norm == "sync"
        if everything or isinstance(self.options.strategy, Averaging):
            gather = buffers.gather_row
            buffers.synchronise_batch_norm(
                self.model, everything=everything, gather=gather, group=self.group
            )
        elif buffers.made_synchronised(self.model):
            warn_of_own_batches("BatchNormalization(synchronized=True)", self.options.strategy)

    def _before_update(self, variables: Sequence[Any]) -> None:
        """Synchronise weights that no call of a model has: of called parts, or of a new layer."""
        refusals.refuse_overwritten(self.options.strategy, variables)
        refusals.remember_updated(variables)
        for model in self._pending:
            if model.weights and have_values(model.weights):
                self._synchronise_model(model)
        new = [v for v in variables if id(backend_variable(v)) not in self._synchronised]
        if new and have_values(new):
            refusals.refuse_left_out(self.models, self.optimizers, new)
            self._synchronise(new)
        if self._optimizers_pending and have_values(variables):
            self._synchronise_optimizers()

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        for model in self.models:
            self._let_update(model)
        local: TensorFlowRoundSync | ServedModel | None = None
        sync: Sync | None = None
        compression = self.options.compression
        self._samples = self._counts()
        if isinstance(strategy := self.options.strategy, Rounds | ParameterServer):
            sync = local = self._local_weights(strategy)
        else:
            assert isinstance(strategy, Averaging)
            for each in self.inner:
                average = self._average(strategy)
                averaged_updates.average_in_apply(
                    each, average, self._before_update, self._nonfinite()
                )
            for each in self.optimizers:
                agree = averaged_updates.finite_on_all(self._name(), self.group)
                share_scale(each, agree, self.group.size, self.models)
            self._divide_state(lambda: TensorFlowSender(self._name(), self.group))
            if (travels := strategy.gradient_compression(compression)) and travels.keeps_state:
                sync = sync_of(self.model, self.averagers, strategy, compression)
            self._average_at_end = self._statistics_average(self._name())
        for model in self.models:  # which keep all that is here by this
            use_counts_of_all_ranks(model, self._samples, trains=local is None)
            ends = self._end_epoch
            state = FitState(self.group, ends, strategy, self.averagers, timeline_callbacks)
            state.sync = local
            if isinstance(local, TensorFlowRoundSync):  # a server gets what the script has set
                state.begin = local.accept_set_weights
            combine_results(model, state)
            vars(model)[_SYNC] = sync
        return self._records(), sync

    def _counts(self) -> SampleCounts:
        accumulates = any(each.gradient_accumulation_steps for each in updating(self.optimizers))
        return SampleCounts(self._name(), self.group, accumulates)

    def _nonfinite(self) -> averaged_updates.NonFinite | None:
        if self.options.on_nonfinite == "ignore":
            return None
        name, statistics = f"{self._name()}.finite", None
        if self.options.on_nonfinite == "skip":
            statistics = buffers.LastStatistics(self.model, self._statistics_average(name))
        return averaged_updates.NonFinite(self.options.on_nonfinite, name, statistics, self.group)

    def _statistics_average(self, name: str) -> Callable[[], None]:
        if self.options.batch_norm != "average":
            return lambda: None
        wait = GraphWait(f"{name}.statistics", group=self.group)
        return functools.partial(buffers.average_statistics, self.model, wait, self.group)

    def _end_epoch(self) -> None:
        """Average statistics after batches that no update has followed yet; compare the ranks."""
        left = any(
            calls_of_apply(each) % (each.gradient_accumulation_steps or 1)
            for each in updating(self.optimizers)
        )
        if left:
            self._average_at_end()
        self._compare()

    def _local_weights(
        self, strategy: Rounds | ParameterServer
    ) -> TensorFlowRoundSync | ServedModel:
        refusals.let_differ([self.model, *self.models], self.inner)
        name = self._name()
        weights = Variables(self.model, name, self.options.batch_norm == "average", self.group)
        sync: TensorFlowRoundSync | ServedModel
        if isinstance(strategy, ParameterServer):
            sync = ServedModel(strategy, weights, name)
        else:
            sync = TensorFlowRoundSync(strategy, weights, name, self.options.compression)
        for each in self.inner:
            checks = Checks(self._name(), self.model, self.group, first_only=True)
            Updates(sync, each, checks, self._before_update)
        return sync

    def _average(self, strategy: Averaging) -> averaged_updates.Average:
        name = self._name()
        checks = Checks(name, self.model, self.group, self.options.check_every)
        average_gradients = GradientAverager(
            name, strategy, self.options.compression, checks, self.group, self._samples
        )
        self.averagers.append(average_gradients)
        average_statistics = self._statistics_average(name)

        def average(*given: Any) -> list[Any]:
            means = average_gradients(*given)
            average_statistics()
            return means

        return average


class TensorFlowSender:
    """Sends the variables that ranks own, in eager code and in graphs; a ``VariableSender``."""

    def __init__(self, name: str, group: Group) -> None:
        self._wait = GraphWait(f"{name}.shares", group=group)
        self._wire = Wire("weights", group)
        with tf.init_scope():
            self._used = tf.Variable(0.0, trainable=False)

    def leave_out(self, gradients: Sequence[Any]) -> None:
        """Use gradients, so that a graph computes their means: other ranks wait for this one."""
        used = [tf.convert_to_tensor(0.0)]
        for each in gradients:
            first = tf.reshape(values_of(each), [-1])[:1]
            used.append(tf.cast(tf.reduce_sum(first), tf.float32))
        self._used.assign(tf.add_n(used))

    def send(self, number: int, piece: list[list[int]], variables: Sequence[tf.Variable]) -> None:
        owned = [_as_bytes(variables[i].value()) for i in piece[self._wire.rank]]
        # A graph computes with constants only once, even if there is nothing in them.
        nothing = _as_bytes(variables[0].value())[:0]
        sizes = [nbytes(variables[i]) for i in itertools.chain(*piece)]

        def gather(sent: tf.Tensor) -> tf.Tensor:
            received = self._wire.gather(sent, f"{self._wait.key}.{number}")
            # Keeps the operation in the graph of a rank that needs no other's variables.
            self._used.assign(tf.cast(tf.reduce_sum(received[:1]), tf.float32))
            return tf.ensure_shape(received, sum(sizes))

        parts = tf.split(self._wait.around(tf.concat([*owned, nothing], axis=0), gather), sizes)
        for rank, numbers in enumerate(piece):
            of_rank, parts = parts[: len(numbers)], parts[len(numbers) :]
            for i, part in zip(numbers, of_rank, strict=True):
                if rank != self._wire.rank:
                    variables[i].assign(_from_bytes(part, variables[i]))


def _as_bytes(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _from_bytes(data: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    size = variable.dtype.size
    shape = [*variable.shape, size] if size > 1 else variable.shape
    return tf.bitcast(tf.reshape(data, shape), variable.dtype)


def timeline_callbacks() -> list[keras.callbacks.Callback]:
    return [TimelineSteps()] if timeline_wanted() else []


class TimelineSteps(keras.callbacks.Callback):  # type: ignore[misc]
    """Marks steps, and the waits inside their graph, in the timeline of the run."""

    never_stops = True

    def __init__(self) -> None:
        super().__init__()
        blocked_in_graphs.measured = True
        self._begun = 0.0
        self._blocked = blocked_in_graphs.seconds()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now, blocked = time.monotonic(), blocked_in_graphs.seconds()
        step = int(self.model.optimizer.iterations.numpy()) if self.model.optimizer else None
        if waited := blocked - self._blocked:
            ended = blocked_in_graphs.ended() - time.time() + now
            mark(WAITING, ended - waited, ended, step)
        mark("step", self._begun, now, step)
        self._blocked = blocked
