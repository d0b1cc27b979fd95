"""A pipeline under a training loop that does not know of it.

``model(x)`` runs all stages for all micro-batches, and returns the outputs of the whole batch on
every rank, where the script computes its loss. When ``backward()`` reaches these outputs, all
stages run backward for all micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import (
    Divider,
    MicroBatch,
    gradients_of_parts,
    joined,
    rows_in,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.result_comparison import ResultComparison
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_gradients import (
    StageInput,
    anchor,
    autocast_state,
    enter,
    refuse_chosen_inputs,
    same_memory,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import ModuleStages
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_channel import (
    TorchChannel,
    empty,
    spec_of,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.linear_trace import is_cache
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    Slot,
    call_key,
    structure_of,
    tensors_in,
    with_tensors,
)
from hvkit.pipeline.channel import TensorSpec
from hvkit.pipeline.gpipe import GPipe, Specs


class ForwardPass:
    """Computes this rank's stages for one batch, and keeps what the backward pass needs.

    Args:
        pipeline: this rank's part.
        batches: its micro-batches.
        seed: of the random numbers that are the same in all stages.

    Attributes:
        keys: of each micro-batch, from ``Pipeline.keys``.
        sizes: of each micro-batch, the number of samples.
        result: by micro-batch, the model's result on the last stage's rank.
        requires_grad: by tensor of the result, whether a gradient comes back.
        rows: by tensor of the result, how many rows each sample has.
    """

    def __init__(self, pipeline: Pipeline, batches: list[MicroBatch], seed: int) -> None:
        self._pipeline, self._batches, self._seed = pipeline, batches, seed
        self.keys = pipeline.keys(batches)
        self.sizes = [batch.samples for batch in batches]
        self.result: list[Any] = []
        self.requires_grad: list[bool] = []
        self.rows: list[int] = []
        # By stage and micro-batch: catches the gradients of its input; its output.
        self._computed: dict[tuple[int, int], tuple[StageInput, list[torch.Tensor]]] = {}
        self.order = GPipe(pipeline.channel, pipeline.stages.rank_of, self.keys)
        self.order.forward(self)

    def run(
        self, stage: int, microbatch: int, specs: Specs, tensors: list[torch.Tensor]
    ) -> tuple[Specs, list[torch.Tensor]]:
        pipeline, batch = self._pipeline, self._batches[microbatch]
        entry, received = enter(specs, tensors)
        output = pipeline.staged.run(stage, received, batch, self._seed + microbatch)
        tensors = tensors_in(output)
        output_specs = list(map(spec_of, tensors))
        if torch.is_grad_enabled():
            pipeline.specs.setdefault((stage, self.keys[microbatch]), (specs, output_specs))
        self._computed[stage, microbatch] = entry, tensors
        if stage == pipeline.last:
            self.result.append(output)
        return output_specs, tensors

    def grad(self, stage: int, microbatch: int, gradients: list[torch.Tensor | None]) -> list[Any]:
        entry, output = self._computed.pop((stage, microbatch))
        targets = (t for t in output if t.requires_grad)
        pairs = [(t, g) for t, g in zip(targets, gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return entry.gradients()

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run backward for all micro-batches.

        Args:
            gradients: of the model's outputs for the batch.
        """
        self.order.require_first_backward()
        pipeline = self._pipeline
        with pipeline.channel.in_call():
            end = pipeline.around_backward()
            with pipeline.channel.times.passing():
                self.order.backward(self, gradients_of_parts(gradients, self.sizes, self.rows))
            end()


