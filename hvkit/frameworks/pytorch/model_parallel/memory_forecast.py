"""Forecasts the memory that each rank needs for a training step, and the pipeline's idle time.

The forecast is arithmetic on the result of a dry run. Only ``state_bytes`` and ``memory_of_rank``
look at optimizers and at the machine. It does not count memory of libraries, tensors that the
script computes from the model's result, the state of strategies of the data axis, weights that the
shard axis gathers for a moment, and inputs of layers under ``torch.utils.checkpoint``.

Source of the bubble: Huang et al., "GPipe" (2019); Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM" (2021).
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.errors import ranks_text
from hvkit.frameworks.pytorch.divided_state.trials import copied
from hvkit.frameworks.pytorch.model_parallel.meta_device import OnMeta
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import ModuleStages
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import SPLIT_BACKWARD
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import TensorPlan, placements_of
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import bytes_of, tensors_in
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.host.hardware import free_memory
from hvkit.log import logger
from hvkit.mesh import MeshOptions
from hvkit.pipeline.gpipe import megabytes

_META = torch.device("meta")
# Arguments of PyTorch's optimizers that choose an implementation.
_KERNELS = ("fused", "foreach", "capturable")


class ParameterBytes(NamedTuple):
    """The bytes of a rank's part of a parameter, of its gradient, and of its optimizer state."""

    weights: int
    gradients: int
    state: int


class RankForecast(NamedTuple):
    """The bytes that a rank needs in a training step, and the numbers of its stages."""

    stages: tuple[int, ...]
    weights: int
    gradients: int
    state: int
    activations: int  # that autograd keeps for backward, of all micro-batches in flight
    outputs: int  # of its stages for these, and of the model for the batch, with their gradients

    @property
    def total(self) -> int:
        return sum(self[1:])

    def described(self, optimizer: str) -> str:
        names = ("gradients", optimizer, "activations", "outputs")
        terms = [f"{megabytes(self.weights)} MB weights"]
        terms += [f"{megabytes(n)} {name}" for name, n in zip(names, self[2:], strict=True) if n]
        return f"{' + '.join(terms)} = {in_words(self.total)}"


class Memory(NamedTuple):
    """The memory that a rank may use, in bytes, and a number for the host or GPU that has it."""

    pool: int
    nbytes: int


def log_division(
    stages: ModuleStages,
    plan: TensorPlan,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: MeshOptions,
    device: torch.device,
    links: TorchChannel,
    microbatches: int,
) -> None:
    """Log the division, and the memory of a step; a collective of ranks that share a batch."""
    found = links.gather_numbers(memory_of_rank(device, model))
    if options.position.rank:
        return
    if len(stages) > 1:
        logger.info(stages.described())
    if plan.ways > 1:
        logger.info(f"{plan}")
    placements = placements_of(model, plan.divisions)
    shapes: dict[torch.Tensor, Sequence[int]] = {}
    for name, p in model.named_parameters():
        shape = list(p.shape)
        if name in placements:
            shape[placements[name].dim] //= plan.ways
        if shape and len(stages.holders(name)) == 1:  # those of several stages stay whole
            shape[0] = math.ceil(shape[0] / options.mesh.shard)
        shapes[p] = shape
    # Optimizers that step here may draw numbers on the device.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        parameters = parameter_bytes(model, optimizers, shapes)
    ranks = forecast(stages, parameters, options.schedule, microbatches)
    memories = [Memory(*numbers) for numbers in found.tolist()]
    if device.type == "cuda":
        memories = divided_memory(memories)
    names = " and ".join(dict.fromkeys(type(each).__name__ for each in optimizers))
    lines = table(ranks, memories, links.ranks, names)
    if len(ranks) > 1:
        waiting = bubble(len(ranks), len(ranks[0].stages), microbatches)
        less = "at most " if options.schedule in SPLIT_BACKWARD else ""
        lines += (
            f"\n    and each rank waits for other stages {less}{waiting:.0%} of the time in "
            f"forward and backward passes: {options.schedule}, {microbatches} "
            "micro-batches"
        )
    logger.info(f"a training step needs\n    {lines}")
    if text := too_large(ranks, memories, links.ranks):
        logger.warning(text)


