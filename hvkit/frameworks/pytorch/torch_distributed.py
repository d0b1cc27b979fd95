"""``torch.distributed`` between Horovod's ranks, for PyTorch's ``fully_shard`` and meshes.

It needs no variables of ``torchrun``: rank 0 opens a store, whose address Horovod sends to others.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.errors import LaunchError
from hvkit.host.network import addresses_for_others, interface_towards
from hvkit.pipeline.messages import Channel, TensorSpec
from hvkit.transport.traffic import count

# Seconds to try one address of rank 0's host.
_PATIENCE = 5


@functools.cache
def start() -> None:
    """Start ``torch.distributed`` with Horovod's ranks; a collective, the first time."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in all builds

    offered: Any = None
    if runtime.rank() == 0:
        store = TCPStore("127.0.0.1", 0, runtime.size(), True, wait_for_workers=False)
        one_host = runtime.local_size() == runtime.size()
        offered = ("127.0.0.1",) if one_host else addresses_for_others(), store.port
    addresses, port = collectives.from_rank(0, offered)
    towards = ((each, interface_towards(each, port, _PATIENCE)) for each in addresses)
    reached, interface = next((pair for pair in towards if pair[1]), (None, None))
    problem = None
    if reached is None:
        problem = LaunchError(
            f"rank {runtime.rank()} cannot reach rank 0 at {' or '.join(addresses)}, port {port}, "
            "for torch.distributed: let the hosts connect to each other on all ports"
        )
    by_rank = collectives.gather_or_raise("distribute", problem, (reached, interface))
    if runtime.rank() == 0:
        # The interface that the others see, not the one through which this host sees itself.
        seen = next((address for address, _ in by_rank[1:] if address), None)
        interface = interface_towards(seen, port, _PATIENCE) if seen else interface
    else:
        assert reached is not None
        store = TCPStore(reached, port, runtime.size(), False)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "gloo"
    if torch.cuda.is_available():
        # NCCL needs a GPU for each rank.
        backend = "cpu:gloo,cuda:gloo" if ranks_share_gpus() else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=runtime.rank(), world_size=runtime.size())
    atexit.register(stop)


def ranks_share_gpus() -> bool:
    """Whether several ranks of this run use the same GPU, so that messages go through the host."""
    return bool(getattr(runtime.engine("torch"), "shared_gpu", False))


def require_gpus_of_their_own() -> None:
    """Raise if ranks share a GPU: gloo does not gather and scatter what is there."""
    if ranks_share_gpus():
        raise LaunchError(
            "several ranks share a GPU, and NCCL, with which PyTorch gathers divided weights and "
            "runs its schedules, needs one for each rank: start one rank for each GPU, or use a "
            "strategy that leaves the weights whole, such as hvkit.ShardedOptimizer(), or a "
            'pipeline with schedule="GPipe"'
        )


@functools.cache
def device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Groups of ranks along each axis of a mesh of all ranks; a collective, the first time."""
    start()
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@functools.cache
def group_of(rows: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    """This rank's group, of some that hold each rank once; a collective, the first time."""
    start()
    divide: Any = dist.new_subgroups_by_enumeration
    group: dist.ProcessGroup = divide([list(row) for row in rows])[0]
    return group


@functools.cache
def subgroup_of(ranks: tuple[int, ...], members: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of some of these ranks; of this rank only if it is not a member.

    PyTorch names a group by the number of groups that its rank has made, and members wait for ranks
    that use another name. So all ranks make one, in the same order; members wait for no one else.
    """
    rank = runtime.rank()
    group_of_rank = members if rank in members else (rank,)
    group: Any = dist.new_group(list(group_of_rank), use_local_synchronization=True)
    return group  # type: ignore[no-any-return]


def started() -> bool:
    """Whether ``torch.distributed`` is the one that ``start`` has started."""
    return start.cache_info().currsize > 0


def stop() -> None:
    """End ``torch.distributed`` if ``start`` has started it."""
    if started() and dist.is_initialized():
        dist.destroy_process_group()
    for each in (start, device_mesh, group_of, subgroup_of):
        each.cache_clear()
    # DTensor's caches have the names of groups that are no more.
    if tensor := sys.modules.get("torch.distributed.tensor"):
        propagator: Any = tensor.DTensor._op_dispatcher.sharding_propagator
        # Versions of PyTorch have the one, the other, or both.
        of_c = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
        for clear in (getattr(propagator.propagate_op_sharding, "cache_clear", None), of_c):
            if clear is not None:
                clear()


class TorchChannel(Channel):
    """Sends tensors between the ranks of a group, in whose order they form the pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        super().__init__(dist.get_process_group_ranks(group), dist.get_rank(), name)
        self.group, self.device = group, device
        self._wire_device = torch.device("cpu") if ranks_share_gpus() else device

    def start(self, data: Any, to: int) -> Callable[[], object]:
        if isinstance(data, np.ndarray):
            t = torch.from_numpy(data)
        else:
            count("activations", data.numel() * data.element_size())
            t = data.detach().to(self._wire_device).contiguous()
        work = dist.isend(t, self.ranks[to], group=self.group)
        return lambda: (work and work.wait(), t)  # the tensor stays in memory until then

    def expect(self, spec: TensorSpec, source: int) -> Callable[[], torch.Tensor]:
        t = empty(spec, self._wire_device)
        work = dist.irecv(t, self.ranks[source], group=self.group)

        def wait() -> torch.Tensor:
            assert work is not None
            work.wait()
            return t.to(self.device)

        return wait

    def bytes_from(self, source: int, size: int) -> NDArray[np.uint8]:
        t = torch.empty(size, dtype=torch.uint8)
        dist.recv(t, self.ranks[source], group=self.group)
        return t.numpy()

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def dtype_named(self, name: str) -> Any:
        return getattr(torch, name)

    def detached(self, tensors: list[Any]) -> list[Any]:
        return [t.detach() for t in tensors]

    def broadcast(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors of one rank to the others, in place."""
        with self.waiting():
            for t in tensors:
                if self.rank == source:
                    count("activations", t.numel() * t.element_size())
                dist.broadcast(t, self.ranks[source], group=self.group)

    def object_from_rank(self, source: int, obj: Any) -> Any:
        box = [obj]
        with self.waiting():
            dist.broadcast_object_list(box, self.ranks[source], group=self.group)
        return box[0]


def empty(spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)
