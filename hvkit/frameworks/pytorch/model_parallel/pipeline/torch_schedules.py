"""PyTorch's schedules of a pipeline: 1F1B, interleaved and zero-bubble ones.

They alternate forward and backward of micro-batches, so that a rank keeps fewer activations, and
waits less. PyTorch's ``torch.distributed.pipelining`` is alpha: this module alone uses it.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (2021); Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

from hvkit.frameworks.pytorch.model_parallel.pipeline.deferred_outputs import (
    DeferredBatch,
    Recorded,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import ignored_unevenly
from hvkit.frameworks.pytorch.model_parallel.pipeline.pipelined_model import (
    Pipeline,
    autocast_as,
    autocast_state,
    received_for,
    same_memory,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in, with_tensors
from hvkit.frameworks.pytorch.torch_distributed import empty
from hvkit.main_rank import warn_once
from hvkit.pipeline.messages import StageTimes, TensorSpec
from hvkit.transport.traffic import count

GPIPE = "GPipe"
STAGES_PER_RANK = {
    GPIPE: 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""By schedule, how many stages a rank has unless ``stages=[...]`` names the cuts."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which the last stage is on the first rank."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of weights and of inputs in separate passes."""

_LOSSES = (F.cross_entropy, F.nll_loss)
# The default of their ignore_index.
_IGNORED = -100


