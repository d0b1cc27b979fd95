"""A Keras model on PyTorch in a pipeline; averages in backward passes.

Gradients go to the ``grad`` of variables, as ``backward()`` leaves them. Messages between GPUs are
those of PyTorch's pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import torch
from keras.src.backend.torch.core import get_device

from hvkit.frameworks.keras.as_pytorch import ModelWeights, PyTorchSampleCounts, step_of
from hvkit.frameworks.keras.fit import FitState
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.on_pytorch import KerasOnPyTorchPort
from hvkit.frameworks.keras.optimizers import updating
from hvkit.frameworks.keras.pipeline.divided_model import PipelinePort
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.tensors import Gradients, MailboxChannel, Tensors
from hvkit.frameworks.pytorch import PyTorchPort, torch_distributed
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.mesh import MeshOptions, rows
from hvkit.pipeline.messages import Channel
from hvkit.runtime import all_ranks
from hvkit.sync.port import Record, Sync, remember


class PyTorchTensors(Tensors):
    def channel(self, mesh: MeshOptions, name: str) -> Channel:
        device = torch.device(get_device())
        if sends_from_host(device):
            return MailboxChannel(mesh.position.members("pipeline"), name)
        return TorchChannel(
            torch_distributed.group_of(tuple(rows(mesh.mesh, "pipeline"))), device, name
        )

    def tracer(self) -> str:
        return "torch.compile" if torch.compiler.is_compiling() else ""

    def is_recording(self) -> bool:
        return torch.is_grad_enabled()

    def is_dense(self, value: Any) -> bool:
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        return dense and not value.is_nested

    def recorded(self, run: Callable[[], Any], watched: Sequence[Any]) -> tuple[Any, Gradients]:
        for each in watched:
            each.requires_grad_()
        with torch.enable_grad():
            results = run()

        def gradients(targets: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            pairs = [(t, g) for t, g in zip(targets, given, strict=True) if t.requires_grad]
            if not pairs or not watched:
                return [None] * len(watched)
            found = torch.autograd.grad(
                [t for t, _ in pairs], list(watched), [g for _, g in pairs], allow_unused=True
            )
            return list(found)

        return results, gradients

    def connected(
        self,
        results: Sequence[Any],
        variables: Sequence[Any],
        backward: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        values = (v._value for v in variables)
        return list(_Operation.apply(results, backward, *values))  # type: ignore[no-untyped-call]

    def norm_of(self, gradient: Any) -> float:
        return float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))

    def add_gradients(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        begin: Callable[[], Callable[[], None]],
    ) -> list[Any]:
        end = begin()
        pairs = [(v._value, g) for v, g in zip(variables, gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
        end()
        return [v._value.grad for v in variables]

    def remainder(self, variable: Any, total: Any) -> Any:
        before = variable._value.grad
        if total is before or total is None:
            return None
        return total if before is None else total - before

    def placeholder_of(self, variable: Any) -> Any:
        # One element, as the norm that stands for the gradient: not a number, for scripts that
        # compute with weights which are not there.
        dtype = variable._dtype
        value = math.nan if keras.backend.is_float_dtype(dtype) else 0
        return keras.ops.full((1,), value, dtype)

    def set_value(self, variable: Any, values: Any) -> None:
        values = keras.ops.convert_to_tensor(values)
        if variable._value is None:
            variable._initialize(values)
        else:  # the parameter stays the same
            variable._value.data = values
            variable._value.grad = None


def sends_from_host(device: torch.device) -> bool:
    """Whether to send from the host's memory, by MPI: faster than Gloo for small tensors."""
    return device.type == "cpu"


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Sequence[Any], backward: Any, *variables: Any) -> Any:
        ctx.of_variables = backward
        found = tuple(t.detach().view_as(t) for t in results)
        ctx.mark_non_differentiable(*(t for t in found if not t.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return None, None, *ctx.of_variables(given)


class KerasOnPyTorchMeshPort(PipelinePort, KerasOnPyTorchPort):
    """PyTorch's port averages gradients at the end of each backward pass."""

    tensors = PyTorchTensors()

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        if self.group.size > 1:
            self._samples = PyTorchSampleCounts(self.group.numbered("hvkit"), self.group)
        records = self._attach(FitState(all_ranks(), self._compare))
        if self._samples:
            use_counts_of_all_ranks(self._whole, self._samples)
        return records, None

    def _take_part(self, pipelined: PipelinedModel) -> None:
        super()._take_part(pipelined)
        if self.group.size == 1 or not self.model.trainable_variables:
            return
        # All variables have their weights before an update.
        steps = [step_of(each, lambda variables: None) for each in updating(self.optimizers)]
        for step in steps:
            step.may_update(self.model.trainable_variables)
        port = PyTorchPort([ModelWeights(self.model)], steps, replace(self.options, mesh=None))
        reducer, sync = port.average_in_passes()
        if self._samples:
            reducer.weigh(self._samples.weight)
        remember(self.models, [], sync, self.group if sync else None)

        def around_backward() -> Callable[[], None]:
            reducer.begin_pass()
            return reducer.end_pass

        pipelined.around_backward = around_backward
