"""The mesh of all ranks' devices, and the shardings of arrays over it.

Ranks along the axes data and shard have different parts of each batch, ranks along the axis tensor
have the same part. A weight is whole on each device, or divided along its longest dimension. In a
pair of linear layers with a wide space between them, this divides the first by its outputs and the
second by its inputs, so that the values in between stay divided (Shoeybi et al., "Megatron-LM",
2019). XLA computes the same with any sharding (Xu et al., "GSPMD", 2021): it divides the work
accordingly, and adds the collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hvkit import mesh as rank_mesh
from hvkit import runtime

LOCAL = "local"
"""The axis of the devices of one rank, if it has several."""

BATCH_AXES = ("data", "shard", LOCAL)
"""The axes along which devices have different rows of a batch."""

ShardingOf = Callable[[tuple[int, ...]], NamedSharding]
"""The sharding of an array of some shape."""

# Of all models of the script; None before the first call of distribute.
_ranks: rank_mesh.Mesh | None = None


def refuse_other_mesh(mesh: rank_mesh.Mesh) -> None:
    if _ranks not in (None, mesh):
        raise ValueError(
            "in one script, all models of JAX have the same mesh, because hvkit.batch makes one "
            f"batch for all of them: got {mesh}, and before {_ranks}"
        )


def set_mesh(mesh: rank_mesh.Mesh) -> None:
    """Let the ranks form a mesh, without -1, for the rest of the script."""
    global _ranks
    _ranks = mesh


def position() -> rank_mesh.MeshPosition:
    return rank_mesh.MeshPosition(_ranks or rank_mesh.Mesh(runtime.size()), runtime.rank())


def batch_parts() -> list[int]:
    return [each.batch for each in rank_mesh.positions(position().mesh)]


def device_mesh() -> Mesh:
    """The devices of all ranks; the devices of one rank are along the axis ``LOCAL``."""
    mesh = position().mesh
    return _device_mesh(mesh.data, mesh.shard, mesh.tensor)


@cache
def _device_mesh(data: int, shard: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(data, shard, tensor, -1)
    return Mesh(devices, ("data", "shard", "tensor", LOCAL))


def replicated(shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(device_mesh(), PartitionSpec())


def sharded_by_rows() -> NamedSharding:
    """Devices along the axes of batches have equal parts of the rows."""
    return NamedSharding(device_mesh(), PartitionSpec(BATCH_AXES))


def sharded(*cuts: tuple[str, ...]) -> ShardingOf:
    """The sharding of arrays that devices divide, by each cut along other axes of the mesh.

    A cut takes the longest dimension that it divides evenly. If each of these has a cut already, it
    takes one of them all the same. An array without such a dimension is whole along these axes.
    Ranks of the axis tensor divide only arrays of two dimensions or more.
    """
    return partial(_sharded, cuts) if cuts else replicated


def _sharded(cuts: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> NamedSharding:
    mesh = device_mesh()
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
    match shape:
        case (width, heads, of_head) if width == heads * of_head:
            return 1
        case (heads, of_head, width) if width == heads * of_head:
            return 0
    return None


def fraction_held(tree: Any) -> float:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    on_device: int = sum(prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in arrays)
    return on_device / max(1, sum(int(leaf.size) for leaf in arrays))
