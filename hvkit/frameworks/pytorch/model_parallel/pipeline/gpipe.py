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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hvkit.frameworks.pytorch.model_parallel.dry_run import (
    Slot,
    attributes_kept,
    call_key,
    copied_call,
    structure_of,
    tensors_in,
    with_tensors,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import (
    Divider,
    MicroBatch,
    gradients_of_parts,
    ignored_unevenly,
    joined,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import (
    Arriving,
    StageLinks,
    TensorSpec,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import Stages
from hvkit.main_rank import warn_once

# How far apart the outputs of a batch and of its micro-batches may be, relative to the largest.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_FEW_BITS = 5e-2


@dataclass
class _Computed:
    """What a stage has computed for a micro-batch.

    Attributes:
        entry: catches the gradients of what the stage has received.
        output: its tensors.
    """

    entry: _StageInput
    output: list[torch.Tensor]


@dataclass
class Pass:
    """A forward pass, as backward needs it.

    Attributes:
        batches: its micro-batches.
        computed: by stage and micro-batch.
        result: by micro-batch, the model's result on the last stage's rank.
        trained: by tensor of the result, whether a gradient comes back.
    """

    batches: list[MicroBatch]
    computed: dict[tuple[int, int], _Computed] = field(default_factory=dict)
    result: list[Any] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

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
    ) -> None:
        self.staged, self.stages, self.rank, self.links = staged, stages, rank, links
        self.microbatches = microbatches
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self.around_backward = around_backward
        self.mine = stages.of_rank(rank)
        self.last = len(stages) - 1
        # By stage and shapes of a micro-batch: what a stage receives and gives.
        self.specs: dict[tuple[int, Hashable], list[list[TensorSpec]]] = {}
        self._results: dict[Hashable, tuple[Any, list[TensorSpec]]] = {}
        self.divide = divide
        # Of the next pass; the same on all ranks of the pipeline.
        self.seed = 0
        # Calls in several micro-batches, and whether one with targets left out was compared.
        self._calls = 0
        self._compared_ignored = False

    def __call__(self, args: Any, kwargs: Any, batches: list[MicroBatch] | None = None) -> Any:
        """The result of the model's forward for a batch; a collective of the pipeline.

        Args:
            args, kwargs: of the call.
            batches: its micro-batches; None for those of a batch that need not be equal.
        """
        batches = batches or self.divide(args, kwargs, self.microbatches)
        if len(batches) > 1 and self._compares(args, kwargs, batches):
            self._require_independent_samples(args, kwargs, batches)
        done = self.forward(batches, self.seed)
        result, tensors = self._on_all_ranks(done)
        if torch.is_grad_enabled() and any(done.trained):
            tensors = list(_results_for(_anchor(), self, done, *tensors))
        return with_tensors(result, tensors)

    def forward(self, batches: list[MicroBatch], seed: int) -> Pass:
        """Run this rank's stages, one after the other, for all micro-batches.

        Args:
            batches: they.
            seed: of the random numbers that all stages draw alike.
        """
        done = Pass(batches)
        for stage in self.mine:
            arriving = self._receive_all(stage, batches, done)
            for i, batch in enumerate(batches):
                entry, received = enter(*arriving(i))
                with self.links.times.computing("forward", i, stage):
                    output = self.staged.run(stage, received, batch, seed + i)
                tensors = tensors_in(output)
                if torch.is_grad_enabled():
                    given = [entry.all_specs, list(map(TensorSpec.of, tensors))]
                    self.specs.setdefault((stage, self.key(batch)), given)
                done.computed[stage, i] = _Computed(entry, tensors)
                if stage == self.last:
                    done.result.append(output)
                elif self.stages.rank_of[stage + 1] != self.rank:
                    to = self.stages.rank_of[stage + 1]
                    self.links.send(tensors, to, self._stage_key(stage + 1, batch))
        self.links.flush()
        return done

    def _receive_all(
        self, stage: int, batches: Sequence[MicroBatch], done: Pass
    ) -> Callable[[int], tuple[list[TensorSpec], list[torch.Tensor]]]:
        """What gives a stage's input for a micro-batch; the next ones begin to arrive meanwhile."""
        if not stage:
            return lambda i: ([], [])
        source = self.stages.rank_of[stage - 1]
        if source == self.rank:
            return lambda i: _handed_on(done.computed[stage - 1, i].output)
        keys = [self._stage_key(stage, batch) for batch in batches]
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

    def key(self, batch: MicroBatch) -> Hashable:
        """What the shapes of all that stages give depend on, and which gradients come back."""
        return (
            torch.is_grad_enabled(),
            self.modes(),
            tuple(p.requires_grad for p in self._parameters),
            autocast_state(),
            call_key(batch.args, batch.kwargs),
        )

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training."""
        return tuple(module.training for module in self._modules)

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
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode

    def _stage_key(self, stage: int, batch: MicroBatch) -> Hashable:
        return stage, self.key(batch)

    def result_of(self, batches: Sequence[MicroBatch]) -> tuple[Any, list[TensorSpec]] | None:
        """The structure of the result for micro-batches, and of its tensors; None if not known."""
        return self._results.get(tuple(map(self.key, batches)))

    def _on_all_ranks(self, done: Pass) -> tuple[Any, list[torch.Tensor]]:
        """The structure of the whole batch's result, and its tensors, from the last stage."""
        source, key = self.stages.rank_of[self.last], tuple(map(self.key, done.batches))
        whole: list[torch.Tensor] = []
        if self.rank == source:
            whole = joined([tensors_in(each) for each in done.result], done.sizes)
        if key not in self._results or holds_values(self._results[key][0]):
            known = None
            if self.rank == source:
                refuse_other_results(done.result[0])
                trained = [t.requires_grad for t in tensors_in(done.result[0])]
                specs = [
                    TensorSpec(tuple(t.shape), t.dtype, grad)
                    for t, grad in zip(whole, trained, strict=True)
                ]
                known = structure_of(done.result[0]), specs
            self._results[key] = self.links.object_from_rank(source, known)
        structure, specs = self._results[key]
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

    def _compares(self, args: Any, kwargs: Any, batches: Sequence[MicroBatch]) -> bool:
        """Whether to compare the micro-batches of this call with the whole batch.

        The first ones are. A model that computes its loss may give another mean later, where
        padding begins: then also after 2, 4, 8, ... calls, and where targets are left out first.
        """
        self._calls += 1
        known = self.result_of(batches)
        if self._calls == 1 or known is None or all(spec.shape for spec in known[1]):
            return self._calls == 1
        ignored = not self._compared_ignored and ignored_unevenly(
            tensors_in((args, kwargs)), [batch.samples for batch in batches]
        )
        self._compared_ignored |= ignored
        return ignored or self._calls & (self._calls - 1) == 0

    @torch.no_grad()
    def _require_independent_samples(
        self, args: Any, kwargs: Any, batches: list[MicroBatch]
    ) -> None:
        """Compare what micro-batches give with what the whole batch gives; a collective.

        Layers are in evaluation meanwhile: then dropout and batch norm do not depend on the batch.
        A model whose results are random even then cannot be compared.

        Raises:
            ValueError: the results differ.
        """
        source, found = self.stages.rank_of[self.last], None
        devices = [self.links.device] if self.links.device.type == "cuda" else []
        caches = torch.is_autocast_cache_enabled()
        buffers = {b: b.clone() for module in self._modules for b in module.buffers(recurse=False)}
        try:
            # Weights that autocast casts here have no gradient, and must not be used again.
            torch.set_autocast_cache_enabled(False)
            evaluation = [False] * len(self._modules)
            with (
                torch.random.fork_rng(devices),
                self.in_modes(evaluation),
                attributes_kept(self._modules),
            ):
                parts, *whole = (
                    self.forward(self.divide(*copied_call(args, kwargs), count=count), seed)
                    for seed, count in enumerate((len(batches), 1, 1))
                )
            if self.rank == source:
                once, again = (tensors_in(each.result[0]) for each in whole)
                mean = joined([tensors_in(each) for each in parts.result], parts.sizes)
                found = _largest_difference(mean, once), _largest_difference(again, once)
        finally:
            torch.set_autocast_cache_enabled(caches)
            for buffer, value in buffers.items():
                buffer.copy_(value)
        text, by_chance = self.links.object_from_rank(source, found)
        if text and by_chance:
            warn_once(
                "random results",
                "the model's results are random in evaluation, too, so hvkit cannot see whether "
                "micro-batches give the result of the whole batch: its samples must not depend on "
                "each other, and its inputs have the batch as their first dimension",
            )
        elif text:
            raise ValueError(
                f"in {len(batches)} micro-batches the model gives another result than for the "
                f"whole batch: {text}. Its samples must not depend on each other, its inputs must "
                "have the batch as their first dimension (batch_first=True in recurrent layers), "
                "and a loss that it computes itself must be a mean over samples, without padding: "
                "compute the loss outside of the model, or pass microbatches=1"
            )


def _largest_difference(found: list[torch.Tensor], whole: list[torch.Tensor]) -> str | None:
    """What is wrong with outputs; None if they are equal but for rounding."""
    for number, (mine, theirs) in enumerate(zip(found, whole, strict=True)):
        if mine.shape != theirs.shape:
            return f"output {number} is of shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
        if not mine.is_floating_point() or not mine.numel():
            if not torch.equal(mine, theirs):
                return f"output {number} holds other integers"
            continue
        scale = theirs.double().abs().max()
        relative = float((mine.double() - theirs.double()).abs().max() / scale.clamp(min=1e-30))
        if relative > _TOLERANCE.get(mine.dtype, _TOLERANCE_OF_FEW_BITS):
            return f"output {number} by {relative:.1e} of its largest value"
    return None


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


def _handed_on(tensors: list[torch.Tensor]) -> tuple[list[TensorSpec], list[torch.Tensor]]:
    """A stage's output as the input of the next one on the same rank."""
    return list(map(TensorSpec.of, tensors)), [t.detach() for t in tensors]


def run_backward(outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """``backward()`` from those outputs that have a gradient."""
    pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether autocast is on, and its dtype, for each kind of device."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def autocast_as(state: Sequence[tuple[bool, torch.dtype]]) -> ExitStack:
    """Autocast as ``autocast_state`` has found it."""
    stack = ExitStack()
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), state, strict=True):
        if enabled or torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
    return stack


class _StageInput:
    """Catches the gradients of what a stage receives.

    Received tensors are no leaves for autograd, since a stage may begin with an operation in place.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        self.all_specs = list(specs)
        self.specs = [each for each in specs if each.trained]
        self.tensors = [t for t, each in zip(tensors, specs, strict=True) if each.trained]
        self.caught: list[torch.Tensor | None] = [None] * len(self.specs)
        self._device = tensors[0].device if tensors else torch.device("cpu")

    def gradients(self) -> list[torch.Tensor]:
        """Of each tensor that gets one; zeros if the stage has not used it."""
        return [
            torch.zeros(each.shape, dtype=each.dtype, device=self._device) if g is None else g
            for g, each in zip(self.caught, self.specs, strict=True)
        ]


class _Received(torch.autograd.Function):
    """The received tensors that need a gradient, as results of an operation."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: _StageInput) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        tensors, entry.tensors = entry.tensors, []
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.entry.caught = list(gradients)
        return None, None


_received_by: Callable[..., tuple[torch.Tensor, ...]] = _Received.apply


def enter(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]
) -> tuple[_StageInput, list[torch.Tensor]]:
    """The input of a stage, and what catches its gradients.

    Args:
        specs: of the tensors.
        tensors: new ones, which nobody else holds.
    """
    entry = _StageInput(specs, tensors)
    if not entry.specs or not torch.is_grad_enabled():
        return entry, list(tensors)
    trained = iter(_received_by(_anchor(), entry))
    return entry, [
        next(trained) if each.trained else t for each, t in zip(specs, tensors, strict=True)
    ]


def _anchor() -> torch.Tensor:
    """Makes autograd record an operation that has no inputs."""
    return torch.empty(0, requires_grad=True)


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
            pipeline.backward(done, gradients_of_parts(gradients, done.sizes))
        return (None, None, None, *(None for _ in gradients))


_results_for: Callable[..., tuple[torch.Tensor, ...]] = Results.apply


def same_memory(t: torch.Tensor) -> torch.Tensor:
    """The same values in the same memory, but for autograd no view."""
    alias: torch.Tensor = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias.set_(t)  # type: ignore[call-overload,no-any-return]
