"""Keras on PyTorch: its models and optimizers as PyTorch's, kept in step by PyTorch's port.

A Keras model is a module there, and ``loss.backward()`` computes its gradients, in ``fit`` and in a
loop of the script's own. So they are averaged when it returns, and ``optimizer.apply`` gets means.
A ``KerasStep`` stands for the optimizer: hooks around its ``step()`` run around Keras's update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import keras
import torch
from keras.src.backend import in_stateless_scope
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication.collectives import gather, require_equal
from hvkit.communication.encoding import bytes_of
from hvkit.frameworks.keras.adapted import Learnt
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.buffers import compared_of, learnt_in
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
from hvkit.frameworks.keras.optimizers import (
    calls_of_apply,
    inner_optimizer,
    is_overwritten,
    let_leave_out_updates,
    more_than_sgd,
    parts_of,
    settings_of,
    updating,
)
from hvkit.frameworks.keras.refusals import (
    let_differ,
    refuse_left_out,
    refuse_loss_scale,
    refuse_optimizers,
    refuse_other_optimizers,
    remember_updated,
)
from hvkit.frameworks.keras.sharded import OptimizerShards, refuse_joint_updates
from hvkit.frameworks.keras.synchronised_norm import synchronise_batch_norm
from hvkit.frameworks.pytorch import PyTorchPort, buffers
from hvkit.frameworks.pytorch import batch_norm as pytorch_batch_norm
from hvkit.frameworks.pytorch.collectives.gather import gather as gather_tensors
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.initial_state import broadcast_tensors
from hvkit.learning_rate import Multiplier
from hvkit.strategies import ParameterServer, ShardedOptimizer, Synchronous
from hvkit.strategies.strategy import Rounds
from hvkit.sync.buffers import warn_of_unlike
from hvkit.sync.local_weights import LocalWeights
from hvkit.sync.port import Keeper, Options, Record, begin_with_weights, record
from hvkit.watch.calls import call

# Numbers the optimizers; ranks call distribute in the same order.
_serial = itertools.count()


class MovingStatistics(_NormBase):
    """The statistics of a batch-norm layer of Keras, under the names that PyTorch gives them."""

    def __init__(self, layer: Any) -> None:
        self._layer = (layer,)  # not as a module inside this one
        nn.Module.__init__(self)

    @property
    def running_mean(self) -> torch.Tensor:  # type: ignore[override]
        return self._layer[0].moving_mean._value.detach()  # type: ignore[no-any-return]

    @property
    def running_var(self) -> torch.Tensor:  # type: ignore[override]
        return self._layer[0].moving_variance._value.detach()  # type: ignore[no-any-return]

    @property
    def training(self) -> bool:
        """Whether training changes the statistics: a frozen layer only uses them."""
        return bool(self._layer[0].trainable)

    @training.setter
    def training(self, value: bool) -> None:
        """PyTorch sets it for all modules alike."""


class ModelWeights(nn.Module):
    """The weights of a Keras model alone: its ``parameters()`` adds metrics and the seeds."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        trained = set(map(id, made_trainable(model)))
        of_norms: set[int] = set()
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
                of_norms.update(map(id, layer.non_trainable_variables))
                self.add_module(f"statistics {len(self._modules)}", MovingStatistics(layer))
        for v in {id(w): w for w in model.weights}.values():
            name = _free(v.path, self._parameters.keys() | self._buffers.keys())
            if id(v) in trained:
                self.register_parameter(name, backend_variable(v))
            elif id(v) not in of_norms:
                self.register_buffer(name, backend_variable(v).detach())
        for number, module in enumerate(modules_of_pytorch(model)):
            self.add_module(f"module {number}", module)


def modules_of_pytorch(model: Any) -> list[nn.Module]:
    """Modules of PyTorch that layers hold, whose buffers Keras does not know."""
    wrapper = keras.layers.TorchModuleWrapper
    return [each.module for each in model._flatten_layers() if isinstance(each, wrapper)]


