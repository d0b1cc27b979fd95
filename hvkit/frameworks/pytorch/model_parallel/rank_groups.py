"""Groups of ranks of a mesh, and what ranks of a group share: batches, weights, random numbers."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch import torch_distributed
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.learning_rate import (
    checksum_of_rates,
    rates_of,
    refuse_other_rates,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import call_key, tensors_in
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.log import shortened
from hvkit.mesh import AXES, Axis, MeshOptions, rows
from hvkit.pipeline.messages import refuse_other_batches
from hvkit.runtime import all_ranks

_LARGEST_SEED = 2**62


class RankGroups:
    """The groups of this rank; ``axes`` is the ``DeviceMesh``."""

    def __init__(self, options: MeshOptions, device: torch.device, name: str) -> None:
        if options.mesh.shard > 1 or options.schedule != "GPipe":
            torch_distributed.require_gpus_of_their_own()
        lengths = tuple(getattr(options.mesh, axis) for axis in AXES)
        self.axes = torch_distributed.device_mesh(device.type, lengths, AXES)

        def along(*axes: Axis) -> TorchChannel:
            group = torch_distributed.group_of(tuple(rows(options.mesh, *axes)))
            return TorchChannel(group, device, name)

        self.pipeline = along("pipeline")
        self.same_batch = along("pipeline", "tensor")
        # The ranks whose forward passes wait for each other.
        self.lockstep = along(*AXES) if options.mesh.shard > 1 else self.same_batch
        # The ranks that together hold the model once.
        self.replica = along("shard", "pipeline", "tensor")
        self.data_parallel = along("data", "shard")


def require_same_batch(
    model: nn.Module,
    number: int,
    args: Any,
    kwargs: Any,
    optimizers: Sequence[Optimizer],
    losses: LossCounts,
    groups: RankGroups,
) -> int:
    """Raise on every rank unless the ranks of a model have the same batch; a collective.

    If losses of the pass before were means over different numbers, rank 0 warns. Returns a seed,
    the same on all ranks that compute on the same batch.
    """
    lockstep, same_batch, tensors = groups.lockstep, groups.same_batch, tensors_in((args, kwargs))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(
            "an input of a model in a mesh requires a gradient, which only some ranks could "
            "compute: pass one module that contains both models to hvkit.distribute, or detach "
            "the input"
        )
    request = [number, torch.is_grad_enabled(), model.training, call_key(args, kwargs)]
    # Numbers on a GPU are compared less often, because the host waits for them.
    often = number & (number - 1) == 0
    content = [checksum(t) for t in tensors if often or not t.is_cuda]
    rates = checksum_of_rates(optimizers)
    numbers = hash_of(request), hash_of(content), new_seed(), rates, losses.checksum()
    requests, contents, seeds, all_rates, shapes = (
        dict(zip(lockstep.ranks, column, strict=True))
        for column in lockstep.gather_numbers(numbers).T.tolist()
    )
    refuse_other_batches(
        number,
        requests,
        {rank: contents[rank] for rank in same_batch.ranks},
        "hvkit.shard(loader, mesh=mesh), and seed random transformations equally",
    )
    if len({*all_rates.values()}) > 1:
        named: list[Any] = [None] * len(lockstep.ranks)
        dist.all_gather_object(named, rates_of(optimizers, fetch=False), group=lockstep.group)
        refuse_other_rates(dict(zip(lockstep.ranks, named, strict=True)))
    other_shapes = len({*shapes.values()}) > 1
    if (often or other_shapes) and len(lockstep.ranks) > len(same_batch.ranks):
        counts = lockstep.gather_numbers(losses.numbers())
        losses.compare(counts, all_ranks(), for_shapes=other_shapes)
    return int(seeds[same_batch.ranks[0]])


def require_same_weights(model: nn.Module, replica: TorchChannel) -> None:
    """Raise on every rank unless all have the same weights: a script may have loaded others."""
    named, ranks = dict(model.named_parameters()), replica.ranks
    by_rank = replica.gather_numbers([checksum(p) for p in named.values()])
    for rank, same in zip(ranks, (by_rank == by_rank[0]).tolist(), strict=True):
        if different := [name for name, equal in zip(named, same, strict=True) if not equal]:
            names = shortened(", ".join(different), 200)
            raise RanksDisagreeError(
                f"rank {rank} holds other weights than rank {ranks[0]} in {names}: load "
                "weights before hvkit.distribute, or after it on every rank"
            )


def checksum(t: torch.Tensor) -> int:
    """A number that depends on the values of a tensor, and on the order of its samples."""
    data = t.detach().contiguous().flatten()
    if not data.numel():
        return 0
    size = data.numel() * data.element_size()
    words = data.view(torch.uint8).view(torch.int32 if size % 4 == 0 else torch.uint8)
    samples = t.shape[0] if t.dim() else 1
    rows = words.view(samples, -1).sum(1, dtype=torch.int64) if len(words) % samples == 0 else words
    places = torch.arange(1, len(rows) + 1, device=rows.device)
    return int((rows * places).sum(dtype=torch.int64))


def hash_of(things: Sequence[Any]) -> int:
    """A number for some objects, the same in every process."""
    return zlib.crc32(repr(things).encode())


def new_seed() -> int:
    """A seed from this rank's generator."""
    return int(torch.randint(_LARGEST_SEED, (), device="cpu"))


