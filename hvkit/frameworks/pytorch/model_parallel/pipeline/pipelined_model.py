"""A pipeline under a training loop that does not know of it.

``model(x)`` runs all stages for all micro-batches, and returns the outputs of the whole batch on
every rank, where the script computes its loss. When ``backward()`` reaches these outputs, all
stages run backward for all micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import autograd, nn
from torch.utils._pytree import tree_leaves

from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import (
    Divider,
    MicroBatch,
    ResultComparison,
    gradients_of_parts,
    joined,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import ModuleStages
from hvkit.frameworks.pytorch.model_parallel.tensor.linear_trace import is_cache
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    Slot,
    call_key,
    structure_of,
    tensors_in,
    with_tensors,
)
from hvkit.frameworks.pytorch.refusals import is_in_pipeline
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel, empty
from hvkit.pipeline.gpipe import GPipe, Specs
from hvkit.pipeline.messages import TensorSpec, in_pass


class _Received(torch.autograd.Function):
    """A received tensor as the result of an operation on a leaf: a stage may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        return hidden[0]  # in a list, so that autograd does not take it for an input

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.contiguous(), None


received_for: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = _Received.apply


def enter(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Leaves without memory that get the gradients of a stage's input, and the input."""
    if not torch.is_grad_enabled():
        return [], list(tensors)
    leaves, entered = [], []
    for spec, t in zip(specs, tensors, strict=True):
        if spec.requires_grad:
            leaves.append(t.new_zeros(()).expand(t.shape).requires_grad_())
            t = received_for(leaves[-1], [t])
        entered.append(t)
    return leaves, entered


def anchor() -> torch.Tensor:
    """An input for an operation that autograd would not record without one."""
    return torch.empty(0, requires_grad=True)


def same_memory(t: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory, which autograd does not see as a view."""
    alias: torch.Tensor = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias.set_(t)  # type: ignore[call-overload,no-any-return]


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """By kind of device, whether autocast is on, and its dtype."""
    return tuple(
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in ("cpu", "cuda")
    )


def autocast_as(state: Sequence[tuple[bool, torch.dtype]]) -> ExitStack:
    """A context with the settings that ``autocast_state`` has returned."""
    stack = ExitStack()
    for device_type, (enabled, dtype) in zip(("cpu", "cuda"), state, strict=True):
        if enabled or torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, dtype, enabled=enabled))
    return stack


class ForwardPass:
    """Computes this rank's stages for one batch, and keeps what the backward pass needs.

    ``result`` is the model's, by micro-batch, on the last stage's rank. By tensor of it, ``rows``
    is how many rows each sample has.
    """

    def __init__(self, pipeline: Pipeline, batches: list[MicroBatch], seed: int) -> None:
        self._pipeline, self._batches, self._seed = pipeline, batches, seed
        self.keys = pipeline.keys(batches)
        self.sizes = [batch.samples for batch in batches]
        self.result: list[Any] = []
        self.requires_grad: list[bool] = []
        self.rows: list[int] = []
        # By stage and micro-batch: leaves that get the gradients of its input; its output.
        self._computed: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.order = GPipe(pipeline.channel, pipeline.stages.rank_of, self.keys)
        self.order.forward(self)

    def run(
        self, stage: int, microbatch: int, specs: Specs, tensors: list[torch.Tensor]
    ) -> tuple[Specs, list[torch.Tensor]]:
        pipeline, batch = self._pipeline, self._batches[microbatch]
        leaves, received = enter(specs, tensors)
        output = pipeline.staged.run(stage, received, batch, self._seed + microbatch)
        tensors = tensors_in(output)
        output_specs = list(map(pipeline.channel.spec_of, tensors))
        if torch.is_grad_enabled():
            pipeline.specs.setdefault((stage, self.keys[microbatch]), (specs, output_specs))
        self._computed[stage, microbatch] = leaves, tensors
        if stage == pipeline.last:
            self.result.append(output)
        return output_specs, tensors

    def grad(self, stage: int, microbatch: int, gradients: list[torch.Tensor | None]) -> list[Any]:
        leaves, output = self._computed.pop((stage, microbatch))
        targets = (t for t in output if t.requires_grad)
        pairs = [(t, g) for t, g in zip(targets, gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        # A leaf is zero: the gradient of what the stage has not used.
        return [leaf.detach() if leaf.grad is None else leaf.grad for leaf in leaves]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run backward for all micro-batches, from the gradients of the batch's outputs."""
        self.order.require_first_backward()
        pipeline = self._pipeline
        with pipeline.channel.in_call():
            end = pipeline.around_backward()
            with pipeline.channel.times.passing():
                self.order.backward(self, gradients_of_parts(gradients, self.sizes, self.rows))
            end()


class Pipeline:
    """This rank's part of a pipeline.

    ``around_backward`` is called before backward, and returns what to call after it. ``expected``
    is the first batch's result, which only the last stage's rank may know. ``compared`` is called
    after the comparison with it, and before later batches.
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
        self.local_stages = stages.of_rank(channel.rank)
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
        """The result of the model's forward for a batch; a collective of the pipeline."""
        return self.staged.result_of(with_tensors(*self.outputs(args, kwargs, batches)))

    def outputs(
        self, args: Any, kwargs: Any, batches: list[MicroBatch] | None = None
    ) -> tuple[Any, list[torch.Tensor]]:
        """The structure of the result and the side outputs for a batch, and their tensors."""
        _refuse_cache(kwargs)
        batches = batches or self.divide(args, kwargs, self.microbatches)
        self._comparison.check(args, kwargs, batches)
        self._compared()
        done = self.forward(batches, self.seed)
        structure, tensors = self._on_all_ranks(done)
        if torch.is_grad_enabled() and any(done.requires_grad):
            tensors = list(_results_for(anchor(), done, *tensors))
        return structure, tensors

    def forward(self, batches: list[MicroBatch], seed: int) -> ForwardPass:
        return ForwardPass(self, batches, seed)

    def keys(self, batches: Sequence[MicroBatch]) -> list[Hashable]:
        """By micro-batch, what the shapes of outputs and gradients depend on."""
        state = (
            torch.is_grad_enabled(),
            self.modes(),
            tuple(p.requires_grad for p in self._parameters),
            autocast_state(),
            self.staged.side_outputs.filled(),
        )
        # The state is long, and the same in most passes: use a number instead.
        number = self._states.setdefault(state, len(self._states))
        return [(number, call_key(batch.args, batch.kwargs)) for batch in batches]

    def modes(self) -> tuple[bool, ...]:
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
            side_outputs = self.staged.side_outputs_in(done.result[0])
            whole, done.rows = joined(list(map(tensors_in, done.result)), done.sizes, side_outputs)
        known = self._results.get(key)
        if known is None or self.staged.has_side_outputs or holds_values(known[0]):
            known = None
            if self.channel.rank == source:
                refuse_other_results(done.result[0])
                of_part = tensors_in(done.result[0])
                specs = [
                    dataclasses.replace(self.channel.spec_of(t), requires_grad=part.requires_grad)
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
    """Raise for a cache of keys and values: each rank would fill it for its own stage only."""
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
    """Raise for results in which PyTorch sees no tensors."""
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


@functools.cache
def refuse_chosen_inputs() -> None:
    """Make ``backward(inputs=...)`` and ``torch.autograd.grad`` raise for a model's parameters.

    Autograd would not run the other stages, and give no gradients and no error. ``backward()`` also
    raises for a loss without a value, which depends on weights of other stages. All of these call
    one function of PyTorch, also where a script has imported their names before.
    """
    module: Any = autograd
    run = module._engine_run_backward

    @functools.wraps(run)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # They follow the gradients, and whether to retain and to create a graph.
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        if not in_pass() and any(isinstance(t, torch.Tensor) and is_in_pipeline(t) for t in inputs):
            raise ValueError(
                "backward(inputs=...) and torch.autograd.grad cannot compute gradients of "
                "parameters in a pipeline, which other ranks compute in backward(): call "
                "loss.backward(), and read p.grad"
            )
        try:
            return run(tensors, *args, **kwargs)
        except RuntimeError as error:
            if in_pass() or not any(t.is_meta for t in tensors):
                raise
            raise ValueError(
                "the loss is computed from a parameter of another stage of the pipeline, which has "
                "no value on this rank, as in sum(p.square().sum() for p in model.parameters()). "
                "For c times that penalty leave it out, and pass weight_decay=2 * c to the "
                "optimizer, which for SGD and Adam is the same"
            ) from error

    module._engine_run_backward = checked
