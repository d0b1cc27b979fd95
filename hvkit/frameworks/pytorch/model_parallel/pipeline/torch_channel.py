"""Messages between ranks of a mesh, by ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hvkit.frameworks.pytorch.divided_state import process_group
from hvkit.pipeline.channel import Channel, TensorSpec
from hvkit.transport.traffic import count


class TorchChannel(Channel):
    """Sends tensors between the ranks of a group, in whose order they form the pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        super().__init__(dist.get_process_group_ranks(group), dist.get_rank(), name)
        self.group, self.device = group, device
        self._wire_device = torch.device("cpu") if process_group.ranks_share_gpus() else device

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
