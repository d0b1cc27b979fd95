"""The format of sharded checkpoints: each rank of a mesh writes and reads blocks of tensors.

A block has its offset in the full tensor. A rank writes the blocks that it has. Another rank,
perhaps of another mesh, finds the blocks that overlap its own part, and copies the intersections.
So no rank needs a full tensor.

``torch.save`` writes the files, and ``torch.load`` maps them into memory, so that a rank reads only
the bytes that it copies. ``torch.distributed.checkpoint`` cannot replace them: a ``DTensor``
describes a part that is one slice of the full tensor, not a rank's thirds of fused queries, keys
and values; and its metadata is a pickle, which runs code when it is read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import Placement
from hvkit.sync.agreements import SENT

# Makes a tensor to fill.
New = Callable[[torch.Size, torch.dtype], torch.Tensor]

_SHAPE, _PIECES, _VALUES, _PLAIN = "shape", "pieces", "values", "plain"


@dataclass(frozen=True)
class Block:
    """A block of a full tensor that a rank has."""

    start: tuple[int, ...]  # in the full tensor
    at: tuple[int, ...]  # in the rank's part
    size: tuple[int, ...]


def blocks_of(
    shape: Sequence[int],
    rows: tuple[int, int] | None = None,
    placement: Placement | None = None,
    index: int = 0,
    ways: int = 1,
) -> list[Block]:
    """The blocks of a full tensor that a rank has.

    The shape is that of the part of the tensor axis, of which the rank has these rows, or all. The
    placement along that axis, if it divides the tensor, gives its part ``index`` of ``ways``.
    """
    # Along each dimension: the offset in the full tensor, that in the rank's part, and the length.
    along = [[(0, 0, length)] for length in shape]
    if placement is not None:
        length = shape[placement.dim] // placement.parts
        # Each part of a fused tensor holds the slices of all ranks, in their order.
        along[placement.dim] = [
            ((part * ways + index) * length, part * length, length)
            for part in range(placement.parts)
        ]
    if rows is not None:
        first, last = rows
        cut = [(start - at, max(at, first), min(at + n, last)) for start, at, n in along[0]]
        along[0] = [
            (by + begin, begin - first, end - begin) for by, begin, end in cut if begin < end
        ]
    return [
        Block(*(tuple(each[i] for each in chosen) for i in range(3)))
        for chosen in itertools.product(*along)
    ]


@dataclass
class SavedTensor:
    """A tensor in a sharded checkpoint: blocks of the full one, each with its offset."""

    shape: torch.Size
    pieces: list[tuple[Sequence[int], torch.Tensor]]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0][1].dtype  # a rank that has none of the rows writes no piece

    def full(self, new: New | None = None) -> torch.Tensor:
        """The full tensor; with ``new`` perhaps in the memory of the file, which must stay."""
        if new and len(self.pieces) == 1 and self.pieces[0][1].shape == self.shape:
            return self.pieces[0][1]
        target = new(self.shape, self.dtype) if new else torch.empty(self.shape, dtype=self.dtype)
        self.fill(target, blocks_of(self.shape))
        return target

    def fill(self, own: torch.Tensor, blocks: Sequence[Block]) -> None:
        """Copy these blocks into a rank's part of the tensor, which they must fill."""
        filled = 0
        for block, (start, piece) in itertools.product(blocks, self.pieces):
            if shared := _shared(block, start, piece.shape):
                at, of_piece = shared
                own[at].copy_(piece[of_piece])
                filled += piece[of_piece].numel()
        if filled != own.numel():
            raise HvkitError(
                f"its pieces of a tensor of shape {tuple(self.shape)} hold {filled} of the "
                f"{own.numel()} elements of this rank's part"
            )


