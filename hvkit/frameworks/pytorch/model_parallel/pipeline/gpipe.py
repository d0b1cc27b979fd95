"""A pipeline under a training loop that does not know of it.

``model(x)`` runs all stages for all micro-batches, and gives the outputs of the whole batch to
every rank, so that the script computes its loss as ever. When ``backward()`` reaches these outputs,
all stages run backward for all micro-batches.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    handed_on,
    refuse_chosen_inputs,
    run_backward,
    same_memory,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import (
    Arriving,
    StageLinks,
    TensorSpec,
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


@dataclass
class _Computed:
    """What a stage has computed for a micro-batch.

    Attributes:
        entry: catches the gradients of what the stage has received.
        output: its tensors.
    """

    entry: StageInput
    output: list[torch.Tensor]


@dataclass
class Pass:
    """A forward pass, as backward needs it.

    Attributes:
        batches: its micro-batches.
        keys: of each, as ``Pipeline.keys`` gives them.
        computed: by stage and micro-batch.
        result: by micro-batch, the model's result on the last stage's rank.
        trained: by tensor of the result, whether a gradient comes back.
        rows: by tensor of the result, how many rows each sample has.
    """

    batches: list[MicroBatch]
    keys: list[Hashable]
    computed: dict[tuple[int, int], _Computed] = field(default_factory=dict)
    result: list[Any] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """The samples of each micro-batch."""
        return [batch.samples for batch in self.batches]


class Pipeline:
    """This rank's part of a pipeline.

    Args:
        staged: runs its stages.
        stages: of the model.
        rank: along the pipeline.
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
        rank: int,
        links: StageLinks,
        microbatches: int,
        divide: Divider,
        around_backward: Callable[[], Callable[[], None]],
        expected: list[torch.Tensor] | None,
        compared: Callable[[], None],
    ) -> None:
        self.staged, self.stages, self.rank, self.links = staged, stages, rank, links
        self.microbatches = microbatches
        self.modules = list(model.modules())
        self._parameters = list(model.parameters())
        self.has_few_bits = any(p.dtype.itemsize < 4 for p in self._parameters)
        self.around_backward = around_backward
        self.mine = stages.of_rank(rank)
        self.last = len(stages) - 1
        # By stage and shapes of a micro-batch: what a stage receives and gives.
        self.specs: dict[tuple[int, Hashable], list[list[TensorSpec]]] = {}
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
            tensors = list(_results_for(anchor(), self, done, *tensors))
        return self.staged.shown(with_tensors(result, tensors))

    def forward(self, batches: list[MicroBatch], seed: int) -> Pass:
        """Run this rank's stages, one after the other, for all micro-batches.

        Args:
            batches: they.
            seed: of the random numbers that all stages draw alike.
        """
        done = Pass(batches, self.keys(batches))
        for stage in self.mine:
            arriving = self._receive_all(stage, done)
            for i, batch in enumerate(batches):
                entry, received = enter(*arriving(i))
                with self.links.times.computing("forward", i, stage):
                    output = self.staged.run(stage, received, batch, seed + i)
                tensors = tensors_in(output)
                if torch.is_grad_enabled():
                    given = [entry.all_specs, list(map(TensorSpec.of, tensors))]
                    self.specs.setdefault((stage, done.keys[i]), given)
                done.computed[stage, i] = _Computed(entry, tensors)
                if stage == self.last:
                    done.result.append(output)
                elif self.stages.rank_of[stage + 1] != self.rank:
                    to = self.stages.rank_of[stage + 1]
                    self.links.send(tensors, to, (stage + 1, done.keys[i]))
        self.links.flush()
        return done

    def _receive_all(
        self, stage: int, done: Pass
    ) -> Callable[[int], tuple[list[TensorSpec], list[torch.Tensor]]]:
        """What gives a stage's input for a micro-batch; the next ones begin to arrive meanwhile."""
        if not stage:
            return lambda i: ([], [])
        source = self.stages.rank_of[stage - 1]
        if source == self.rank:
            return lambda i: handed_on(done.computed[stage - 1, i].output)
        keys = [(stage, key) for key in done.keys]
        started: list[tuple[list[TensorSpec], Arriving]] = []

        def give(i: int) -> tuple[list[TensorSpec], list[torch.Tensor]]:
            # Shapes that are new here come in a message of their own: wait for it when it is due.
            while len(started) < len(keys) and (
                len(started) <= i or self.links.knows(source, keys[len(started)])
            ):
                started.append(self.links.receive(source, keys[len(started)]))
            specs, tensors = started[i]
            return specs, tensors.wait()

        return give

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

    @contextmanager
    def in_modes(self, modes: Sequence[bool]) -> Iterator[None]:
        """Put each module in training or evaluation for a while."""
        now = self.modes()
        if now == tuple(modes):
            yield
            return
        self._set_modes(modes)
        try:
            yield
        finally:
            self._set_modes(now)

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for module, mode in zip(self.modules, modes, strict=True):
            module.training = mode

    def result_of(self, batches: Sequence[MicroBatch]) -> tuple[Any, list[TensorSpec]] | None:
        """The structure of the result for micro-batches, and of its tensors; None if not known."""
        found = self._results.get(tuple(self.keys(batches)))
        return found and found[:2]

    def _on_all_ranks(self, done: Pass) -> tuple[Any, list[torch.Tensor]]:
        """The structure of the whole batch's result, and its tensors, from the last stage."""
        source, key = self.stages.rank_of[self.last], tuple(done.keys)
        whole: list[torch.Tensor] = []
        if self.rank == source:
            parts = [tensors_in(each) for each in done.result]
            done.rows = rows_in(parts, done.sizes, self.staged.kept_in(done.result[0]))
            whole = joined(parts, done.sizes, done.rows)
        known = self._results.get(key)
        if known is None or self.staged.keeps or holds_values(known[0]):
            known = None
            if self.rank == source:
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
        whole = whole or [each.empty(self.links.device) for each in specs]
        self.links.from_rank(source, whole)
        done.result.clear()
        return structure, whole

    def backward(self, done: Pass, gradients: list[list[torch.Tensor | None]]) -> None:
        """Run backward for all micro-batches.

        Args:
            done: the forward pass; its tensors are dropped.
            gradients: by micro-batch, of the model's outputs.
        """
        if not done.computed:
            raise RuntimeError(
                "backward() a second time through a pipeline, whose stages have dropped what they "
                "had kept of forward: retain_graph=True has no effect there. Add the losses, and "
                "call backward() once"
            )
        end = self.around_backward()
        with self.links.times.passing():
            self._run_backward(done, gradients)
        end()

    def _run_backward(self, done: Pass, gradients: list[list[torch.Tensor | None]]) -> None:
        passed: dict[int, list[torch.Tensor]] = {}
        for stage in reversed(self.mine):
            arriving = self._receive_gradients(stage, done, gradients, passed)
            for i in range(len(done.batches)):
                each = done.computed.pop((stage, i))
                theirs = arriving(i)
                with self.links.times.computing("backward", i, stage):
                    run_backward([t for t in each.output if t.requires_grad], theirs)
                    back = each.entry.gradients()
                if stage and self.stages.rank_of[stage - 1] == self.rank:
                    passed[i] = back
                elif stage:
                    self.links.send_plain(back, self.stages.rank_of[stage - 1])
        self.links.flush()

    def _receive_gradients(
        self,
        stage: int,
        done: Pass,
        gradients: list[list[torch.Tensor | None]],
        passed: dict[int, list[torch.Tensor]],
    ) -> Callable[[int], Sequence[torch.Tensor | None]]:
        """What gives the gradients of a stage's trained outputs for a micro-batch."""
        outputs = [done.computed[stage, i].output for i in range(len(done.batches))]
        if stage == self.last:
            return [
                [g for t, g in zip(output, row, strict=True) if t.requires_grad]
                for output, row in zip(outputs, gradients, strict=True)
            ].__getitem__
        source = self.stages.rank_of[stage + 1]
        if source == self.rank:
            return passed.pop
        arriving = [
            self.links.receive_plain([TensorSpec.of(t) for t in output if t.requires_grad], source)
            for output in outputs
        ]
        return lambda i: arriving[i].wait()


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
    def forward(
        ctx: Any, anchor: torch.Tensor, pipeline: Pipeline, done: Pass, *whole: torch.Tensor
    ) -> Any:
        ctx.of = pipeline, done
        ctx.set_materialize_grads(False)
        outputs = tuple(map(same_memory, whole))
        ctx.mark_non_differentiable(
            *(t for t, trained in zip(outputs, done.trained, strict=True) if not trained)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pipeline, done = ctx.of
        with pipeline.links.in_call():
            pipeline.backward(done, gradients_of_parts(gradients, done.sizes, done.rows))
        return (None, None, None, *(None for _ in gradients))


_results_for: Callable[..., tuple[torch.Tensor, ...]] = Results.apply