class ScheduledPipeline:
    """A pipeline whose training batches run by one of PyTorch's schedules.

    GPipe runs evaluation, the first batch of each shape, and batches that cannot be divided as the
    schedule needs.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: str, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._pipeline, self._schedule, self._parameters = pipeline, schedule, parameters
        self._schedules: dict[Hashable, Any] = {}
        self._current: DeferredBatch | None = None
        self._loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
        # By description of the script's operations: whether each number is a sum over samples.
        self._sums: dict[tuple[str, ...], list[bool | None]] = {}
        self._steps = 0
        # The last deferred batch, until its backward pass.
        self._latest: DeferredBatch | None = None

    def __call__(self, args: Any, kwargs: Any) -> Any:
        pipeline = self._pipeline
        batches = pipeline.divide(args, kwargs, pipeline.microbatches, even=True)
        if not torch.is_grad_enabled() or not self._fits(len(batches)):
            return pipeline(args, kwargs)
        found = pipeline.result_of(batches)
        if found is None:  # the first batch of its shape shows the shapes of all stages
            return pipeline(args, kwargs, batches)
        structure, specs = found
        earlier, self._latest = self._latest, None
        if earlier is not None and earlier.is_pending:
            # One backward pass may need both batches. All ranks decide alike, so this does not look
            # whether the script still holds the earlier one.
            seed = pipeline.seed
            earlier.run_by_gpipe()
            pipeline.seed = seed
            return pipeline(args, kwargs, batches)
        run = self._latest = DeferredBatch(
            self,
            args,
            kwargs,
            batches,
            pipeline.keys(batches)[0],
            autocast_state(),
            pipeline.modes(),
            pipeline.seed,
        )
        metas = [empty(each, "meta") for each in specs]
        outputs = run.outputs(metas, pipeline.channel.device)
        return pipeline.staged.result_of(with_tensors(structure, outputs))

    def _fits(self, batches: int) -> bool:
        ranks = len(self._pipeline.channel.ranks)
        if batches >= len(self._pipeline.stages) and batches % ranks == 0:
            return True
        warn_once(
            "batch for GPipe",
            f"a batch that is divided into {batches} equal micro-batches takes GPipe, since "
            f"{self._schedule} needs a multiple of {ranks} of them, and at least "
            f"{len(self._pipeline.stages)}",
        )
        return False

    def run_now(self, run: DeferredBatch) -> list[torch.Tensor]:
        """The outputs of the whole batch by GPipe, since the script needs a value already."""
        pipeline, self._pipeline.seed = self._pipeline, run.seed
        with _in_modes(pipeline, run.modes):
            # The script has the deferred side outputs: keep no others in their place.
            return pipeline.outputs(run.args, run.kwargs, run.batches)[1]

    def run_backward(self, run: DeferredBatch, root: Recorded) -> None:
        """Run forward and backward of all micro-batches; then give single numbers their values."""
        pipeline, self._current = self._pipeline, run
        operations = run.description()
        self._steps += 1
        # A loss that was a mean over samples may be none when padding begins: check it again.
        if self._steps & (self._steps - 1) == 0 or _ignores_unevenly(run):
            self._sums.pop(operations, None)
        found: list[list[torch.Tensor]] = []
        outputs: list[list[torch.Tensor]] = []
        is_last = pipeline.last in pipeline.local_stages
        numbers = torch.arange(len(run.batches))

        def loss_of(output: Any, number: torch.Tensor) -> torch.Tensor:
            i = int(number)
            evaluate = run.evaluator(tensors_in(output), i)
            with pipeline.channel.times.computing("loss", i, pipeline.last):
                loss = evaluate(root)
                with torch.no_grad():
                    found.append([evaluate(node).detach() for node in run.singles])
            if operations not in self._sums:
                outputs.append([t.detach() for t in tensors_in(output)])
            return loss / len(run.batches)

        schedule = self._schedule_for(run)
        # Nobody reads the outputs joined. PyTorch 2.9 would pass this argument to the stages.
        known = "return_outputs" in inspect.signature(schedule.step).parameters
        options = {"return_outputs": False} if known else {}
        self._loss_of = loss_of
        channel = pipeline.channel
        with channel.in_call():
            end = pipeline.around_backward()
            with channel.times.passing(), channel.waiting():
                schedule.step(
                    mb=numbers,
                    target=numbers if is_last else None,
                    losses=[] if is_last else None,
                    **options,
                )
            self._count(run)
            self._latest = None
            end()
        self._send_values(run, root, operations, found, outputs)

    def _send_values(
        self,
        run: DeferredBatch,
        root: Recorded,
        operations: tuple[str, ...],
        found: list[list[torch.Tensor]],
        outputs: list[list[torch.Tensor]],
    ) -> None:
        """Send single numbers from the last stage; all ranks raise if the loss is no mean."""
        pipeline, source = self._pipeline, self._pipeline.stages.rank_of[self._pipeline.last]
        sums = self._sums.get(operations)
        if sums is None:
            checked = run.means_or_sums(found, outputs) if found else None
            sums, finite = pipeline.channel.object_from_rank(source, checked)
            if sums[run.singles.index(root)] is not False:
                raise ValueError(
                    f"with schedule={self._schedule!r} the loss must be a mean over samples, but "
                    "the mean over micro-batches is another one than that of the whole batch: as "
                    "with a sum, also one that is divided by the length of the batch, or where "
                    "ignore_index leaves out other numbers of samples. Use .mean(), or "
                    'schedule="GPipe", which takes any loss'
                )
            if finite:  # else the next batch shows it
                self._sums[operations] = sums
        values = torch.zeros(len(sums), dtype=torch.float64, device=pipeline.channel.device)
        if found:
            columns = [torch.stack(column).double() for column in zip(*found, strict=True)]
            pairs = zip(columns, sums, strict=True)
            values = torch.stack([c.sum() if is_sum else c.mean() for c, is_sum in pairs])
        pipeline.channel.broadcast(source, [values])
        run.values = {
            node: value.to(node.meta.dtype, copy=True)
            for node, value, is_sum in zip(run.singles, values, sums, strict=True)
            if is_sum is not None
        }
        # Free the batch, and what the script has computed from it.
        run.args = run.kwargs = None
        run.batches = []

    def _count(self, run: DeferredBatch) -> None:
        """Count the bytes that PyTorch has sent between stages."""
        pipeline = self._pipeline
        for stage in pipeline.local_stages:
            received, sent = pipeline.specs[stage, run.key]
            for other, specs in ((stage - 1, received), (stage + 1, sent)):
                if not 0 <= other <= pipeline.last or other in pipeline.local_stages:
                    continue
                passed = [each for each in specs if each.requires_grad or other > stage]
                size = sum(math.prod(each.shape) * each.dtype.itemsize for each in passed)
                count("activations", size * len(run.batches), len(passed) * len(run.batches))

    def _schedule_for(self, run: DeferredBatch) -> Any:
        pipeline = self._pipeline
        key = run.key, len(run.batches)
        if key not in self._schedules:
            stages = [self._stage_for(run, stage) for stage in pipeline.local_stages]
            schedule: Any = get_schedule_class(self._schedule)
            several = STAGES_PER_RANK[self._schedule] > 1
            self._schedules[key] = schedule(
                stages if several else stages[0],
                len(run.batches),
                loss_fn=lambda output, number: self._loss_of(output, number),
                scale_grads=False,
            )
        return self._schedules[key]

    def _stage_for(self, run: DeferredBatch, stage: int) -> _TimedStage:
        pipeline = self._pipeline
        users = pipeline.stages.of_weight
        parameters = [p for name, p in self._parameters.items() if stage in users[name]]
        received, sent = map(_empty, pipeline.specs[stage, run.key])
        made = _TimedStage(
            _StageModule(functools.partial(self._run_stage, stage), parameters),
            stage,
            len(pipeline.stages),
            pipeline.channel.device,
            input_args=received,
            output_args=sent,
            group=pipeline.channel.group,
        )
        made.times = pipeline.channel.times
        return made

    def _run_stage(self, stage: int, received: Sequence[torch.Tensor], number: int) -> Any:
        run = self._current
        assert run is not None
        with autocast_as(run.autocast), _in_modes(self._pipeline, run.modes):
            entered = [
                received_for(t, [same_memory(t)]) if t.requires_grad else t for t in received
            ]
            batch, seed = run.batches[number], run.seed + number
            return self._pipeline.staged.run(stage, entered, batch, seed)


@contextmanager
def _in_modes(pipeline: Pipeline, modes: Sequence[bool]) -> Iterator[None]:
    before = pipeline.modes()
    # Setting an attribute of a module takes time.
    changed = pipeline.modules if before != tuple(modes) else []
    for module, mode in zip(changed, modes, strict=False):
        module.training = mode
    try:
        yield
    finally:
        for module, mode in zip(changed, before, strict=False):
            module.training = mode


def _ignores_unevenly(run: DeferredBatch) -> bool:
    """Whether a loss ignores different fractions of the targets of micro-batches."""
    sizes = [batch.samples for batch in run.batches]
    for node in run.nodes:
        given = inspect.signature(node.function).bind_partial if node.function in _LOSSES else None
        if given is not None:
            bound = given(*node.args, **node.kwargs).arguments
            targets = tensors_in(bound.get("target"))
            if ignored_unevenly(targets, sizes, bound.get("ignore_index", _IGNORED)):
                return True
    return False


def _empty(specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
    return tuple(empty(each, "meta").requires_grad_(each.requires_grad) for each in specs)


class _StageModule(nn.Module):
    """A stage for PyTorch's schedules, which pass its inputs, and the number of the micro-batch."""

    def __init__(self, run: Callable[..., Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._run, self._used = run, parameters  # in a list: they belong to the model

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of this stage, whose gradients zero-bubble schedules compute."""
        return iter(self._used)

    def forward(self, *received: torch.Tensor, mb: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tensors_in(self._run(received, int(mb)))
        return tuple(t.contiguous() for t in outputs)  # as PyTorch's messages need them


def _timed(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``PipelineStage`` on a micro-batch, by its number, as a span of a timeline."""

    @functools.wraps(method)
    def compute(self: _TimedStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        with self.times.computing(what, microbatch, self.stage_index):
            return method(self, microbatch, *args, **kwargs)

    return compute


class _TimedStage(PipelineStage):
    times: StageTimes
    forward_one_chunk = _timed("forward", PipelineStage.forward_one_chunk)
    backward_one_chunk = _timed("backward", PipelineStage.backward_one_chunk)
    backward_weight_one_chunk = _timed(
        "backward of weights", PipelineStage.backward_weight_one_chunk
    )
