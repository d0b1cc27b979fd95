"""Keras models and optimizers on PyTorch, as a module and an optimizer that PyTorch's port takes.

``ModelWeights`` stands for a model, and ``KerasStep`` for an optimizer: hooks around its ``step()``
run around Keras's update.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import keras
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.buffers import learnt_in
from hvkit.frameworks.keras.comparisons import made_trainable
from hvkit.frameworks.keras.optimizers import calls_of_apply, is_overwritten
from hvkit.frameworks.keras.refusals import remember_updated


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

    def add_tensors_of_pytorch(self, model: Any) -> None:
        """Add the parameters and buffers that layers of the script have made without Keras."""
        known = {id(t) for t in (*self.parameters(), *self.buffers())}
        known |= {id(backend_variable(v)) for v in (*model.variables, *model.metrics_variables)}
        for named, register in (
            (nn.Module.named_parameters(model), self.register_parameter),
            (model.named_buffers(), self.register_buffer),
        ):
            for name, tensor in named:
                if id(tensor) not in known:
                    taken = self._parameters.keys() | self._buffers.keys()
                    register(_free(name.replace(".", "/"), taken), tensor)


def learnt_by(layers: Sequence[Any]) -> nn.Module:
    """A module whose buffers are the non-trainable variables of layers."""
    held = nn.Module()
    for v in learnt_in(layers, with_batch_norm=True):
        held.register_buffer(_free(v.path, held._buffers), backend_variable(v).detach())
    return held


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