def _free(path: str, taken: Container[str]) -> str:
    """A name after a weight's path: ``dense/kernel``, and a number if that is taken."""
    name, number = "/".join(path.replace(".", "_").split("/")[-2:]), 1
    while (found := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return found


class KerasStep(Optimizer):
    """A Keras optimizer as one of PyTorch's: the update that Keras makes is its ``step()``.

    Args:
        optimizer: one that updates variables, not one that scales the loss.
        before: called with the variables at the start of each update.
        updates_only: whether gradients that Keras merely accumulates are no step.
    """

    def __init__(
        self,
        optimizer: Any,
        before: Callable[[Sequence[Any]], None],
        updates_only: bool,
    ) -> None:
        super().__init__([{"params": []}], {})
        self._optimizer = optimizer
        self._before = before
        self._updates_only = updates_only
        self._known = False
        self._given: list[tuple[Any, Any]] = []
        self._apply = optimizer.apply
        optimizer.apply = self.apply

    def may_update(self, variables: Sequence[Any]) -> None:
        """Note what it updates: these variables, or those that it is built for."""
        self._known = self._optimizer.built
        known = self._optimizer._trainable_variables if self._known else variables
        self.param_groups[0]["params"][:] = map(backend_variable, known)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """In place of Keras's: the same as a step with its hooks."""
        grads, optimizer = list(grads), self._optimizer
        if trainable_variables is None and optimizer.built:
            trainable_variables = optimizer._trainable_variables
        variables = list(trainable_variables or ())
        if len(grads) != len(variables) or all(g is None for g in grads):
            self._apply(grads, trainable_variables)  # which says what is wrong
            return
        for v in variables:
            if is_overwritten(v):
                raise ValueError(
                    f"{v.path} is overwritten in each update, as the scales of float8 are: ranks "
                    "need the largest of all ranks' values, for which Keras must run on TensorFlow"
                )
        remember_updated(variables)
        self._before(variables)
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
        if not self._known:
            self.may_update(variables)
        weights, params = list(map(backend_variable, variables)), self.param_groups[0]["params"]
        held = set(map(id, params))
        params.extend(w for w in weights if id(w) not in held)
        every = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        if self._updates_only and (calls_of_apply(optimizer) + 1) % every:
            self._apply(grads, variables)
            return
        # The script may have clipped the means, or unscaled them.
        means = [w.grad for w in weights]
        _set_gradients(weights, grads)
        self._given = list(zip(grads, variables, strict=True))
        try:
            self.step()
        finally:
            _set_gradients(weights, means)
            self._given = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let Keras update what has a gradient: hooks hide some, and all in a step left out."""
        now = [(backend_variable(v).grad, given, v) for given, v in self._given]
        if any(g is not None for g, *_ in now):
            kept = [(g, v) for g, given, v in now if g is not None or given is None]
            self._apply([g for g, _ in kept], [v for _, v in kept])


def _set_gradients(weights: Sequence[Any], gradients: Sequence[Any]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def _gather_row(name: str, row: torch.Tensor) -> torch.Tensor:
    return torch.stack(gather_tensors(row, [tuple(row.shape)] * runtime.size()))


def average(layers: Sequence[Any]) -> None:
    """Average the non-trainable variables of layers over ranks; a collective."""
    held = nn.Module()
    for v in learnt_in(layers, with_batch_norm=True):
        held.register_buffer(_free(v.path, held._buffers), backend_variable(v).detach())
    buffers.average([held])


class RoundsInFit:
    """What ``fit`` needs of models whose ranks train alone; nothing before they have weights.

    Args:
        equal_steps: whether all ranks must take equally many steps.
    """

    def __init__(self, equal_steps: bool) -> None:
        self.equal_steps = equal_steps
        self.keeper: LocalWeights | None = None

    def settled(self) -> AbstractContextManager[None]:
        return self.keeper.settled() if self.keeper else nullcontext()

    def rebase(self) -> None:
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
    """Sends the variables that ranks own: what ``sharded`` needs of PyTorch."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._wire = Wire("weights")

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
        trains_alone = isinstance(options.strategy, Rounds | ParameterServer)
        equal_steps = not isinstance(options.strategy, ParameterServer)
        self._rounds = RoundsInFit(equal_steps) if trains_alone else None

    def facts(self) -> list[str]:
        # Of those inside: to describe a LossScaleOptimizer, Keras imports TensorFlow if it can.
        return [
            f"{type(each).__name__} {getattr(each, 'initial_scale', '')}"
            f"{settings_of(inner_optimizer(each))}"
            for each in self.optimizers
        ]

    def more_than_sgd(self) -> list[str]:
        return more_than_sgd(self.optimizers)

    def synchronise(self) -> None:
        """Left to ``keep_in_step``: models may get their weights in their first call only."""

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        return scale_rates(updating(self.optimizers), multiplier)

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        inner = [inner_optimizer(each) for each in self.optimizers]
        for model in self.models:
            refuse_other_optimizers(model, [o for each in inner for o in (each, *parts_of(each))])
            train_uncompiled(model)
            share_results(model, (), self._end_epoch, self._rounds)
        if self._rounds:
            let_differ([self.model, *self.models], inner)
        for each in inner:
            # Named after Keras's class in messages.
            kind: type[KerasStep] = type(type(each).__name__, (KerasStep,), {})
            self._steps.append(kind(each, self._before_update, self._rounds is not None))
            if self.options.on_nonfinite != "ignore":
                let_leave_out_updates(each)
        if isinstance(self.options.strategy, ShardedOptimizer):
            held = [0] * runtime.size()
            for each in updating(self.optimizers):
                shares = ShareSender(f"hvkit.{next(_serial)}")
                OptimizerShards(self.options.strategy, each, held, shares)
        built = gather("distribute", list(map(has_weights, self.models)))
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
            synchronise(model.weights)
            learnt.take_from_rank_0()
            for module in modules_of_pytorch(model):
                broadcast_tensors(list(module.buffers()))

    def _begin_if_built(self) -> None:
        if not self._begun and all(map(has_weights, self.models)):
            record(self.models, *self._begin())

    def _begin(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        """Keep the ranks in step from now on; called once all models have weights; a collective."""
        self._begun = True
        for model in self.models:
            self._synchronise(model)
        trained, divided = self.model.trainable_variables, ids_of_slots(self.optimizers)
        synchronise_optimizers(self.optimizers, trained, divided)
        for step in self._steps:
            step.may_update(made_trainable(self.model))
        options = self.options
        if options.batch_norm == "sync":  # then their statistics are the same on all ranks
            synchronise_batch_norm(self.model, everything=True, gather=_gather_row)
            for module in modules_of_pytorch(self.model):
                pytorch_batch_norm.synchronise_batch_norm(pytorch_batch_norm.batch_norm_of(module))
            options = replace(options, batch_norm="local")
        if isinstance(options.strategy, ShardedOptimizer):  # Keras's part of it divides the state
            options = replace(options, strategy=Synchronous())
        port = PyTorchPort([ModelWeights(self.model)], self._steps, options)
        require_equal("model", port.facts(), "build the same model on every rank")
        _, keeper = port.keep_in_step()
        if self._rounds:
            assert isinstance(keeper, LocalWeights)
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
        require_same_weights("fit", self.model, self.optimizers)
        warn_of_unlike("fit", *compared_of(self.model))
