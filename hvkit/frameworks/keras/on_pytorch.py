"""Keras on PyTorch: the steps of ``distribute``, most of which PyTorch's port does.

A Keras model is a module there, and ``loss.backward()`` computes its gradients, in ``fit`` and in a
loop of the script's own. So they are averaged when it returns, and ``optimizer.apply`` gets means.
``as_pytorch`` lends the model and the optimizer to PyTorch's port.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from keras.src.backend import in_stateless_scope

from hvkit.communication.collectives import gather, require_equal
from hvkit.communication.encoding import bytes_of
from hvkit.communication.group import Group
from hvkit.frameworks.keras.adapted import Learnt
from hvkit.frameworks.keras.as_pytorch import (
    KerasStep,
    ModelWeights,
    learnt_by,
    modules_of_pytorch,
)
from hvkit.frameworks.keras.buffers import compared_of
from hvkit.frameworks.keras.comparisons import made_trainable, require_same_weights
from hvkit.frameworks.keras.divided_state import gathered, ids_of_slots
from hvkit.frameworks.keras.fit import share_results, train_uncompiled
from hvkit.frameworks.keras.initial_state import (
    Together,
    has_weights,
    synchronise,
    synchronise_optimizers,
)
from hvkit.frameworks.keras.learning_rate import scale_rates
from hvkit.frameworks.keras.loss_means import rows_for_each, use_counts_of_all_ranks
from hvkit.frameworks.keras.loss_scale import fit_half, share_scale
from hvkit.frameworks.keras.optimizers import (
    inner_optimizer,
    let_leave_out_updates,
    more_than_sgd,
    parts_of,
    settings_of,
    updating,
)
from hvkit.frameworks.keras.pytorch_sample_counts import PyTorchSampleCounts
from hvkit.frameworks.keras.refusals import (
    let_differ,
    refuse_left_out,
    refuse_loss_scale,
    refuse_optimizers,
    refuse_other_optimizers,
)
from hvkit.frameworks.keras.sharded import OptimizerShards, refuse_joint_updates
from hvkit.frameworks.keras.synchronised_norm import synchronise_batch_norm
from hvkit.frameworks.pytorch import PyTorchPort, buffers
from hvkit.frameworks.pytorch import batch_norm as pytorch_batch_norm
from hvkit.frameworks.pytorch.collectives.gather import gather as gather_tensors
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.initial_state import broadcast_tensors
from hvkit.learning_rate import Multiplier
from hvkit.main_rank import warn_once
from hvkit.strategies import ParameterServer, ShardedOptimizer, Synchronous
from hvkit.strategies.strategy import Rounds
from hvkit.sync.distributed_objects import begin_with_weights, record
from hvkit.sync.fingerprints import warn_of_unlike
from hvkit.sync.local_weights import LocalWeightsKeeper
from hvkit.sync.port import Keeper, Options, Record
from hvkit.watch.calls import call


def _gather_row(name: str, group: Group, row: torch.Tensor) -> torch.Tensor:
    shapes = [tuple(row.shape)] * group.size
    return torch.stack(gather_tensors(row, shapes, group, rows_for_each()))


def _means_fit(group: Group, finite: Any, halves: Sequence[tuple[Any, Any]]) -> Any:
    """Whether an update counts, whose gradients are means: ``agree`` of ``SharedScale``."""
    return finite & fit_half([g for g, _ in halves if g is not None], group.size)


def average(layers: Sequence[Any]) -> None:
    """Average the non-trainable variables of layers over ranks; a collective."""
    buffers.average([learnt_by(layers)])


def synchronise_statistics(model: Any, group: Group) -> None:
    """Let batch norm use the batches of all ranks, as ``batch_norm="sync"`` promises."""
    synchronise_batch_norm(model, everything=True, gather=_gather_row, group=group)
    for module in modules_of_pytorch(model):
        layers = pytorch_batch_norm.batch_norm_of(module)
        pytorch_batch_norm.synchronise_batch_norm(layers, group)


class RoundsInFit:
    """What ``fit`` needs of models whose ranks train alone; nothing before they have weights.

    Args:
        equal_steps: whether all ranks must take equally many steps.
    """

    def __init__(self, equal_steps: bool) -> None:
        self.equal_steps = equal_steps
        self.keeper: LocalWeightsKeeper | None = None

    def settled(self) -> AbstractContextManager[None]:
        return self.keeper.settled() if self.keeper else nullcontext()

    def accept_set_weights(self) -> None:
        """Nothing to do: the next round begins with what the script has set, and compares it."""

    def show_callbacks(self) -> None:
        if self.keeper:
            self.keeper.show_callbacks()

    def keep_what_callbacks_set(self) -> None:
        if self.keeper:
            self.keeper.keep_what_callbacks_set()

    def put_back(self) -> None:
        if self.keeper:
            self.keeper.put_back()

    def end_rounds(self) -> None:
        if self.keeper:
            self.keeper.end_rounds()


class ShareSender:
    """Sends the variables that ranks own: what ``sharded`` needs of PyTorch.

    Args:
        name: the same on every rank, and no other optimizer's.
        group: the ranks among which the state is divided.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._name = name
        self._wire = Wire("weights", group)

    def leave_out(self, gradients: Sequence[Any]) -> None:
        """Nothing: they are averaged already."""

    @torch.no_grad()
    def send(self, number: int, piece: list[list[int]], variables: Sequence[Any]) -> None:
        mine = [bytes_of(variables[i]) for i in piece[self._wire.rank]]
        sent = torch.cat([*mine, bytes_of(variables[0])[:0]])
        with call("optimizer.apply()"):
            received = self._wire.gather(sent, f"{self._name}.shares.{number}")
        order = [i for numbers in piece for i in numbers]
        parts = torch.split(received, [variables[i].nbytes for i in order])
        for i, part in zip(order, parts, strict=True):
            if i not in piece[self._wire.rank]:
                variables[i].copy_(part.clone().view(variables[i].dtype).view(variables[i].shape))