def _shared(
    block: Block, start: Sequence[int], size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The intersection of a block and a piece: in the rank's part, and in the piece."""
    own, of_piece = [], []
    for begin, at, length, other, extent in zip(
        block.start, block.at, block.size, start, size, strict=True
    ):
        first, last = max(begin, other), min(begin + length, other + extent)
        if first >= last:
            return None
        own.append(slice(first - begin + at, last - begin + at))
        of_piece.append(slice(first - other, last - other))
    return tuple(own), tuple(of_piece)


def described(own: torch.Tensor, shape: Sequence[int], blocks: Sequence[Block]) -> dict[str, Any]:
    """A rank's part of a tensor, as its file holds it."""
    if own.untyped_storage().nbytes() != own.numel() * own.element_size():
        own = own.clone()  # torch.save writes the whole storage of a view
    pieces = [
        (list(block.start), own[tuple(map(slice, block.at, map(add, block.at, block.size)))])
        for block in blocks
    ]
    return {_SHAPE: list(shape), _PIECES: pieces}


def described_state(
    value: Any, tensor: Callable[[torch.Tensor], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """A tensor, the state of a parameter, or another value in it, as a file holds it."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, Mapping):
        values = {key: described_state(each, tensor) for key, each in value.items()}
        return {_VALUES: {key: each for key, each in values.items() if each is not None}}
    return {_PLAIN: value}


class SavedState:
    """A model, an optimizer or a strategy's state in a sharded checkpoint, of all ranks' files."""

    def __init__(self, files: Sequence[Path]) -> None:
        # All but tensors, as rank 0 has written it.
        self.plan: dict[str, Any] = {}
        # By name, a ``SavedTensor``, or the values of a parameter's state.
        self.values: dict[str, Any] = {}
        for file in files:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            self.plan |= content["plan"] or {}
            for name, value in content["state"].items():
                self.values[name] = _merged(self.values.get(name), value)

    def plain(self, new: New | None = None) -> Any:
        """A state dict, or a strategy's arrays, as one process would have saved them."""
        plan, names = self.plan, self.plan["names"]
        joined = functools.partial(SavedTensor.full, new=new)
        if plan["kind"] == "model":
            full = {name: joined(self.values[name]) for name in dict.fromkeys(names.values())}
            plan["state"].update({key: full[name] for key, name in names.items()})
            return plan["state"]
        number = {name: i for i, name in enumerate(names) if name in self.values}
        states = {name: with_tensors_of(self.values[name], joined) for name in number}
        if plan["kind"] == "strategy":
            return strategy_arrays(plan["counts"].numpy(), states, number)
        of_parameters = {number[name]: state for name, state in states.items()}
        return {"state": of_parameters | plan["other"]} | plan["rest"]


def with_tensors_of(value: Any, tensor: Callable[[SavedTensor], torch.Tensor]) -> Any:
    """A value of a ``SavedState`` with a tensor in place of each ``SavedTensor``."""
    if isinstance(value, SavedTensor):
        return tensor(value)
    if isinstance(value, dict):
        return {key: with_tensors_of(each, tensor) for key, each in value.items()}
    return value


def _merged(known: Any, value: Mapping[str, Any]) -> Any:
    """A value with the pieces that another rank has written of it."""
    if _PIECES in value:
        known = known or SavedTensor(torch.Size(value[_SHAPE]), [])
        known.pieces.extend(value[_PIECES])
        return known
    if _VALUES in value:
        known = known or {}
        return known | {key: _merged(known.get(key), v) for key, v in value[_VALUES].items()}
    return value[_PLAIN]


def model_plan(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A model's state dict without tensors, for rank 0's file.

    For each key there is the name of a parameter or buffer, the same for tied ones.
    """
    state.update(dict.fromkeys(names))
    return {"kind": "model", "state": state, "names": dict(names)}


def optimizer_plan(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An optimizer's state dict without states of parameters, for rank 0's file."""
    other = {key: value for key, value in state["state"].items() if not isinstance(key, int)}
    rest = {key: value for key, value in state.items() if key != "state"}
    return {"kind": "optimizer", "other": other, "rest": rest, "names": list(names)}


def strategy_plan(counts: np.ndarray[Any, Any], names: Sequence[str]) -> dict[str, Any]:
    """A strategy's state that belongs to no parameter, for rank 0's file."""
    return {"kind": "strategy", "counts": torch.from_numpy(counts), "names": list(names)}


COUNTS, TRAINED = "counts", "trained"


def strategy_arrays(
    counts: np.ndarray[Any, Any],
    full: Mapping[str, Mapping[str, torch.Tensor]],
    number: Mapping[str, int],
) -> dict[str, np.ndarray[Any, Any]]:
    """A strategy's state as one process would save it, and ``RoundSync.state`` returns it.

    The counts belong to no parameter. ``full`` has by parameter the strategy's tensors of its
    shape, and whether ranks have trained it since they agreed on it.
    """
    arrays = {
        f"{kept}.{number[name]}": t.reshape(-1).numpy()
        for name, state in full.items()
        for kept, t in state.items()
        if kept != TRAINED
    }
    trained = sorted(number[name] for name, state in full.items() if state[TRAINED])
    return arrays | {COUNTS: counts, TRAINED: np.array(trained, np.int64)}


def strategy_values(
    arrays: Mapping[str, np.ndarray[Any, Any]],
    number: Mapping[str, int],
    shape_of: Callable[[str], Sequence[int]],
) -> dict[str, dict[str, torch.Tensor]]:
    """The argument ``full`` of ``strategy_arrays``, from its result, for these parameters."""
    trained = set(arrays[TRAINED].tolist())
    found = {name: {TRAINED: torch.tensor(i in trained)} for name, i in number.items()}
    names = {str(i): name for name, i in number.items()}
    for key, vector in arrays.items():
        kept, _, i = key.partition(".")
        if i in names and not key.startswith(SENT):
            # A complex number travels as two.
            t = torch.from_numpy(vector).reshape(*shape_of(names[i]), -1)
            found[names[i]][kept] = t
    return found
