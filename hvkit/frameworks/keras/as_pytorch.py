"""Keras models and optimizers on PyTorch, as a module and an optimizer that PyTorch's port takes.

``ModelWeights`` stands for a model, and ``KerasStep`` for an optimizer: hooks around its ``step()``
run around Keras's update. ``PyTorchSampleCounts`` adds up what losses are means over.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.buffers import learnt_in
from hvkit.frameworks.keras.checks import made_trainable
from hvkit.frameworks.keras.optimizers import calls_of_apply, is_overwritten, variables_of
from hvkit.frameworks.keras.refusals import remember_updated
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.runtime import Group


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
        """Ignored: PyTorch sets it for all modules."""


class ModelWeights(nn.Module):
    """A Keras model's weights, without the metrics and seeds that its ``parameters()`` has."""

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
    module = nn.Module()
    for v in learnt_in(layers, with_batch_norm=True):
        module.register_buffer(_free(v.path, module._buffers), backend_variable(v).detach())
    return module


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
    """A Keras optimizer as PyTorch's; to accumulate gradients is no step if ``updates_only``."""

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
        """Note which variables it updates: these, unless it is built for others."""
        self._known = self._optimizer.built
        known = self._optimizer._trainable_variables if self._known else variables
        self.param_groups[0]["params"][:] = map(backend_variable, known)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads, optimizer = list(grads), self._optimizer
        variables = variables_of(optimizer, trainable_variables) or []
        if len(grads) != len(variables) or all(g is None for g in grads):
            self._apply(grads, variables or None)  # raises Keras's own error
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
        known_ids = set(map(id, params))
        params.extend(w for w in weights if id(w) not in known_ids)
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
        """Let Keras update the weights that have a gradient; hooks hide some, or all."""
        now = [(backend_variable(v).grad, given, v) for given, v in self._given]
        if any(g is not None for g, *_ in now):
            kept = [(g, v) for g, given, v in now if g is not None or given is None]
            self._apply([g for g, _ in kept], [v for _, v in kept])


def step_of(
    optimizer: Any, before: Callable[[Sequence[Any]], None], updates_only: bool = False
) -> KerasStep:
    """A ``KerasStep``, named after Keras's class in messages."""
    step_class: type[KerasStep] = type(type(optimizer).__name__, (KerasStep,), {})
    return step_class(optimizer, before, updates_only)


def _set_gradients(weights: Sequence[Any], gradients: Sequence[Any]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


class PyTorchSampleCounts:
    """The counts of a model's steps; it is a ``hvkit.frameworks.keras.loss_means.StepTotals``.

    The ranks add up their rows while the model computes. The first gradients that are sent wait for
    the sum, in general. Nothing is sent where ranks know that all have as many rows.

    The ranks add up a count of a loss in the same way. The sum is not known yet when gradients are
    sent: ``weight()`` divides by the mean count of the last step, and ``correction()`` mends that.
    ``weighs`` is whether gradients may be weighted by a loss's count: not if a compression keeps
    residuals, which later steps with other counts would send.
    """

    def __init__(self, name: str, group: Group) -> None:
        self.even: Callable[[], bool] = lambda: False
        self.weighs = False
        self._name = name
        self._wire = Wire("checks", group)
        self._rows = 0
        self._total = torch.zeros(1, dtype=torch.float64, device="cpu")
        # Of the sums that are running.
        self._handles: list[int] = []
        self._in_step = self._of_script = self._may_change = False
        # The count of a loss over all ranks, and its mean over ranks in the last step.
        self._sum = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._usual = 0.0
        # This rank's count in this step; None if gradients are weighted by rows.
        self._count: float | None = None
        self._started = False
        # Which comparisons have been made.
        self._reported: set[str] = set()
        self._noted: list[Sequence[Any]] = []

    def begin(self, rows_of: torch.Tensor, final: bool = True) -> None:
        self._may_change = False
        self._finish_sums()  # of a step that failed
        self._may_change = not final
        self._of_script = self._of_script or not final
        self._rows = rows_of.shape[0]
        # A train_step of the script may compute with some of the rows.
        self._in_step = self._of_script or not self.even()
        if self._in_step and final:
            self._send_rows()

    def _send_rows(self) -> None:
        self._total.fill_(self._rows)
        self._handles.append(self._wire.start_sum(self._total, f"{self._name}.rows"))

    def end(self) -> None:
        self._may_change = self._of_script = False
        self._finish_sums()
        if self._started:
            self._usual = self._sum.item() / self._wire.size
        self._in_step = self._started = False
        self._count = None

    def _finish_sums(self) -> None:
        if self._may_change:
            self._may_change = False
            self._send_rows()
        while self._handles:
            self._wire.wait(self._handles.pop(0))

    def weight(self) -> float:
        """The factor of this rank's gradients, before ``correction()``."""
        if self._count is not None:
            return self._count / self._usual
        self._finish_sums()
        by_rows = 1.0
        if self._in_step:
            by_rows = self._rows * self._wire.size / (self._total.item() or 1.0)
        return by_rows / self.correction()

    def correction(self) -> float:
        """The factor of all ranks' averaged gradients."""
        if not self._started:
            return 1.0
        self._finish_sums()
        return self._usual * self._wire.size / (self._sum.item() or 1.0)

    def of(self, count: torch.Tensor | None, number: int) -> tuple[float, float]:
        self._finish_sums()
        rows_for_each = float(self._wire.size)
        if self._in_step:
            rows_for_each = self._total.item() / self._rows if self._rows else 0.0
        if count is None:
            return rows_for_each, 0.0
        if self._started:
            self._count = None
            return rows_for_each, self._sum.item()
        total = self._wire.sum(count.reshape(1), f"{self._name}.{number}").item()
        self._usual = total / self._wire.size
        return rows_for_each, total

    def start(self, count: torch.Tensor, number: int) -> bool:
        if not self.weighs or not self._usual:
            return False
        self._started, self._count = True, count.item()
        self._sum.fill_(self._count)
        self._handles.append(self._wire.start_sum(self._sum, f"{self._name}.{number}"))
        return True

    def once(self, key: str, values: Sequence[torch.Tensor], report: Callable[..., None]) -> None:
        if key not in self._reported:
            self._reported.add(key)
            with torch.no_grad():
                report(*(each.detach().cpu().numpy() for each in values))

    def note(self, numbers: Sequence[Any]) -> None:
        self._noted.append([n.detach() if isinstance(n, torch.Tensor) else n for n in numbers])

    def noted(self) -> list[np.ndarray[Any, Any]]:
        noted, self._noted = self._noted, []
        return [np.array(list(map(float, each))) for each in noted]
