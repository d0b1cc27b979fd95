"""Reduces GPU tensors in host memory, for a Horovod that was built without GPU support.

Such a Horovod takes only tensors on the CPU. ``HostMemory`` copies tensors there and back.
Training gives the same result but takes longer, because nothing overlaps with the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The collectives whose first argument is one tensor. A trailing underscore means in place.
_AT_ONCE = ("allreduce", "allreduce_", "allgather", "broadcast", "broadcast_", "alltoall")
_LATER = tuple(f"{name.rstrip('_')}_async{'_' * name.endswith('_')}" for name in _AT_ONCE)


class HostMemory(ModuleType):
    """Horovod's PyTorch binding, whose collectives also take tensors on GPUs.

    Everything else is Horovod's own.

    Args:
        hvd: the binding, built without GPU support.
    """

    def __init__(self, hvd: ModuleType) -> None:
        super().__init__(hvd.__name__, self.__doc__)
        self._hvd = hvd
        # By handle of a running collective: the function that copies its result to the GPU.
        self._returns: dict[int, Callable[[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._hvd, name)
        if name not in (*_AT_ONCE, *_LATER):
            return function

        def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                return function(tensor, *args, **kwargs)
            back = partial(_bring_back, tensor, in_place=name.endswith("_"))
            given = function(tensor.detach().cpu(), *args, **kwargs)
            if name in _AT_ONCE:
                return back(given)
            self._returns[given] = back
            return given

        return collective

    def synchronize(self, handle: int) -> Any:
        """Wait for a collective and return its result, on the device of its tensor."""
        back = self._returns.pop(handle, None)
        result = self._hvd.synchronize(handle)
        return back(result) if back else result


def _bring_back(tensor: torch.Tensor, result: Any, in_place: bool) -> Any:
    if isinstance(result, tuple):  # from alltoall: the rows, and how many came from each rank
        return _bring_back(tensor, result[0], in_place), result[1]
    if in_place:
        tensor.detach().copy_(result)
        return tensor
    return tensor.new_empty(result.shape, dtype=result.dtype).copy_(result)
