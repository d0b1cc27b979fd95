"""Arrays of all ranks' devices: their shardings, and their numbers in host memory.

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
from hvkit.communication.collectives import broadcast_state

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


def is_array(leaf: object) -> bool:
    """Whether a leaf of a tree is an array, and no number, function or text."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_key(leaf: Any) -> bool:
    """Whether it is an array of keys of ``jax.random``, which are no numbers."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """A copy of an undivided array in host memory; a key becomes the numbers it is made of."""
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return np.array(data, jax.dtypes.canonicalize_dtype(data.dtype), order="C")


def local_data(leaf: Any) -> np.ndarray[Any, Any]:
    """This rank's part of an array, in host memory: all of it if each device has the whole."""
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if not isinstance(data, jax.Array) or data.is_fully_addressable:
        return np.asarray(data)
    return np.asarray(data.addressable_data(0))


def local_index(leaf: Any) -> Any:
    """The index of ``local_data`` in the whole array; None if it is the whole array."""
    return None if is_replicated(leaf) else leaf.addressable_shards[0].index


def global_array(leaf: Any, host: np.ndarray[Any, Any], sharding: ShardingOf) -> jax.Array:
    """An array in place of a leaf, on the devices of all ranks, with numbers as from ``to_host``.

    The numbers are the same on every rank.
    """
    # Not device_put, which would compare the numbers of all ranks.
    sharding = replicated if is_key(leaf) else sharding
    array = jax.make_array_from_callback(
        host.shape, sharding(host.shape), lambda index: host[index]
    )
    return _as_key(leaf, array)


def _as_key(leaf: Any, array: jax.Array) -> jax.Array:
    """The array, or if a leaf is an array of keys, the keys with these numbers."""
    if not is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))


def shape_in_host(leaf: Any) -> tuple[int, ...]:
    return tuple(jax.random.key_data(leaf).shape if is_key(leaf) else leaf.shape)


def with_numbers(leaf: Any, host: np.ndarray[Any, Any]) -> Any:
    """An array with numbers as from ``to_host``, on the same devices as a leaf.

    They are the same on every rank if the array belongs to several.
    """
    if not isinstance(leaf, jax.Array):
        return host.astype(leaf.dtype)[() if isinstance(leaf, np.generic) else ...]
    host = host if is_key(leaf) else host.astype(leaf.dtype)
    if not leaf.is_fully_addressable:
        return global_array(leaf, host, lambda shape: leaf.sharding)
    # Not always: on a single device, an array that may go anywhere would be bound to it.
    on_several = len(leaf.sharding.device_set) > 1 and not is_key(leaf)
    array = jax.device_put(host, leaf.sharding) if on_several else jax.numpy.asarray(host)
    return _as_key(leaf, array)


def from_rank_0(tree: Any, sharding: ShardingOf | None) -> Any:
    """A tree whose arrays have rank 0's numbers; a collective.

    The sharding is over all ranks' devices; with None arrays stay on this rank's, as they are now.
    """

    def received(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        host = to_host(leaf)
        broadcast_state(host.reshape(-1).view(np.uint8))
        return with_numbers(leaf, host) if sharding is None else global_array(leaf, host, sharding)

    return jax.tree.map(received, gathered(tree))


def gathered(tree: Any) -> Any:
    """A tree whose arrays are whole on every device; a collective, if some are divided."""

    def whole_of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return jax.jit(lambda x: x, out_shardings=replicated(leaf.shape))(leaf)

    return jax.tree.map(whole_of, tree)


def is_replicated(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_replicated
