"""Where arrays are on the devices of all ranks, which stand in a mesh.

Ranks along the axes data and shard have a part of each batch, those along the axis tensor the same
one. A weight is whole on each device, or divided by its longest dimension: that of the wide layer
in a pair of linear layers, so that the first is divided by its outputs and the second by its
inputs, and what is between them stays divided (Shoeybi et al., "Megatron-LM", 2019). Whatever the
division, XLA computes the same (Xu et al., "GSPMD", 2021): it divides the work alike, and adds the
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hvkit import mesh as of_hvkit
from hvkit import runtime

LOCAL = "local"
"""The axis of the devices of one rank, if it has several."""

ALL_BATCHES = ("data", "shard", LOCAL)
"""Devices along these axes have rows of their own."""

Place = Callable[[tuple[int, ...]], NamedSharding]
"""The sharding of an array of some shape."""

# Of all models of the script; None before the first call of distribute.
_ranks: of_hvkit.Mesh | None = None


def refuse_another(mesh: of_hvkit.Mesh) -> None:
    """Raise if the ranks are in another mesh already.

    Raises:
        ValueError: they are.
    """
    if _ranks not in (None, mesh):
        raise ValueError(
            "in one script, all models of JAX have the same mesh, because hvkit.batch makes one "
            f"batch for all of them: got {mesh}, and before {_ranks}"
        )


def arrange(mesh: of_hvkit.Mesh) -> None:
    """Put the ranks into a mesh, without -1, in which they stay."""
    global _ranks
    _ranks = mesh


def position() -> of_hvkit.MeshPosition:
    """This rank's place in the mesh."""
    return of_hvkit.MeshPosition(_ranks or of_hvkit.Mesh(runtime.size()), runtime.rank())


def parts_of_a_batch() -> list[int]:
    """For each rank, which part of a batch it gives."""
    return [each.batch for each in of_hvkit.positions(position().mesh)]


def all_devices() -> Mesh:
    """The devices of all ranks, those of a rank along an axis of their own."""
    mesh = position().mesh
    return _mesh_of_devices(mesh.data, mesh.shard, mesh.tensor)


@cache
def _mesh_of_devices(data: int, shard: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(data, shard, tensor, -1)
    return Mesh(devices, ("data", "shard", "tensor", LOCAL))


def whole(shape: tuple[int, ...]) -> NamedSharding:
    """On every device the whole array."""
    return NamedSharding(all_devices(), PartitionSpec())


def by_rows() -> NamedSharding:
    """On every device that has rows of its own an equal part of the rows."""
    return NamedSharding(all_devices(), PartitionSpec(ALL_BATCHES))


def divided(*cuts: tuple[str, ...]) -> Place:
    """Where arrays are that devices divide, each cut by another dimension.

    A cut takes the longest dimension that it divides evenly; if there is none without a cut, one
    that has one already; an array without either is whole along those axes. What ranks of the axis
    tensor divide has two dimensions or more.

    Args:
        *cuts: the axes of the mesh that divide a dimension.
    """
    return partial(_divided, cuts) if cuts else whole


def _divided(cuts: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> NamedSharding:
    mesh = all_devices()
    axes: list[tuple[str, ...]] = [() for _ in shape]
    for cut in cuts:
        if "tensor" in cut and len(shape) < 2:
            continue

        def usable(dimension: int, cut: tuple[str, ...] = cut) -> bool:
            parts = prod(mesh.shape[axis] for axis in (*axes[dimension], *cut))
            return shape[dimension] > 0 and shape[dimension] % parts == 0

        fitting = [n for n in range(len(shape)) if usable(n)]
        if chosen := [n for n in fitting if not axes[n]] or fitting:
            heads = _heads(shape) if "tensor" in cut else None
            longest = max(chosen, key=lambda n: shape[n])
            axes[heads if heads in chosen else longest] += cut
    return NamedSharding(mesh, PartitionSpec(*(each or None for each in axes)))


def _heads(shape: tuple[int, ...]) -> int | None:
    """The dimension of the heads, if an array of this shape joins the heads of attention.

    Flax and Keras give such a kernel the shape (width, heads, width of a head), or the reverse.
    """
    if len(shape) == 3 and shape[0] == shape[1] * shape[2]:
        return 1
    if len(shape) == 3 and shape[2] == shape[0] * shape[1]:
        return 0
    return None


def share_held(tree: Any) -> float:
    """Which part of the numbers of all arrays each rank holds."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    held: int = sum(prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in arrays)
    return held / max(1, sum(int(leaf.size) for leaf in arrays))
