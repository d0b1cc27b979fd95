"""Groups of ranks of a mesh: whether they get the same batches, and sums of what they share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hvkit.communication.group import all_ranks
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.frameworks.pytorch.divided_state import process_group
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.gradients.step_report import (
    checksum_of_rates,
    rates_of,
    refuse_other_rates,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import StageLinks
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import new_seed
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import GPIPE
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import call_key, tensors_in
from hvkit.mesh import AXES, Axis, MeshOptions, rows
from hvkit.transport.traffic import count, of_allreduce
from hvkit.wording import shortened


class RankGroups:
    """The groups of this rank.

    Attributes:
        axes: of the mesh.
        pipeline: the ranks of this rank's pipeline.
        together: those that compute on the same batch.
        at_once: those that compute at the same time.
        holders: those that hold parts of the same weights, which are no copies.
        copies: those along the data and shard axes, which have other batches.
    """

    def __init__(self, options: MeshOptions, device: torch.device, name: str) -> None:
        if options.mesh.shard > 1 or options.schedule != GPIPE:
            process_group.require_gpus_of_their_own()
        lengths = tuple(getattr(options.mesh, axis) for axis in AXES)
        self.axes = process_group.device_mesh(device.type, lengths, AXES)

        def along(*axes: Axis) -> StageLinks:
            group = process_group.group_of(tuple(rows(options.mesh, *axes)))
            through_host = process_group.ranks_share_gpus()
            ranks = options.position.members(*axes)
            return StageLinks(group, ranks, device, name, through_host=through_host)

        self.pipeline = along("pipeline")
        self.together = along("pipeline", "tensor")
        self.at_once = along(*AXES) if options.mesh.shard > 1 else self.together
        self.holders = along("shard", "pipeline", "tensor")
        self.copies = along("data", "shard")


def require_same_batch(
    model: nn.Module,
    number: int,
    args: Any,
    kwargs: Any,
    optimizers: Sequence[Optimizer],
    losses: LossCounts,
    groups: RankGroups,
) -> int:
    """Raise on every rank unless all that compute together have the same batch; a collective.

    Args:
        losses: of the pass before: if they are means over different numbers, rank 0 warns.

    Returns:
        A seed, the same on all ranks that compute on the same batch.

    Raises:
        RanksDisagreeError: names the rank, or the learning rates.
        ValueError: a gradient of an input would be needed.
    """
    at_once, together, tensors = groups.at_once, groups.together, tensors_in((args, kwargs))
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
    found = at_once.gather_numbers(numbers).tolist()
    by_rank = dict(zip(at_once.ranks, found, strict=True))
    for ranks, column, what in (
        (at_once.ranks, 0, "makes another call"),
        (together.ranks, 1, "gets another batch"),
    ):
        for rank in ranks:
            if by_rank[rank][column] != by_rank[ranks[0]][column]:
                raise RanksDisagreeError(
                    f"forward pass {number} of {ranks_text(ranks)}, which train one "
                    f"model together: rank {rank} {what} than rank {ranks[0]}. They must get "
                    "the same batches in the same order: divide data with "
                    "hvkit.shard(loader, mesh=mesh), and seed random transformations equally"
                )
    if len({each[3] for each in by_rank.values()}) > 1:
        named: list[Any] = [None] * len(at_once.ranks)
        dist.all_gather_object(named, rates_of(optimizers, fetch=False), group=at_once.group)
        refuse_other_rates(dict(zip(at_once.ranks, named, strict=True)))
    other_shapes = len({each[4] for each in by_rank.values()}) > 1
    if (often or other_shapes) and len(at_once.ranks) > len(together.ranks):
        counts = at_once.gather_numbers(losses.numbers())
        losses.compare(counts, all_ranks(), for_shapes=other_shapes)
    return int(by_rank[together.ranks[0]][2])


def require_same_weights(model: nn.Module, holders: StageLinks) -> None:
    """Raise on every rank unless all take parts of the same model; a collective.

    A script may have loaded weights since ``distribute``.

    Raises:
        RanksDisagreeError: names the rank and the weights.
    """
    named, ranks = dict(model.named_parameters()), holders.ranks
    by_rank = holders.gather_numbers([checksum(p) for p in named.values()])
    for rank, same in zip(ranks, (by_rank == by_rank[0]).tolist(), strict=True):
        if apart := [name for name, equal in zip(named, same, strict=True) if not equal]:
            names = shortened(", ".join(apart), 200)
            raise RanksDisagreeError(
                f"rank {rank} holds other weights than rank {ranks[0]} in {names}: load "
                "weights before hvkit.distribute, or after it on every rank"
            )


class SharedGradients:
    """Adds up what ranks have computed of the gradients of parameters that several hold in full.

    Args:
        of_stages: the parameters that several stages of a pipeline use, with the ranks that do.
        kept: the parameters of this rank that the shard axis does not divide.
        groups: of this rank.
        equalised: whether stages use one gradient although each has rounded its own.
    """

    def __init__(
        self,
        of_stages: Mapping[nn.Parameter, dist.ProcessGroup],
        kept: Iterable[nn.Parameter],
        groups: RankGroups,
        *,
        equalised: bool,
    ) -> None:
        self._of_stages, self._kept = of_stages, dict.fromkeys(kept)
        self._links, self._copies = groups.pipeline, groups.copies
        self._equalised = equalised

    def before_backward(self, around: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Prepare for the gradients of a backward pass; return what to call when they are there."""
        end = around()
        # What this pass contributes is added up apart from what earlier ones have.
        before = {p: p.grad for p in {**self._of_stages, **self._kept} if p.requires_grad}
        for p in before:
            p.grad = None

        def add_up() -> None:
            for p, earlier in before.items():
                if not self._has_gradient(p):
                    p.grad = earlier
                    continue
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                if p in self._of_stages:
                    self._sum(gradient, self._of_stages[p])
                if p in self._kept:
                    self._sum(gradient, self._copies.group)
                    gradient /= len(self._copies.ranks)
                p.grad = gradient if earlier is None else earlier.add_(gradient)
            end()
            if self._equalised:
                self._equalise()

        return add_up

    def _equalise(self) -> None:
        """Use the same gradient on all stages: each has rounded its own, among other gradients."""
        for p, group in self._of_stages.items():
            if p.grad is not None:
                source = dist.get_process_group_ranks(group)[0]
                if source == dist.get_rank():
                    count("gradients", p.grad.nbytes)
                with self._links.waiting():
                    dist.broadcast(p.grad, source, group=group)

    def _has_gradient(self, p: nn.Parameter) -> bool:
        """Whether any rank that adds to the gradient of a parameter has one; a collective."""
        found = torch.tensor([float(p.grad is not None)], device=self._links.device)
        groups = [self._of_stages[p]] if p in self._of_stages else []
        for group in [*groups, self._copies.group] if p in self._kept else groups:
            with self._links.waiting():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return bool(found)

    def _sum(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        count("gradients", of_allreduce(gradient.nbytes, group.size()))
        with self._links.waiting():
            dist.all_reduce(gradient, group=group)


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
    """A number for some things, the same in every process."""
    return zlib.crc32(repr(things).encode())
