"""The steps of ``distribute`` for Keras on TensorFlow.

hvkit attaches nearly everything to the instances: to methods of the optimizer, and to the ``call``
of a model that has no weights yet. Their classes stay Keras's, so saved files do not mention hvkit.

An update on TensorFlow is a part of a graph, so it has no hooks as PyTorch's has. Code around it
wraps methods of the optimizer, the outermost first::

    method                       wrapped by                      what it does there
    apply                        gradients/averaged_updates      refuses, averages the gradients;
                                 (averaged_apply)                may leave the update out
    or, with local weights:      weights/around_updates          compares ranks, begins a round;
                                 (apply_within)                  ends it, or writes to the server
    apply                        optimizers                      the rate counts as multiplied
                                 (apply_at_multiplied_rate)      until the update ends
    apply                        monitor/keras                   measures the gradients that the
                                 (measured)                      update uses
    build,                       sharded                         no state for the variables of
    add_variable_from_reference                                  other ranks
    _get_current_learning_rate   optimizers (rate)               multiplies the rate
    _backend_update_step         sharded (update_own)            updates this rank's variables,
                                                                 sends them to all

``LossScaleOptimizer`` calls the ``apply`` of the optimizer inside it. ``compile`` makes it later,
so hvkit replaces methods of the class: ``check_finite`` and others in ``loss_scale``, so that all
ranks skip the updates that one process would, and with local weights ``apply`` in
``weights/around_updates``, so that an update that it skips counts, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import keras

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.frameworks.keras.backends import backend_variable, have_values
from hvkit.frameworks.keras.buffers import (
    LastStatistics,
    average_statistics,
    gather_row,
    made_synchronised,
    synchronise_batch_norm,
)
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.wire import (
    GraphWait,
    blocked_in_graphs,
    refuse_tf_distribute,
)
from hvkit.frameworks.keras.fit import share_results
from hvkit.frameworks.keras.gradients.averaged_updates import (
    Average,
    NonFinite,
    average_in_apply,
    finite_in,
)
from hvkit.frameworks.keras.gradients.averager import GradientAverager, keeper_of
from hvkit.frameworks.keras.gradients.sample_counts import SampleCounts
from hvkit.frameworks.keras.initial_state import (
    AdaptedLayers,
    has_weights,
    synchronise,
    synchronise_optimizers,
)
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.loss_scale import share_scale
from hvkit.frameworks.keras.optimizers import (
    calls_of_apply,
    updating,
)
from hvkit.frameworks.keras.partial_state import ids_of_slots
from hvkit.frameworks.keras.port import KerasPort
from hvkit.frameworks.keras.refusals import (
    let_differ,
    refuse_left_out,
    refuse_overwritten,
    remember_updated,
)
from hvkit.frameworks.keras.sharded import (
    TensorFlowSender,
)
from hvkit.frameworks.keras.weights.parameter_server import ServedModel
from hvkit.frameworks.keras.weights.rounds import TensorFlowRoundKeeper
from hvkit.host.run_reports import timeline_wanted
from hvkit.strategies import ParameterServer
from hvkit.strategies.strategy import Averaging, Rounds
from hvkit.sync.port import Keeper, Options, Record, warn_of_own_batches
from hvkit.watch.spans import WAITING, mark

_KEEPER = "_hvkit_keeper"


class KerasOnTensorFlowPort(KerasPort):
    """Implements ``hvkit.sync.port.Port``."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        if runtime.size() > 1:
            for model in models:
                refuse_tf_distribute(model)
        super().__init__(models, optimizers, options)
        self.averagers: list[GradientAverager] = []
        self._samples: SampleCounts | None = None
        self._synchronised: dict[int, Any] = {}
        # Models whose weights no rank has sent yet.
        self._pending = list(models)
        self._optimizers_pending = True

    def _name(self) -> str:
        return self.options.group.numbered("hvkit")

    def _wait(self, name: str) -> GraphWait:
        return GraphWait(name, group=self.options.group)

    def synchronise(self) -> None:
        self._synchronise_batch_norm()
        built = collectives.gather(
            "distribute", [has_weights(each) for each in self.models], self.options.group
        )
        for model, on_ranks in zip(self.models, zip(*built, strict=True), strict=True):
            if all(on_ranks):
                self._synchronise_before_it_computes(model)
            else:
                self._in_first_call(model, self._synchronise_in_first_call)

    def _synchronise_model(self, model: Any) -> None:
        self._synchronise(model.weights)
        self._pending = [each for each in self._pending if each is not model]
        if not self._pending:
            self._synchronise_optimizers()

    def _synchronise_before_it_computes(self, model: Any) -> None:
        """Synchronise a model's weights, vocabularies and constants."""
        layers = AdaptedLayers(model)
        self._synchronise_model(model)
        layers.copy_from_first(self.options.group)

    def _synchronise(self, weights: Sequence[Any]) -> None:
        self._synchronised.update((id(backend_variable(w)), w) for w in weights)
        synchronise(weights, self.options.group)

    def _synchronise_optimizers(self) -> None:
        if self._optimizers_pending:
            self._optimizers_pending = False
            divided = ids_of_slots(self.optimizers)
            trained = self.model.trainable_variables
            synchronise_optimizers(self.optimizers, trained, self.options.group, divided)

    def _synchronise_in_first_call(self, model: Any) -> None:
        self._synchronise_batch_norm()
        if any(each is model for each in self._pending):
            self._synchronise_before_it_computes(model)

    def _synchronise_batch_norm(self) -> None:
        if self.options.batch_norm == "local":
            return
        everything = self.options.batch_norm == "sync"
        if everything or isinstance(self.options.strategy, Averaging):
            synchronise_batch_norm(
                self.model, everything=everything, gather=gather_row, group=self.options.group
            )
        elif made_synchronised(self.model):
            warn_of_own_batches("BatchNormalization(synchronized=True)", self.options.strategy)

    def _before_update(self, variables: Sequence[Any]) -> None:
        """Synchronise the weights that no call of a model has synchronised yet.

        There are some if a ``train_step`` calls only parts of a model, and if the script uses a
        layer for the first time.
        """
        refuse_overwritten(self.options.strategy, variables)
        remember_updated(variables)
        for model in self._pending:
            if model.weights and have_values(model.weights):
                self._synchronise_model(model)
        new = [v for v in variables if id(backend_variable(v)) not in self._synchronised]
        if new and have_values(new):
            refuse_left_out(self.models, self.optimizers, new)
            self._synchronise(new)
        if self._optimizers_pending and have_values(variables):
            self._synchronise_optimizers()

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        for model in self.models:
            self._let_update(model)
        local: TensorFlowRoundKeeper | ServedModel | None = None
        keeper: Keeper | None = None
        compression = self.options.compression
        self._samples = self._counts()
        if isinstance(strategy := self.options.strategy, Rounds | ParameterServer):
            keeper = local = self._local_weights(strategy)
        else:
            assert isinstance(strategy, Averaging)
            for each in self.inner:
                average = self._average(strategy)
                average_in_apply(each, average, self._before_update, self._nonfinite())
            for each in self.optimizers:
                agree = finite_in(self.options.group)
                share_scale(each, agree, self.options.group.size, self.models)
            self._divide_state(lambda: TensorFlowSender(self._name(), self.options.group))
            if (travels := strategy.gradient_compression(compression)) and travels.keeps_state:
                keeper = keeper_of(self.model, self.averagers, strategy, compression)
        wait = None
        if local is None and self.options.batch_norm == "average":
            wait = self._wait(self._name())
        end_epoch = functools.partial(self._end_epoch, wait)
        for model in self.models:  # which keep all that is here by this
            use_counts_of_all_ranks(model, self._samples, trains=local is None)
            share_results(
                model, self.averagers, end_epoch, self.options.group, local, timeline_callbacks
            )
            vars(model)[_KEEPER] = keeper
        return self._records(), keeper

    def _counts(self) -> SampleCounts:
        accumulates = any(each.gradient_accumulation_steps for each in updating(self.optimizers))
        return SampleCounts(self._name(), self.options.group, accumulates)

    def _nonfinite(self) -> NonFinite | None:
        if self.options.on_nonfinite == "ignore":
            return None
        name = f"{self._name()}.finite"
        wait = self._wait(f"{name}.statistics")

        def averaged() -> None:
            if self.options.batch_norm == "average":
                average_statistics(self.model, wait, self.options.group)

        skips = self.options.on_nonfinite == "skip"
        statistics = LastStatistics(self.model, averaged) if skips else None
        return NonFinite(self.options.on_nonfinite, name, statistics, self.options.group)

    def _end_epoch(self, wait: GraphWait | None) -> None:
        """Average statistics after batches that no update has followed yet; compare the ranks."""
        steps = [each.gradient_accumulation_steps or 1 for each in updating(self.optimizers)]
        left = any(
            calls_of_apply(o) % n for o, n in zip(updating(self.optimizers), steps, strict=True)
        )
        if wait is not None and left:
            average_statistics(self.model, wait, self.options.group)
        self._compare()

    def _local_weights(
        self, strategy: Rounds | ParameterServer
    ) -> TensorFlowRoundKeeper | ServedModel:
        let_differ([self.model, *self.models], self.inner)
        with_statistics = self.options.batch_norm == "average"
        name = self._name()
        keeper: TensorFlowRoundKeeper | ServedModel
        if isinstance(strategy, ParameterServer):
            keeper = ServedModel(strategy, self.model, name, with_statistics)
        else:
            compression = self.options.compression
            group = self.options.group
            keeper = TensorFlowRoundKeeper(
                strategy, self.model, name, compression, with_statistics, group
            )
        for each in self.inner:
            checks = Checks(self._name(), self.model, self.options.group, first_only=True)
            keeper.watch_updates(each, checks, self._before_update)
        return keeper

    def _average(self, strategy: Averaging) -> Average:
        name, group = self._name(), self.options.group
        checks = Checks(name, self.model, group, self.options.check_every)
        compression = self.options.compression
        average_gradients = GradientAverager(
            name, strategy, compression, checks, group, self._samples
        )
        self.averagers.append(average_gradients)
        if self.options.batch_norm != "average":
            return average_gradients
        wait = self._wait(f"{name}.statistics")

        def average(
            gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any] | None = None
        ) -> list[Any]:
            means = average_gradients(gradients, variables, absent)
            average_statistics(self.model, wait, self.options.group)
            return means

        return average


def timeline_callbacks() -> list[keras.callbacks.Callback]:
    return [TimelineSteps()] if timeline_wanted() else []


class TimelineSteps(keras.callbacks.Callback):  # type: ignore[misc]
    """Marks steps, and the waits inside their graph, in the timeline of the run."""

    never_stops = True

    def __init__(self) -> None:
        super().__init__()
        blocked_in_graphs.measure()
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