class Pipeline:
    """This rank's part of a pipeline.

    Args:
        staged: runs its stages.
        stages: of the model.
        channel: to the other ranks.
        microbatches: how many a batch is divided into.
        divide: divides it.
        around_backward: called before backward; returns what to call after it.
        expected: the result for the first batch; only the last stage's rank may know it.
        compared: called after the comparison with it, and before later batches.
    """

    def __init__(
        self,
        model: nn.Module,
        staged: StagedForward,
        stages: ModuleStages,
        channel: TorchChannel,
        microbatches: int,
        divide: Divider,
        around_backward: Callable[[], Callable[[], None]],
        expected: list[torch.Tensor] | None,
        compared: Callable[[], None],
    ) -> None:
        self.staged, self.stages, self.channel = staged, stages, channel
        self.microbatches = microbatches
        self.modules = list(model.modules())
        self._parameters = list(model.parameters())
        self.has_few_bits = any(p.dtype.itemsize < 4 for p in self._parameters)
        self.around_backward = around_backward
        self.own = stages.of_rank(channel.rank)
        self.last = len(stages) - 1
        # By stage and shapes of a micro-batch: the specs of the stage's inputs and outputs.
        self.specs: dict[tuple[int, Hashable], tuple[Specs, Specs]] = {}
        self._states: dict[Hashable, int] = {}
        self._results: dict[Hashable, tuple[Any, list[TensorSpec], list[int]]] = {}
        self.divide = divide
        refuse_chosen_inputs()
        # Seeds the next pass; the same on all ranks of the pipeline.
        self.seed = 0
        self._comparison, self._compared = ResultComparison(self, expected), compared

    def __call__(self, args: Any, kwargs: Any, batches: list[MicroBatch] | None = None) -> Any:
        """The result of the model's forward for a batch; a collective of the pipeline.

        Args:
            args, kwargs: of the call.
            batches: its micro-batches; by default of sizes that need not be equal.
        """
        _refuse_cache(kwargs)
        batches = batches or self.divide(args, kwargs, self.microbatches)
        self._comparison.check(args, kwargs, batches)
        self._compared()
        done = self.forward(batches, self.seed)
        result, tensors = self._on_all_ranks(done)
        if torch.is_grad_enabled() and any(done.requires_grad):
            tensors = list(_results_for(anchor(), done, *tensors))
        return self.staged.result_of(with_tensors(result, tensors))

    def forward(self, batches: list[MicroBatch], seed: int) -> ForwardPass:
        """Run this rank's stages for micro-batches, with random numbers from a seed."""
        return ForwardPass(self, batches, seed)

    def keys(self, batches: Sequence[MicroBatch]) -> list[Hashable]:
        """By micro-batch, what the shapes of outputs and gradients depend on."""
        state = (
            torch.is_grad_enabled(),
            self.modes(),
            tuple(p.requires_grad for p in self._parameters),
            autocast_state(),
            self.staged.filled(),
        )
        # The state is long, and the same in most passes: use a number instead.
        number = self._states.setdefault(state, len(self._states))
        return [(number, call_key(batch.args, batch.kwargs)) for batch in batches]

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training."""
        return tuple(module.training for module in self.modules)

    def result_of(self, batches: Sequence[MicroBatch]) -> tuple[Any, list[TensorSpec]] | None:
        """The structure of the result, and the specs of its tensors; None if not known yet."""
        found = self._results.get(tuple(self.keys(batches)))
        return found and found[:2]

    def _on_all_ranks(self, done: ForwardPass) -> tuple[Any, list[torch.Tensor]]:
        """The structure of the whole batch's result, and its tensors, from the last stage."""
        source, key = self.stages.rank_of[self.last], tuple(done.keys)
        whole: list[torch.Tensor] = []
        if self.channel.rank == source:
            parts = [tensors_in(each) for each in done.result]
            done.rows = rows_in(parts, done.sizes, self.staged.side_outputs_in(done.result[0]))
            whole = joined(parts, done.sizes, done.rows)
        known = self._results.get(key)
        if known is None or self.staged.has_side_outputs or holds_values(known[0]):
            known = None
            if self.channel.rank == source:
                refuse_other_results(done.result[0])
                of_part = tensors_in(done.result[0])
                specs = [
                    dataclasses.replace(spec_of(t), requires_grad=part.requires_grad)
                    for t, part in zip(whole, of_part, strict=True)
                ]
                known = structure_of(done.result[0]), specs, done.rows
            self._results[key] = self.channel.object_from_rank(source, known)
        structure, specs, done.rows = self._results[key]
        done.requires_grad = [each.requires_grad for each in specs]
        whole = whole or [empty(each, self.channel.device) for each in specs]
        self.channel.broadcast(source, whole)
        done.result.clear()
        return structure, whole


def _refuse_cache(kwargs: Any) -> None:
    """Raise for a cache of keys and values: each rank would fill it for its own stage only.

    Raises:
        ValueError: names the argument.
    """
    for name, value in kwargs.items():
        if is_cache(name) and not isinstance(value, bool | torch.Tensor | None):
            raise ValueError(
                f"{name}= is a cache of what all layers have computed, and each rank of a pipeline "
                "computes some of them: pass use_cache=False; inside `with hvkit.settled(model):`, "
                "which every rank enters, model.generate() has the whole model"
            )


def holds_values(structure: Any) -> bool:
    """Whether a result has values other than tensors, which may differ from call to call."""
    return any(leaf is not None and not isinstance(leaf, Slot) for leaf in tree_leaves(structure))


def refuse_other_results(result: Any) -> None:
    """Raise for results in which PyTorch sees no tensors.

    Raises:
        ValueError: names the class.
    """
    for leaf in tree_leaves(result):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            raise ValueError(
                f"the model returns a {type(leaf).__name__}, in which PyTorch sees no tensors, so "
                "the stages of a pipeline cannot pass them on: return a tensor, tuple, list or "
                "dict, or register the class with torch.utils._pytree.register_pytree_node"
            )


class _Results(torch.autograd.Function):
    """Returns the model's outputs to the script; its backward runs all stages backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, done: ForwardPass, *whole: torch.Tensor) -> Any:
        ctx.done = done
        ctx.set_materialize_grads(False)
        outputs = tuple(map(same_memory, whole))
        ctx.mark_non_differentiable(
            *(t for t, needs in zip(outputs, done.requires_grad, strict=True) if not needs)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.done.backward(gradients)
        return (None, None, *(None for _ in gradients))


_results_for: Callable[..., tuple[torch.Tensor, ...]] = _Results.apply
