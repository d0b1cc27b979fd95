"""Keras on PyTorch: the steps of ``distribute``, most of which PyTorch's port does.

A Keras model is a module there, and ``loss.backward()`` computes its gradients, in ``fit`` and in a
loop of the script's own. So they are averaged when it returns, and ``optimizer.apply`` gets means.
``as_pytorch`` lends the model and the optimizer to PyTorch's port.

In a loop, optimizers may be PyTorch's own. Its parameters of a Keras model are all variables: also
seeds, the states of metrics, and statistics, which no gradient reaches. An optimizer made of them
holds these as well. They are each rank's own, as PyTorch's buffers are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.communication.collectives import require_equal
from hvkit.frameworks.keras import as_pytorch, initial_state, refusals
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.buffers import synchronise_batch_norm
from hvkit.frameworks.keras.checks import made_trainable
from hvkit.frameworks.keras.divided_state import ids_of_slots
from hvkit.frameworks.keras.fit import FitState, combine_results
from hvkit.frameworks.keras.loss_checks import watch_losses
from hvkit.frameworks.keras.loss_means import rows_for_each, use_counts_of_all_ranks
from hvkit.frameworks.keras.optimizers import fit_half, let_leave_out_updates, share_scale
from hvkit.frameworks.keras.port import KerasPort
from hvkit.frameworks.pytorch import PyTorchPort, buffers
from hvkit.frameworks.pytorch.divided_state.sharded import owned_bytes, set_others
from hvkit.frameworks.pytorch.gather import gather as gather_tensors
from hvkit.frameworks.pytorch.initial_state import broadcast_tensors
from hvkit.frameworks.pytorch.optimizers import is_left_to_rank, leave_to_rank, stepping_in
from hvkit.frameworks.pytorch.refusals import refuse_optimizers_of_others
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.main_rank import warn_once
from hvkit.runtime import Group
from hvkit.strategies import ParameterServer, ShardedOptimizer, Synchronous
from hvkit.strategies.strategy import Rounds
from hvkit.sync.local_weights import LocalWeightsSync
from hvkit.sync.port import Options, Record, Sync, begin_with_weights, remember
from hvkit.watch.calls import call


def _gather_row(name: str, group: Group, row: torch.Tensor) -> torch.Tensor:
    shapes = [tuple(row.shape)] * group.size
    return torch.stack(gather_tensors(row, shapes, group, rows_for_each()))


def _means_fit(group: Group, finite: Any, halves: Sequence[tuple[Any, Any]]) -> Any:
    """Whether an update counts, whose gradients are means: ``agree`` of ``SharedScale``."""
    return finite & fit_half([g for g, _ in halves if g is not None], group.size)


def average(layers: Sequence[Any]) -> None:
    buffers.average([as_pytorch.learnt_by(layers)])


def synchronise_statistics(model: Any, group: Group) -> None:
    """Let batch norm use the batches of all ranks, as ``batch_norm="sync"`` promises."""
    synchronise_batch_norm(model, everything=True, gather=_gather_row, group=group)
    for module in as_pytorch.modules_of_pytorch(model):
        layers = buffers.batch_norm_of(module)
        buffers.synchronise_batch_norm(layers, group)


class PyTorchSender:
    def __init__(self, name: str, group: Group) -> None:
        self._name, self._group = name, group
        self._wire = Wire("weights", group)

    def leave_out(self, gradients: Sequence[Any]) -> None:
        """Do nothing: the gradients are averaged already."""

    @torch.no_grad()
    def send(self, number: int, piece: list[list[int]], variables: Sequence[Any]) -> None:
        sent = owned_bytes(variables, piece, self._group)
        with call("optimizer.apply()"):
            received = self._wire.gather(sent, f"{self._name}.shares.{number}")
        set_others(variables, piece, received, self._group)


class KerasOnPyTorchPort(KerasPort):
    """Implements ``hvkit.sync.port.Port``."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        super().__init__(models, optimizers, options)
        refusals.refuse_loss_scale(options, models, optimizers)
        self._steps: list[as_pytorch.KerasStep] = []
        self._begun = False
        self._synchronised: list[Any] = []
        self._local = isinstance(options.strategy, Rounds | ParameterServer)
        self._states: list[FitState] = []
        self._samples: as_pytorch.PyTorchSampleCounts | None = None

    def synchronise(self) -> None:
        """Left to ``keep_in_step``: models may get their weights in their first call only."""

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        name = self.group.numbered("hvkit")
        self._samples = samples = as_pytorch.PyTorchSampleCounts(name, self.group)
        for model in self.models:
            if getattr(model, "compiled", False) and model.jit_compile:
                # Keras itself warns of a later ``compile``.
                warn_once(
                    "jit_compile",
                    f"fit of model {model.name!r} ignores jit_compile=True: torch.compile would "
                    "trace the communication between ranks",
                )
            self._let_update(model)
            use_counts_of_all_ranks(model, samples, trains=not self._local)
            self._states.append(FitState(self.group, self._compare, self.options.strategy))
            combine_results(model, self._states[-1])
        if self._local:
            refusals.let_differ([self.model, *self.models], self.inner)
        for each in self.inner:
            self._steps.append(as_pytorch.step_of(each, self._before_update, self._local))
            if self.options.on_nonfinite != "ignore":
                let_leave_out_updates(each)
        if not self._local:
            agree = functools.partial(_means_fit, self.group)
            for each in self.optimizers:
                share_scale(each, agree, self.group.size, self.models)
        self._divide_state(lambda: PyTorchSender(self.group.numbered("hvkit"), self.group))
        built = self._have_weights()
        if all(built):
            return self._begin()
        for model, on_all_ranks in zip(self.models, built, strict=True):
            begin_with_weights(model, self._begin_if_built)
            if on_all_ranks:
                self._synchronise(model)
            else:
                self._in_first_call(model, self._synchronise_and_begin)
        return self._records(), None

    def _synchronise_and_begin(self, model: Any) -> None:
        self._synchronise(model)
        self._begin_if_built()

    def _synchronise(self, model: Any) -> None:
        """Copy rank 0's weights, once: a forward pass may have used them; a collective."""
        if model not in self._synchronised:
            self._synchronised.append(model)
            initial_state.synchronise_model(model, self.group)
            for module in as_pytorch.modules_of_pytorch(model):
                broadcast_tensors(list(module.buffers()), self.group)

    def _begin_if_built(self) -> None:
        if not self._begun and all(map(initial_state.has_weights, self.models)):
            remember(self.models, *self._begin(), self.group)

    def _begin(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        """Keep the ranks in step from now on; called once all models have weights; a collective."""
        self._begun = True
        for model in self.models:
            self._synchronise(model)
        trained, divided = self.model.trainable_variables, ids_of_slots(self.optimizers)
        initial_state.synchronise_optimizers(self.optimizers, trained, self.group, divided)
        for step in self._steps:
            step.may_update(made_trainable(self.model))
        options = self.options
        if options.batch_norm == "sync":  # then their statistics are the same on all ranks
            synchronise_statistics(self.model, options.group)
            options = replace(options, batch_norm="local")
        if isinstance(options.strategy, ShardedOptimizer):  # Keras's part of it divides the state
            options = replace(options, strategy=Synchronous())
        port = PyTorchPort([as_pytorch.ModelWeights(self.model)], self._steps, options)
        advice = "build the same model on every rank"
        require_equal("model", port.facts(), advice, group=options.group)
        _, sync = port.keep_in_step()
        if self._samples and port.reducer:
            port.reducer.weigh(self._samples.weight, self._samples.correction)
            self._samples.weighs = sync is None
        if isinstance(sync, LocalWeightsSync):
            for state in self._states:
                state.sync = sync
        return self._records(), sync

    def _before_update(self, variables: Sequence[Any]) -> None:
        """Begin before the first update, for a ``train_step`` that calls only parts of a model."""
        self._begin_if_built()
        if not self._begun:
            names = [repr(each.name) for each in self.models if not initial_state.has_weights(each)]
            raise ValueError(
                f"an update came before model {', '.join(names)} had weights: call or build all "
                "models that were passed to hvkit.distribute before the first update"
            )
        own = {id(w) for w in self.model.weights}
        if any(id(v) not in own for v in variables):
            refusals.refuse_left_out(self.models, self.optimizers, variables)


class KerasLoopPort(PyTorchPort):
    """Keras models with weights, and optimizers of PyTorch, as a ``hvkit.sync.port.Port``."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        self._keras_models = list(models)
        self._whole_batches = options.batch_norm == "sync"
        for model in models:
            if not initial_state.has_weights(model):
                raise ValueError(
                    f"model {model.name!r} has no weights yet, which its optimizer updates: build "
                    "it, then make the optimizer, then call hvkit.distribute"
                )
        weights = list(map(as_pytorch.ModelWeights, models))
        for model, its in zip(models, weights, strict=True):
            its.add_tensors_of_pytorch(model)
            for tensor in _untrained(model):
                leave_to_rank(tensor)
        if self._whole_batches:  # Keras's layers compute over them, not PyTorch's
            options = replace(options, batch_norm="local")
        super().__init__(weights, optimizers, options)

    def _refuse_optimizers_of_others(self) -> None:
        parameters = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        left_out = refusals.refuse_left_out(self._keras_models, self.optimizers, parameters)
        _leave_untrained(parameters)
        refuse_optimizers_of_others(self.models, self.optimizers, left_out)

    def synchronise(self) -> None:
        group = self.options.group
        for model in self._keras_models:
            initial_state.synchronise_model(model, group)
        super().synchronise()

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        group, strategy = self.options.group, self.options.strategy
        models = self._keras_models
        joined = models[0] if len(models) == 1 else initial_state.JoinedModels(models)
        if self._whole_batches:
            synchronise_statistics(joined, group)
        for optimizer in self.optimizers:
            for stepping in stepping_in(optimizer):
                _leave_untrained_of_later_groups(stepping)
        records, sync = super().keep_in_step()
        local = sync if isinstance(sync, LocalWeightsSync) else None
        if local:
            refusals.let_differ([joined, *models], [])
        for each in models:
            refusals.refuse_other_optimizers(each, [])
            watch_losses(each, in_loop=True)
            samples = as_pytorch.PyTorchSampleCounts(group.numbered("hvkit"), group)
            use_counts_of_all_ranks(each, samples, trains=False)
            combine_results(each, FitState(group, lambda: None, strategy, sync=local))
        return records, sync


def _untrained(layer: Any) -> list[torch.Tensor]:
    """Variables of a layer or model that no gradient reaches, and no script's own parameters."""
    trained = set(map(id, made_trainable(layer)))
    variables = (*layer.variables, *layer.metrics_variables)
    return [backend_variable(v) for v in variables if id(v) not in trained]


def _leave_untrained(parameters: Iterable[torch.Tensor]) -> None:
    new = {id(p) for p in parameters if not (p.requires_grad or is_left_to_rank(p))}
    for layer in refusals.living_layers() if new else ():
        for tensor in _untrained(layer):
            if id(tensor) in new:
                leave_to_rank(tensor)


def _leave_untrained_of_later_groups(optimizer: Optimizer) -> None:
    """The same for groups that the script adds later; pickled optimizers leave this out."""

    def add_and_leave(add: Callable[[Any], None], param_group: dict[str, Any]) -> None:
        add(param_group)
        _leave_untrained(optimizer.param_groups[-1]["params"])

    optimizer.add_param_group = functools.partial(  # type: ignore[method-assign]
        add_and_leave, optimizer.add_param_group
    )