class _Generators:
    """Those of the CPU and of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._all.append(torch.cuda.default_generators[index])

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._all]

    def set(self, states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        for generator in self._all:
            generator.manual_seed(seed)


class SameRandomNumbers:
    """A context in which all ranks of a group draw the same random numbers.

    Scripts seed each rank by its rank. But the ranks of a tensor group compute on the same
    activations: with different dropout they would train different models. Megatron-LM keeps two
    generators for the same reason (https://arxiv.org/abs/1909.08053, appendix B.2).

    The context continues the numbers of the last one, on the CPU and the current CUDA device.
    Outside of it each rank draws from its own generators as before. To make one is a collective:
    all start from the generators of the group's first rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._index = dist.get_rank(group)
        self._generators = _Generators(device)
        # States of the generators of the CPU and the CUDA device; may be set to resume.
        self.states = self._generators.states()
        for state in self.states:
            moved = state.to(device)
            dist.broadcast(moved, group=group, group_src=0)
            state.copy_(moved)
        self._outside: list[torch.Tensor] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._outside = self._generators.states()
            self._generators.set(self.states)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.begin()
            self._generators.set(self._outside)

    def begin(self) -> None:
        """Continue from the generators' present states, which must be the same on all ranks."""
        self.states = self._generators.states()

    @contextmanager
    def different(self, device: torch.device) -> Iterator[None]:
        """A context in which each rank draws other numbers on ``device``: dropout of its part.

        They depend on the common generator alone. So gradient checkpointing, which sets that one
        back before it recomputes, gets the same numbers.
        """
        seed = new_seed()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _Generators(device).seed(seed + self._index)
            yield


class SharedNumbers:
    """Random numbers that are the same in all stages of a pipeline, such as noise in a forward.

    Each rank runs the model's forward, but computes only its own stage. The forward itself must
    draw the same numbers on all ranks, although modules, whose dropout draws too, compute on one
    rank only: these ``modules``, of which none is inside another. So a pass begins with a seed that
    the ranks share, and each call of a module takes one number of that stream to seed its own
    numbers. Gradient checkpointing draws the same ones again. ``seeded`` is called when a pass has
    set its seed.
    """

    def __init__(
        self, device: torch.device, modules: Iterable[nn.Module], seeded: Callable[[], None]
    ) -> None:
        self._generators, self._seeded = _Generators(device), seeded
        # The states before each running call: computing shapes may call a module inside of one.
        self._before: list[tuple[nn.Module, list[torch.Tensor]]] = []
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            # Also after an error: checkpoints leave modules by an exception.
            module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def drawn(self, seed: int) -> Iterator[None]:
        """Surrounds a pass; afterwards the rank's own generators continue."""
        states, of_python = self._generators.states(), random.getstate()
        self._generators.seed(seed)
        random.seed(seed)
        self._seeded()
        try:
            yield
        finally:
            self._generators.set(states)
            random.setstate(of_python)

    def _enter(self, module: nn.Module, args: Any) -> None:
        seed = new_seed()
        self._before.append((module, self._generators.states()))
        self._generators.seed(seed)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # An earlier hook may have refused the call.
        if self._before and self._before[-1][0] is module:
            self._generators.set(self._before.pop()[1])
