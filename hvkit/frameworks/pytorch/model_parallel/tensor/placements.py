"""Which part of a parameter each rank of a tensor group holds: arithmetic without collectives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["column", "row"]
_IN_PROJECTIONS = {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}


@dataclass(frozen=True)
class Placement:
    """How a tensor is divided.

    Attributes:
        dim: along which.
        parts: of the tensor that are divided each by itself: 3 for fused queries, keys and values,
            of which a rank holds a share of each.
    """

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class LayerDivision:
    """How a layer is divided.

    An embedding counts as a linear layer with a transposed weight: it takes one of its rows, and
    gives the features.

    Attributes:
        kind: "column" divides the outputs, "row" the inputs; "experts" the features between two
            products of each expert.
        parts: of a product that holds several tensors, one after the other: 3 for fused queries,
            keys and values. Each rank has its part of each.
        transposed: the weight has the shape (in, out), not (out, in).
        by_itself: no other layer computes with its part: what it returns is whole.
        experts: how each parameter of experts is divided; None for one that stays whole, of which
            each rank adds its share.
        calls: the structures of arguments with which experts may be called.
    """

    kind: Kind | Literal["experts"]
    parts: int = 1
    transposed: bool = False
    by_itself: bool = False
    experts: tuple[tuple[str, Placement | None], ...] = ()
    calls: frozenset[Hashable] = frozenset()

    def placement(self, name: str, p: torch.Tensor) -> Placement | None:
        """How a parameter of the layer is divided, by its name there; None if it stays whole."""
        if self.kind == "experts":
            return dict(self.experts)[name]
        if self.kind == "column":
            dim = int(self.transposed and p.dim() == 2)
            return Placement(dim, _IN_PROJECTIONS.get(name, self.parts))
        return Placement(int(not self.transposed)) if name == "weight" else None


def part_of(whole: torch.Tensor, placement: Placement, index: int, ways: int) -> torch.Tensor:
    """The part that one rank holds.

    Args:
        whole: a multiple of ``parts * ways`` long along ``placement.dim``.

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
    places: torch.Tensor, length: int, index: int, ways: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a rank's part has what has these places in the whole, and which are elsewhere.

    Args:
        places: from 0 to ``length * ways - 1``.
        length: of each part.

    Returns:
        The places in this part, 0 for those in the parts of others; and which are there. A place
        that is in no part is in none of both, and remains an error for whoever looks it up.
    """
    here = places - index * length
    elsewhere = (places >= 0) & (places < length * ways) & ((here < 0) | (here >= length))
    return here.masked_fill(elsewhere, 0), elsewhere
