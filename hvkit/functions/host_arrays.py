"""Tensors as they travel between processes: in the host's memory, and no larger than they are.

A tensor that was pickled on a GPU would be restored there: it would take a GPU of the process that
has started the ranks, or fail where there is none. An array of JAX's or TensorFlow's would start
that framework wherever it is unpickled, with all GPUs; on a rank, before hvkit can.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def host_copy(thing: object) -> Any:
    """What to pickle instead of a tensor; None for what is pickled as it is.

    A part of a tensor of PyTorch's becomes a tensor of its own, without the rest of its storage.
    Arrays of JAX's and tensors of TensorFlow's become NumPy's.

    Raises:
        TypeError: this rank has only a part of an array.
    """
    if (torch := sys.modules.get("torch")) is not None and isinstance(thing, torch.Tensor):
        return _of_torch(thing, torch)
    jax: Any = sys.modules.get("jax")
    of_jax: Any = getattr(jax, "Array", ())
    if isinstance(thing, of_jax):
        if not thing.is_fully_addressable and not thing.is_fully_replicated:
            raise TypeError(
                f"an array of shape {thing.shape} is divided among the ranks: call "
                "jax.experimental.multihost_utils.process_allgather(array, tiled=True) on every one"
            )
        is_key = jax.dtypes.issubdtype(thing.dtype, jax.dtypes.prng_key)
        return None if is_key else np.array(thing)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(thing, getattr(tensorflow, "Tensor", ())):
        return np.array(thing.numpy()) if hasattr(thing, "numpy") else None
    return None


def _of_torch(tensor: Any, torch: Any) -> Any:
    if tensor.device.type == "cuda":
        copy = tensor.detach().cpu()
    elif _is_part(tensor, torch):
        copy = tensor.detach().clone()
    else:
        return None
    copy.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    return copy


def _is_part(tensor: Any, torch: Any) -> bool:
    """Whether its storage holds more than this tensor."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return bool(tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size())
