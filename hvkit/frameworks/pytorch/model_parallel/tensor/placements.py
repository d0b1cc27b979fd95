"""Which part of a parameter each rank of a tensor group holds: arithmetic without collectives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Style = Literal["column", "row"]
_IN_PROJECTIONS = {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}


@dataclass(frozen=True)
class Placement:
    """How a tensor is divided.

    Attributes:
        dim: along which.
        parts: number of tensors that are concatenated along it: 3 for fused queries, keys and
            values. A rank holds a share of each.
    """

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class LayerDivision:
    """How a layer is divided.

    An embedding counts as a linear layer with a transposed weight, whose inputs are the rows.

    Attributes:
        style: "column" divides the outputs, "row" the inputs, and "experts" the features between
            two products of each expert.
        parts: number of tensors that are concatenated in its output: 3 for fused queries, keys and
            values. Each rank has its part of each.
        transposed: whether the weight has the shape (in, out), not (out, in).
        by_itself: whether it returns a whole tensor, since no other layer takes its part.
        experts: the placement of each parameter of experts. One without stays whole, and each rank
            adds its share.
        calls: the structures of arguments with which experts may be called.
    """

    style: Style | Literal["experts"]
    parts: int = 1
    transposed: bool = False
    by_itself: bool = False
    experts: tuple[tuple[str, Placement | None], ...] = ()
    calls: frozenset[Hashable] = frozenset()

    def placement(self, name: str, p: torch.Tensor) -> Placement | None:
        """The placement of a parameter of the layer, by its name there; None if it stays whole."""
        if self.style == "experts":
            return dict(self.experts)[name]
        if self.style == "column":
            dim = int(self.transposed and p.dim() == 2)
            return Placement(dim, _IN_PROJECTIONS.get(name, self.parts))
        return Placement(int(not self.transposed)) if name == "weight" else None


def part_of(whole: torch.Tensor, placement: Placement, index: int, ways: int) -> torch.Tensor:
    """The part that one rank holds.

    Args:
        whole: its length along ``placement.dim`` is a multiple of ``parts * ways``.

    Returns:
        A new tensor, contiguous, ``1 / ways`` as long.

    Raises:
        ValueError: the length is no such multiple.
    """
    length = whole.shape[placement.dim]
    if length % (placement.parts * ways):
        raise ValueError(
            f"a tensor of shape {tuple(whole.shape)} cannot be divided along dimension "
            f"{placement.dim} among {ways} ranks in {placement.parts} part(s): its length must be "
            f"a multiple of {placement.parts * ways}"
        )
    pieces = whole.chunk(placement.parts * ways, placement.dim)
    return torch.cat(pieces[index::ways], placement.dim)


def whole_of(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor, from the parts of all ranks in the order of their index."""
    shares = [part.chunk(placement.parts, placement.dim) for part in parts]
    return torch.cat([share[i] for i in range(placement.parts) for share in shares], placement.dim)


def index_in_part(
    indices: torch.Tensor, length: int, rank: int, ways: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into the whole as indices into a rank's part, and which of them other ranks have.

    Args:
        indices: from 0 to ``length * ways - 1``.
        length: of each part.

    Returns:
        The indices in this part, 0 where another rank has the element; and whether another has. An
        index out of range stays out of range.
    """
    local = indices - rank * length
    elsewhere = (indices >= 0) & (indices < length * ways) & ((local < 0) | (local >= length))
    return local.masked_fill(elsewhere, 0), elsewhere
