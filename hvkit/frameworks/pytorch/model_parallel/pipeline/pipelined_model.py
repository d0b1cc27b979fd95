"""A pipeline under a training loop that does not know of it.

``model(x)`` runs all stages for all micro-batches, and gives the outputs of the whole batch to
every rank, so that the script computes its loss as ever. When ``backward()`` reaches these outputs,
all stages run backward for all micro-batches.
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
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import (
    StageLinks,
    like,
    spec_of,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import Stages
from hvkit.frameworks.pytorch.model_parallel.tensor.flow import is_cache
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    Slot,
    call_key,
    structure_of,
    tensors_in,
    with_tensors,
)
from hvkit.pipeline.channel import TensorSpec
from hvkit.pipeline.gpipe import GPipe, Specs


class Pass:
    """A forward pass, as backward needs it; computes the stages of this rank.

    Args:
        pipeline: this rank's part.
        batches: its micro-batches.
        seed: of the random numbers that all stages draw alike.

    Attributes:
        keys: of each micro-batch, as ``Pipeline.keys`` gives them.
        sizes: of each, the number of samples.
        result: by micro-batch, the model's result on the last stage's rank.
        trained: by tensor of the result, whether a gradient comes back.
        rows: by tensor of the result, how many rows each sample has.
    """

    def __init__(self, pipeline: Pipeline, batches: list[MicroBatch], seed: int) -> None:
        self._pipeline, self._batches, self._seed = pipeline, batches, seed
        self.keys = pipeline.keys(batches)
        self.sizes = [batch.samples for batch in batches]
        self.result: list[Any] = []
        self.trained: list[bool] = []
        self.rows: list[int] = []
        # By stage and micro-batch, what catches the gradients of its input, and its output.
        self._computed: dict[tuple[int, int], tuple[StageInput, list[torch.Tensor]]] = {}
        self.order = GPipe(pipeline.links, pipeline.stages.rank_of, self.keys)
        self.order.forward(self)

    def run(
        self, stage: int, part: int, specs: Specs, tensors: list[torch.Tensor]
    ) -> tuple[Specs, list[torch.Tensor]]:
        pipeline, batch = self._pipeline, self._batches[part]
        entry, received = enter(specs, tensors)
        output = pipeline.staged.run(stage, received, batch, self._seed + part)
        tensors = tensors_in(output)
        given = list(map(spec_of, tensors))
        if torch.is_grad_enabled():
            pipeline.specs.setdefault((stage, self.keys[part]), (specs, given))
        self._computed[stage, part] = entry, tensors
        if stage == pipeline.last:
            self.result.append(output)
        return given, tensors

    def grad(self, stage: int, part: int, gradients: list[torch.Tensor | None]) -> list[Any]:
        entry, output = self._computed.pop((stage, part))
        trained = (t for t in output if t.requires_grad)
        pairs = [(t, g) for t, g in zip(trained, gradients, strict=True) if g is not None]
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
        with pipeline.links.in_call():
            end = pipeline.around_backward()
            with pipeline.links.times.passing():
                self.order.backward(self, gradients_of_parts(gradients, self.sizes, self.rows))
            end()


class Pipeline:
    """This rank's part of a pipeline.

    Args:
        staged: runs its stages.
        stages: of the model.
        links: to the other ranks.
        microbatches: how many a batch is divided into.
        divide: divides it.
        around_backward: called before backward, and returns what to call after it.
        expected: what the first batch must give; only the last stage's rank may know.
        compared: called when it has been compared, and before later batches.
    """

    def __init__(
        self,
        model: nn.Module,
        staged: StagedForward,
        stages: Stages,
        links: StageLinks,
        microbatches: int,
        divide: Divider,
        around_backward: Callable[[], Callable[[], None]],
        expected: list[torch.Tensor] | None,
        compared: Callable[[], None],
    ) -> None:
        self.staged, self.stages, self.links = staged, stages, links
        self.microbatches = microbatches
        self.modules = list(model.modules())
        self._parameters = list(model.parameters())
        self.has_few_bits = any(p.dtype.itemsize < 4 for p in self._parameters)
        self.around_backward = around_backward
        self.own = stages.of_rank(links.rank)
        self.last = len(stages) - 1
        # By stage and shapes of a micro-batch: what a stage receives and gives.
        self.specs: dict[tuple[int, Hashable], tuple[Specs, Specs]] = {}
        self._states: dict[Hashable, int] = {}
        self._results: dict[Hashable, tuple[Any, list[TensorSpec], list[int]]] = {}
        self.divide = divide
        refuse_chosen_inputs()
        # Of the next pass; the same on all ranks of the pipeline.
        self.seed = 0
        self._comparison, self._compared = ResultComparison(self, expected), compared

    def __call__(self, args: Any, kwargs: Any, batches: list[MicroBatch] | None = None) -> Any:
        """The result of the model's forward for a batch; a collective of the pipeline.

        Args:
            args, kwargs: of the call.
            batches: its micro-batches; None for those of a batch that need not be equal.
        """
        _refuse_cache(kwargs)
        batches = batches or self.divide(args, kwargs, self.microbatches)
        self._comparison.check(args, kwargs, batches)
        self._compared()
        done = self.forward(batches, self.seed)
        result, tensors = self._on_all_ranks(done)
        if torch.is_grad_enabled() and any(done.trained):
            tensors = list(_results_for(anchor(), done, *tensors))
        return self.staged.shown(with_tensors(result, tensors))

    def forward(self, batches: list[MicroBatch], seed: int) -> Pass:
        """Run this rank's stages for micro-batches, with random numbers from a seed."""
        return Pass(self, batches, seed)

    def keys(self, batches: Sequence[MicroBatch]) -> list[Hashable]:
        """By micro-batch, what shapes that stages give, and returning gradients, depend on."""
        state = (
            torch.is_grad_enabled(),
            self.modes(),
            tuple(p.requires_grad for p in self._parameters),
            autocast_state(),
            self.staged.filled(),
        )
        # Long, and the same in most passes: a number stands for it.
        number = self._states.setdefault(state, len(self._states))
        return [(number, call_key(batch.args, batch.kwargs)) for batch in batches]

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training."""
        return tuple(module.training for module in self.modules)

    def result_of(self, batches: Sequence[MicroBatch]) -> tuple[Any, list[TensorSpec]] | None:
        """The structure of the result for micro-batches, and of its tensors; None if not known."""
        found = self._results.get(tuple(self.keys(batches)))
        return found and found[:2]

    def _on_all_ranks(self, done: Pass) -> tuple[Any, list[torch.Tensor]]:
        """The structure of the whole batch's result, and its tensors, from the last stage."""
        source, key = self.stages.rank_of[self.last], tuple(done.keys)
        whole: list[torch.Tensor] = []
        if self.links.rank == source:
            parts = [tensors_in(each) for each in done.result]
            done.rows = rows_in(parts, done.sizes, self.staged.kept_in(done.result[0]))
            whole = joined(parts, done.sizes, done.rows)
        known = self._results.get(key)
        if known is None or self.staged.keeps or holds_values(known[0]):
            known = None
            if self.links.rank == source:
                refuse_other_results(done.result[0])
                trained = [t.requires_grad for t in tensors_in(done.result[0])]
                specs = [
                    TensorSpec(tuple(t.shape), t.dtype, grad)
                    for t, grad in zip(whole, trained, strict=True)
                ]
                known = structure_of(done.result[0]), specs, done.rows
            self._results[key] = self.links.object_from_rank(source, known)
        structure, specs, done.rows = self._results[key]
        done.trained = [each.trained for each in specs]
        whole = whole or [like(each, self.links.device) for each in specs]
        self.links.broadcast(source, whole)
        done.result.clear()
        return structure, whole


def _refuse_cache(kwargs: Any) -> None:
    """Raise for a cache of keys and values: each rank would fill that of its own stage alone.

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
    """Whether a result has values that are no tensors, and may differ from call to call."""
    return any(leaf is not None and not isinstance(leaf, Slot) for leaf in tree_leaves(structure))


def refuse_other_results(result: Any) -> None:
    """Raise for results in which tensors are hidden.

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


class Results(torch.autograd.Function):
    """The model's outputs for the script, whose backward runs all stages backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, done: Pass, *whole: torch.Tensor) -> Any:
        ctx.done = done
        ctx.set_materialize_grads(False)
        outputs = tuple(map(same_memory, whole))
        ctx.mark_non_differentiable(
            *(t for t, trained in zip(outputs, done.trained, strict=True) if not trained)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.done.backward(gradients)
        return (None, None, *(None for _ in gradients))


_results_for: Callable[..., tuple[torch.Tensor, ...]] = Results.apply
