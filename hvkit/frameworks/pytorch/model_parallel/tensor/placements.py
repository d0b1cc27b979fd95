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
    """A tensor is divided along ``dim``; a rank has its part of each of ``parts`` tensors in it."""

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class LayerDivision:
    """How a layer is divided.

    "column" divides the outputs, "row" the inputs, and "experts" the features between two products
    of each expert. An embedding counts as a linear layer with a transposed weight, whose inputs are
    the rows.
    """

    style: Style | Literal["experts"]
    parts: int = 1  # tensors in its output: 3 for fused queries, keys and values
    transposed: bool = False  # its weight has the shape (in, out)
    by_itself: bool = False  # it returns a whole tensor, since no other layer takes its part
    # By parameter of experts; one without stays whole, and each rank adds its fraction.
    experts: tuple[tuple[str, Placement | None], ...] = ()
    # The structures of arguments with which experts may be called.
    calls: frozenset[Hashable] = frozenset()

    def placement(self, name: str, p: torch.Tensor) -> Placement | None:
        """That of a parameter of the layer, by its name there; None if it stays whole."""
        if self.style == "experts":
            return dict(self.experts)[name]
        if self.style == "column":
            dim = int(self.transposed and p.dim() == 2)
            return Placement(dim, _IN_PROJECTIONS.get(name, self.parts))
        return Placement(int(not self.transposed)) if name == "weight" else None


def part_of(whole: torch.Tensor, placement: Placement, index: int, ways: int) -> torch.Tensor:
    """A new, contiguous tensor: the part that one rank holds."""
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

    The latter are 0 here. An index that is out of range stays so.
    """
    local = indices - rank * length
    elsewhere = (indices >= 0) & (indices < length * ways) & ((local < 0) | (local >= length))
    return local.masked_fill(elsewhere, 0), elsewhere