class KerasOnPyTorchPort:
    """Some models and the optimizers that update them."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        self.models, self.optimizers, self.options = list(models), list(optimizers), options
        refuse_optimizers(models, optimizers, options)
        self.model = models[0] if len(models) == 1 else Together(models)
        self._steps: list[KerasStep] = []
        if isinstance(options.strategy, ShardedOptimizer):
            for each in updating(optimizers):
                refuse_joint_updates(options.strategy, each)
        refuse_loss_scale(options, models, optimizers)
        self._begun = False
        self._synchronised: list[Any] = []
        trains_locally = isinstance(options.strategy, Rounds | ParameterServer)
        equal_steps = not isinstance(options.strategy, ParameterServer)
        self._rounds = RoundsInFit(equal_steps) if trains_locally else None
        self._samples: PyTorchSampleCounts | None = None

    def facts(self) -> list[str]:
        return [settings_of(each) for each in self.optimizers]

    def more_than_sgd(self) -> list[str]:
        return more_than_sgd(self.optimizers)

    def synchronise(self) -> None:
        """Left to ``keep_in_step``: models may get their weights in their first call only."""

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        return scale_rates(updating(self.optimizers), multiplier)

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        inner = [inner_optimizer(each) for each in self.optimizers]
        group = self.options.group
        self._samples = samples = PyTorchSampleCounts(group.numbered("hvkit"), group)
        for model in self.models:
            refuse_other_optimizers(model, [o for each in inner for o in (each, *parts_of(each))])
            if getattr(model, "compiled", False) and model.jit_compile:
                # Keras itself warns of a later ``compile``.
                warn_once(
                    "jit_compile",
                    f"fit of model {model.name!r} ignores jit_compile=True: torch.compile would "
                    "trace the communication between ranks",
                )
            train_uncompiled(model)
            use_counts_of_all_ranks(model, samples, trains=self._rounds is None)
            share_results(model, (), self._end_epoch, self.options.group, self._rounds)
        if self._rounds:
            let_differ([self.model, *self.models], inner)
        for each in inner:
            # Named after Keras's class in messages.
            kind: type[KerasStep] = type(type(each).__name__, (KerasStep,), {})
            self._steps.append(kind(each, self._before_update, self._rounds is not None))
            if self.options.on_nonfinite != "ignore":
                let_leave_out_updates(each)
        group = self.options.group
        if not self._rounds:
            for each in self.optimizers:
                share_scale(each, functools.partial(_means_fit, group), group.size, self.models)
        if isinstance(self.options.strategy, ShardedOptimizer):
            held = [0] * group.size
            for each in updating(self.optimizers):
                shares = ShareSender(group.numbered("hvkit"), group)
                OptimizerShards(self.options.strategy, each, held, shares, group)
        built = gather("distribute", list(map(has_weights, self.models)), self.options.group)
        if all(map(all, built)):
            return self._begin()
        for model, on_ranks in zip(self.models, zip(*built, strict=True), strict=True):
            begin_with_weights(model, self._begin_if_built)
            if all(on_ranks):
                self._synchronise(model)
            else:
                self._begin_before_it_computes(model)
        return [(each, self._record(each)) for each in self.optimizers], None

    def _begin_before_it_computes(self, model: Any) -> None:
        """Copy rank 0's weights in the model's first call, before it computes.

        The last model that builds itself lets the ranks begin.
        """
        call = model.call

        def begin_and_call(*args: Any, **kwargs: Any) -> Any:
            if not in_stateless_scope() and has_weights(model):
                del model.call
                self._synchronise(model)
                self._begin_if_built()
            return call(*args, **kwargs)

        model.call = begin_and_call

    def _synchronise(self, model: Any) -> None:
        """Copy rank 0's weights, once: a forward pass may have used them; a collective."""
        if not any(each is model for each in self._synchronised):
            self._synchronised.append(model)
            learnt = Learnt(model)
            synchronise(model.weights, self.options.group)
            learnt.take_from_first(self.options.group)
            for module in modules_of_pytorch(model):
                broadcast_tensors(list(module.buffers()), self.options.group)

    def _begin_if_built(self) -> None:
        if not self._begun and all(map(has_weights, self.models)):
            record(self.models, *self._begin(), self.options.group)

    def _begin(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        """Keep the ranks in step from now on; called once all models have weights; a collective."""
        self._begun = True
        for model in self.models:
            self._synchronise(model)
        trained, divided = self.model.trainable_variables, ids_of_slots(self.optimizers)
        synchronise_optimizers(self.optimizers, trained, self.options.group, divided)
        for step in self._steps:
            step.may_update(made_trainable(self.model))
        options = self.options
        if options.batch_norm == "sync":  # then their statistics are the same on all ranks
            synchronise_statistics(self.model, options.group)
            options = replace(options, batch_norm="local")
        if isinstance(options.strategy, ShardedOptimizer):  # Keras's part of it divides the state
            options = replace(options, strategy=Synchronous())
        port = PyTorchPort([ModelWeights(self.model)], self._steps, options)
        advice = "build the same model on every rank"
        require_equal("model", port.facts(), advice, group=options.group)
        _, keeper = port.keep_in_step()
        if self._samples and port.reducer:
            port.reducer.weigh(self._samples.weight, self._samples.correction)
            self._samples.weighs = keeper is None
        if self._rounds:
            assert isinstance(keeper, LocalWeightsKeeper)
            self._rounds.keeper = keeper
        return [(each, self._record(each)) for each in self.optimizers], keeper

    def _record(self, optimizer: Any) -> Record:
        if not isinstance(self.options.strategy, ShardedOptimizer):
            return Record()
        held = ref(optimizer)  # the record lives as long as the optimizer
        return Record(gathered=lambda: gathered(held()))

    def _before_update(self, variables: Sequence[Any]) -> None:
        """Begin before the first update, for a ``train_step`` that calls only parts of a model."""
        self._begin_if_built()
        if not self._begun:
            names = [repr(each.name) for each in self.models if not has_weights(each)]
            raise ValueError(
                f"an update came before model {', '.join(names)} had weights: call or build all "
                "models that were passed to hvkit.distribute before the first update"
            )
        own = {id(w) for w in self.model.weights}
        if any(id(v) not in own for v in variables):
            refuse_left_out(self.models, self.optimizers, variables)

    def _end_epoch(self) -> None:
        require_same_weights("fit", self.model, self.optimizers, self.options.group)
        warn_of_unlike("fit", *compared_of(self.model), self.options.group)