def in_words(nbytes: int) -> str:
    """Bytes as text: ``412 MB``, ``1.7 GB``."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{megabytes(nbytes)} MB"


def bubble(ranks: int, per_rank: int, microbatches: int) -> float:
    """The fraction of its passes in which a rank waits, if stages take equally long."""
    return (ranks - 1) / (per_rank * microbatches + ranks - 1)


def kept_at_once(schedule: str, ranks: int, rank: int, per_rank: int, microbatches: int) -> int:
    """The largest number of pairs of stage and micro-batch whose activations a rank keeps at once.

    The first batch of each shape takes GPipe, which keeps all. There is no optimizer state then.
    """
    everything = per_rank * microbatches
    if schedule == "1F1B":
        return min(everything, ranks - rank)
    if schedule == "Interleaved1F1B":
        # As PyTorch counts the forwards before the first backward.
        in_a_round = microbatches // max(1, microbatches // ranks)
        return min(everything, (per_rank - 1) * in_a_round + 2 * (ranks - 1 - rank) + 1)
    # With a split backward PyTorch still holds the last activations of the batch before.
    return everything + per_rank * (schedule in SPLIT_BACKWARD)


def forecast(
    stages: ModuleStages, parameters: Mapping[str, ParameterBytes], schedule: str, microbatches: int
) -> list[RankForecast]:
    """The largest memory of each rank of the pipeline axis, from the bytes of each parameter."""
    ranks = max(stages.rank_of) + 1
    found = []
    for rank in range(ranks):
        own_stages = stages.of_rank(rank)
        own = [each for name, each in parameters.items() if rank in stages.holders(name)]
        kept = kept_at_once(schedule, ranks, rank, len(own_stages), microbatches)
        weights, gradients, state = (sum(each[i] for each in own) for i in range(3))
        saved = _largest([stages.saved[stage] for stage in own_stages], kept, microbatches)
        outputs = 0 if ranks == 1 else _outputs(stages, own_stages, kept, schedule, microbatches)
        found.append(RankForecast(tuple(own_stages), weights, gradients, state, saved, outputs))
    return found


def _outputs(
    stages: ModuleStages, own_stages: Sequence[int], kept: int, schedule: str, microbatches: int
) -> int:
    last = len(stages) - 1
    # The last stage's gradients are parts of those of the whole result.
    of_stages = [stages.output_bytes[stage] * (1 if stage == last else 2) for stage in own_stages]
    # GPipe gives the result of the whole batch to every rank.
    whole = microbatches if schedule == "GPipe" else int(last in own_stages)
    return _largest(of_stages, kept, microbatches) + 2 * whole * stages.output_bytes[last]


def _largest(sizes: Sequence[int], count: int, each: int) -> int:
    """The largest sum of ``count`` numbers, each taken ``each`` times; then again the largest."""
    further = max(0, count - each * len(sizes))
    return sum(sorted([*sizes] * each, reverse=True)[:count]) + further * max(sizes)


def parameter_bytes(
    model: nn.Module, optimizers: Iterable[Optimizer], shapes: Mapping[torch.Tensor, Sequence[int]]
) -> dict[str, ParameterBytes]:
    """The bytes of each parameter on a rank that holds a part of it, of these shapes."""
    state: dict[torch.Tensor, int] = {}
    for optimizer in optimizers:
        state |= state_bytes(optimizer, shapes)
    found = {}
    for name, p in model.named_parameters():
        size = math.prod(shapes[p]) * p.element_size()
        of_training = (size, state.get(p, 0)) if p.requires_grad else (0, 0)
        found[name] = ParameterBytes(size, *of_training)
    return found


def state_bytes(
    optimizer: Optimizer, shapes: Mapping[torch.Tensor, Sequence[int]]
) -> dict[torch.Tensor, int]:
    """The bytes of an optimizer's state of each parameter after a step.

    A copy of it steps on the meta device, where it reads 1 as every value. If it cannot, its state
    is taken to be Adam's: two numbers for each weight.
    """
    groups = [[p for p in group["params"] if p in shapes] for group in optimizer.param_groups]
    values = [[torch.empty(shapes[p], dtype=p.dtype, device="meta") for p in ps] for ps in groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), OnMeta(_META, lambda _: None):
            twin = copied(optimizer, values, values)
            for group in twin.param_groups:
                # These implementations keep the same state, but need values, or a GPU.
                group.update({key: False for key in _KERNELS if key in group})
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            twin.step()
        stepped = [p for group in twin.param_groups for p in group["params"]]
        found = [bytes_of(tensors_in(dict(twin.state.get(p, {})))) for p in stepped]
    except Exception:  # of any type: the optimizer may be of any library
        found = [2 * bytes_of([t]) for ts in values for t in ts]
    return dict(zip(chain(*groups), found, strict=True))


def memory_of_rank(device: torch.device, model: nn.Module) -> Memory:
    """The memory that this rank may use, including that of the model's parameters now.

    All ranks of a host have equal shares of its memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        gpu = zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())
        return Memory(gpu, free + torch.cuda.memory_reserved(device))
    used = bytes_of(p for p in model.parameters() if p.device == device)
    host = zlib.crc32(socket.gethostname().encode())
    return Memory(host, free_memory() // runtime.local_size() + used)


def divided_memory(memories: Sequence[Memory]) -> list[Memory]:
    """The same, with equal shares of a GPU for the ranks that use it."""
    pools = [pool for pool, _ in memories]
    return [Memory(pool, nbytes // pools.count(pool)) for pool, nbytes in memories]


def table(
    ranks: Sequence[RankForecast], memories: Sequence[Memory], members: Sequence[int], state: str
) -> str:
    """A line for each rank of the pipeline axis; the members are those of the tensor axis, too."""
    lines = []
    each = len(members) // len(ranks)
    for number, rank in enumerate(ranks):
        own = slice(number * each, (number + 1) * each)
        where = ranks_text(members[own])
        if len(ranks) > 1:
            which = ", ".join(map(str, rank.stages))
            where = f"stage{'s' * (len(rank.stages) > 1)} {which} on {where}"
        room = min(memory.nbytes for memory in memories[own])
        lines.append(f"{where}: {rank.described(state)} of {in_words(room)}")
    return "\n    ".join(lines)


def too_large(
    ranks: Sequence[RankForecast], memories: Sequence[Memory], members: Sequence[int]
) -> str:
    """A warning that memory will not suffice; empty if it will."""
    each = len(members) // len(ranks)
    for pool in dict.fromkeys(memory.pool for memory in memories):
        users = [i for i, memory in enumerate(memories) if memory.pool == pool]
        needed = sum(ranks[i // each].total for i in users)
        room = sum(memories[i].nbytes for i in users)
        if needed > room:
            return (
                f"a training step of {ranks_text([members[i] for i in users])} needs "
                f"{in_words(needed)}, but there are {in_words(room)}: divide the model among more "
                'ranks, balance it with stages="bytes", take smaller batches, or '
                'schedule="1F1B", which keeps the activations of fewer micro-batches'
            )
    return ""
