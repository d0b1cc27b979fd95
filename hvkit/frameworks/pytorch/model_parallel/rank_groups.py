"""Groups of ranks of a mesh; checks of their batches and weights; sums of shared gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
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
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import GPIPE
from hvkit.frameworks.pytorch.model_parallel.random_numbers import new_seed
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import call_key, tensors_in
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.log import shortened
from hvkit.mesh import AXES, Axis, MeshOptions, rows
from hvkit.pipeline.channel import refuse_other_batches
from hvkit.runtime import all_ranks
from hvkit.transport.traffic import count, of_allreduce


class RankGroups:
    """The groups of this rank; ``axes`` is the ``DeviceMesh``."""

    def __init__(self, options: MeshOptions, device: torch.device, name: str) -> None:
        if options.mesh.shard > 1 or options.schedule != GPIPE:
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
    found = lockstep.gather_numbers(numbers).tolist()
    by_rank = dict(zip(lockstep.ranks, found, strict=True))
    refuse_other_batches(
        number,
        {rank: by_rank[rank][0] for rank in lockstep.ranks},
        {rank: by_rank[rank][1] for rank in same_batch.ranks},
        "hvkit.shard(loader, mesh=mesh), and seed random transformations equally",
    )
    if len({each[3] for each in by_rank.values()}) > 1:
        named: list[Any] = [None] * len(lockstep.ranks)
        dist.all_gather_object(named, rates_of(optimizers, fetch=False), group=lockstep.group)
        refuse_other_rates(dict(zip(lockstep.ranks, named, strict=True)))
    other_shapes = len({each[4] for each in by_rank.values()}) > 1
    if (often or other_shapes) and len(lockstep.ranks) > len(same_batch.ranks):
        counts = lockstep.gather_numbers(losses.numbers())
        losses.compare(counts, all_ranks(), for_shapes=other_shapes)
    return int(by_rank[same_batch.ranks[0]][2])


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


class SharedGradients:
    """Sums the gradients of parameters that several ranks hold in full.

    These are the parameters that several stages use, with the group of ranks that use each, and
    this rank's parameters that the shard axis does not divide. With ``equalised`` the first stage's
    gradient replaces those of the others, whose sums were rounded in another order.
    """

    def __init__(
        self,
        of_stages: Mapping[nn.Parameter, dist.ProcessGroup],
        unsharded: Sequence[nn.Parameter],
        groups: RankGroups,
        *,
        equalised: bool,
    ) -> None:
        self._of_stages, self._unsharded = of_stages, set(unsharded)
        self._links, self._data_parallel = groups.pipeline, groups.data_parallel
        self._equalised = equalised
        self._groups_of = {p: [group] for p, group in of_stages.items()}
        for p in dict.fromkeys(unsharded):
            self._groups_of.setdefault(p, []).append(groups.data_parallel.group)

    def before_backward(self, around: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Prepare for the gradients of a backward pass; return what to call when they are there."""
        end = around()
        # Only the gradients of this pass are summed; those of earlier passes are added to the sum.
        before = {p: p.grad for p in self._groups_of if p.requires_grad}
        for p in before:
            p.grad = None

        def add_up() -> None:
            for p, earlier in before.items():
                if not self._has_gradient(p):
                    p.grad = earlier
                    continue
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                for group in self._groups_of[p]:
                    count("gradients", of_allreduce(gradient.nbytes, group.size()))
                    self._reduce(gradient, dist.ReduceOp.SUM, group)
                if p in self._unsharded:
                    gradient /= len(self._data_parallel.ranks)
                p.grad = gradient if earlier is None else earlier.add_(gradient)
            end()
            if self._equalised:
                self._equalise()

        return add_up

    def _equalise(self) -> None:
        """Give all stages of a parameter the first one's gradient."""
        for p, group in self._of_stages.items():
            if p.grad is not None:
                source = dist.get_process_group_ranks(group)[0]
                if source == dist.get_rank():
                    count("gradients", p.grad.nbytes)
                with self._links.waiting():
                    dist.broadcast(p.grad, source, group=group)

    def _has_gradient(self, p: nn.Parameter) -> bool:
        """Whether any rank has a gradient to add for a parameter; a collective."""
        found = torch.tensor([float(p.grad is not None)], device=self._links.device)
        for group in self._groups_of[p]:
            self._reduce(found, dist.ReduceOp.MAX, group)
        return bool(found)

    def _reduce(self, t: torch.Tensor, operation: Any, group: dist.ProcessGroup) -> None:
        with self._links.waiting():
            dist.all_reduce(t, operation, group=group)


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
