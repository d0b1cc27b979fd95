"""What the ranks of a tensor group send each other, and the random numbers that they draw.

A tensor that all ranks hold has a gradient that is whole on each, since all go on alike with it.
A rank's part of a tensor has its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvkit.frameworks.pytorch.model_parallel.tensor.placements import place_in_part
from hvkit.transport.traffic import count, of_allgather, of_allreduce, of_alltoall

_LARGEST_SEED = 2**62

_Exchange = Callable[[torch.Tensor, DeviceMesh, int], torch.Tensor]


def used_by_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that all ranks hold, and use for their parts: their gradients are summed."""
    return _both_ways(x, mesh, 0, _same, _total)


def added_once(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What each rank adds of a tensor that all hold, before a sum for which all get gradients."""
    return _both_ways(x, mesh, 0, _share, _same)


def summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank, which all go on alike with it."""
    return _both_ways(x, mesh, 0, _total, _same)


def joined(x: torch.Tensor, mesh: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """The ranks' parts along a dimension, on every rank, which all go on alike with them."""
    return _both_ways(x, mesh, dim, _whole, _own)


def own_part(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part along a dimension of a tensor that all ranks hold."""
    return _both_ways(x, mesh, dim, _own, _whole)


def own_part_summed(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part along a dimension of the sum of the ranks' tensors."""
    return _both_ways(x, mesh, dim, _own_total, _whole)


def joined_for_all(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The ranks' parts along a dimension, on every rank: the sum of their gradients comes back."""
    return _both_ways(x, mesh, dim, _whole, _own_total)


@torch.no_grad()
def largest(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Of the ranks' elements at each place, on every rank; without a gradient."""
    return _reduced(x, mesh, dist.ReduceOp.MAX)


class _BothWays(torch.autograd.Function):
    """An exchange in forward, and another one in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, dim: int, there: _Exchange, back: _Exchange
    ) -> torch.Tensor:
        ctx.of = mesh, dim, back, there
        return there(x, mesh, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Once more the other way round, for gradients of gradients.
        return _both_ways(gradient, *ctx.of), None, None, None, None


_both_ways: Callable[..., torch.Tensor] = _BothWays.apply


def _same(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return x.view_as(x)


def _share(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return x / mesh.size()


def _total(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return _reduced(x, mesh)


def _own(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    # Autograd would keep the memory of the whole for a view of it.
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


def _whole(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    if x.is_meta:  # only shapes are wanted
        return torch.cat([x] * mesh.size(), dim)
    parts = [x.new_empty(x.shape) for _ in range(mesh.size())]
    dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
    count("activations", of_allgather(x.nbytes, mesh.size()))
    return torch.cat(parts, dim)


def _own_total(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Each rank adds up its part: gloo's reduce-scatter sends as much as a sum for all."""
    if x.is_meta:
        return _own(x, mesh, dim)
    parts = torch.stack(x.chunk(mesh.size(), dim))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=mesh.get_group())
    count("activations", of_alltoall(x.nbytes, mesh.size()))
    return arrived.sum(0)


def _reduced(x: torch.Tensor, mesh: DeviceMesh, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if x.is_meta:
        return x.clone()
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group=mesh.get_group())
    count("activations", of_allreduce(total.nbytes, mesh.size()))
    return total


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    mesh: DeviceMesh,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """As ``torch.nn.functional.cross_entropy`` of all classes, on every rank.

    Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): the ranks exchange three numbers for
    each target in place of the logits.

    Args:
        logits: of this rank's classes, (classes), (samples, classes) or (samples, classes, ...).

    Raises:
        RuntimeError: a target is no class.
    """
    dim = min(1, logits.dim() - 1)
    exact = torch.promote_types(logits.dtype, torch.float32)
    kind = exact if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    counted = target != ignore_index
    place, elsewhere = place_in_part(
        target.where(counted, 0), logits.shape[dim], mesh.get_local_rank(), mesh.size()
    )
    logits = logits.to(exact)
    logits = logits - largest(logits.detach().amax(dim, keepdim=True), mesh)
    own = logits.gather(dim, place.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0)
    losses = summed(logits.exp().sum(dim), mesh).log() - summed(own, mesh)
    losses = losses.masked_fill(~counted, 0)
    if reduction != "none":
        losses = losses.sum()
    return (losses / counted.sum() if reduction == "mean" else losses).to(kind)


class SameRandomNumbers:
    """A context in which all ranks of a group draw the same random numbers.

    Scripts seed each rank by its rank, so that ranks shuffle and drop out differently. The ranks of
    a tensor group compute on the same activations: with different dropout they would train
    different models. Megatron-LM keeps two streams for the same reason
    (https://arxiv.org/abs/1909.08053, appendix B.2).

    The numbers go on where the last context ended. Outside, each rank has its own generators as
    before. They cover the CPU, and the current CUDA device.

    Args:
        group: of ``torch.distributed``; the numbers begin with the generators of its first rank.
            A collective.
        device: of the model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._index = dist.get_rank(group)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(_generator(device))
        self.begin()
        for state in self._common:
            moved = state.to(device)
            dist.broadcast(moved, group=group, group_src=0)
            state.copy_(moved)
        self._own: list[torch.Tensor] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._own = [generator.get_state() for generator in self._generators]
            self._set(self._common)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.begin()
            self._set(self._own)

    def begin(self) -> None:
        """Go on from where the generators are now, which must be the same on all ranks."""
        self._common = [generator.get_state() for generator in self._generators]

    @property
    def state(self) -> list[torch.Tensor]:
        """Where the numbers go on: of the CPU, then of the CUDA device. May be set to resume."""
        return [state.clone() for state in self._common]

    @state.setter
    def state(self, states: list[torch.Tensor]) -> None:
        self._common = [state.clone() for state in states]

    @contextmanager
    def different(self, device: torch.device) -> Iterator[None]:
        """Inside, each rank draws other numbers on ``device``: for dropout of its own part.

        They depend on the common generator alone, so that gradient checkpointing, which sets it
        back before it computes a part of the forward again, gets the same ones.
        """
        seed = int(torch.randint(_LARGEST_SEED, (), device="cpu"))
        generator = _generator(device)
        before = generator.get_state()
        generator.manual_seed(seed + self._index)
        try:
            yield
        finally:
            generator.set_state(before)

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
