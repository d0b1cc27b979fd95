"""The one place that calls Horovod's collectives on tensors of PyTorch; it counts their bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hvkit import runtime
from hvkit.communication.exchanges import AllToAll, Exchange, Gather, Mean, Messages
from hvkit.compression.compression import Shape
from hvkit.runtime import Group, all_ranks
from hvkit.transport.traffic import count, of_allgather, of_allreduce, of_alltoall, of_messages
from hvkit.watch.calls import translated, waiting_for_all_ranks

# Horovod's allreduce has no bfloat16, and a sum in float16 may overflow although the mean fits.
_WIRE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


class Wire:
    """Collectives on tensors of a group or all ranks, for one purpose of ``hvkit.traffic``.

    Methods named ``start_`` return at once; ``wait`` returns their result. No two collectives that
    run at the same time have the same name. A rank that is lost ends every wait with
    ``RankLostError``; ranks that send different shapes or dtypes all raise ``RanksDisagreeError``.
    """

    def __init__(self, purpose: str, group: Group | None = None) -> None:
        group = group or all_ranks()
        self._hvd = runtime.engine("torch").hvd
        self._within = group.process_set
        self._ranks = group.process_set or self._hvd.global_process_set
        self._purpose = purpose
        self.rank, self.size = group.rank, group.size
        # If gradients may be multiplied by it before they are added up: a power of two, which
        # rounds nothing but subnormal numbers.
        self.prescale = 1 / self.size if self.size.bit_count() == 1 else None

    def start_mean(self, tensor: torch.Tensor, name: str) -> int:
        """Start to average a tensor over ranks, in place."""
        return self._start_reduction(tensor, name, self._hvd.Average)

    def start_sum(self, tensor: torch.Tensor, name: str) -> int:
        """Start to add up a tensor over ranks, in place."""
        return self._start_reduction(tensor, name, self._hvd.Sum)

    def _start_reduction(self, tensor: torch.Tensor, name: str, op: Any) -> int:
        count(self._purpose, of_allreduce(tensor.nbytes, self.size))
        with translated():
            handle: int = self._hvd.allreduce_async_(
                tensor, name=name, op=op, process_set=self._ranks
            )
            return handle

    def start_gather(self, tensor: torch.Tensor, name: str) -> int:
        """Start to put all ranks' rows below each other, perhaps different numbers of them."""
        count(self._purpose, of_allgather(tensor.nbytes, self.size))
        return self._start(self._hvd.allgather_async, tensor, name)

    def _start(self, collective: Any, tensor: torch.Tensor, name: str, **options: Any) -> int:
        with translated(), torch.inference_mode(False):
            # Horovod's thread is outside of inference mode.
            tensor = tensor.clone() if tensor.is_inference() else tensor
            handle: int = collective(tensor, name=name, process_set=self._ranks, **options)
            return handle

    def start(self, exchange: Exchange, name: str) -> Callable[[], torch.Tensor]:
        """Start an exchange of a compression or a strategy; return a function that waits for it."""
        match exchange:
            case Mean(vector):
                handle = self.start_mean(vector.clone(), name)
            case Gather(rows):
                handle = self.start_gather(rows, name)
            case AllToAll(rows):
                count(self._purpose, of_alltoall(rows.nbytes, self.size))
                handle = self._start(self._hvd.alltoall_async, rows, name)
            case Messages(rows, sent):
                size = rows.nbytes // max(len(rows), 1)
                count(self._purpose, *of_messages(size, sent, self.rank))
                with torch.inference_mode(False):
                    splits = torch.tensor(sent, dtype=torch.int32, device="cpu")
                handle = self._start(self._hvd.alltoall_async, rows, name, splits=splits)
        return functools.partial(self.wait, handle)

    def wait(self, handle: int) -> torch.Tensor:
        """The result of a collective. On a GPU only what the host queues later waits for a mean."""
        with waiting_for_all_ranks(self._within):
            result = self._hvd.synchronize(handle)
        # From an all-to-all also how many elements came from each rank.
        tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
        _follow_default_stream(tensor)
        return tensor

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The sum over ranks, in a new tensor."""
        return self.wait(self.start_sum(tensor.detach().clone(), name))

    def gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """All ranks' rows, as ``start_gather``."""
        return self.wait(self.start_gather(tensor, name))


def _follow_default_stream(result: torch.Tensor) -> None:
    """Queue further work of this thread, on any stream, after Horovod's, on the default one."""
    if not result.is_cuda:
        return
    stream = torch.cuda.current_stream(result.device)
    default = torch.cuda.default_stream(result.device)
    if stream != default:
        stream.wait_stream(default)
        result.record_stream(stream)  # Horovod may have made it on the default one


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are sent and added up."""
    return _WIRE_DTYPE.get(dtype, dtype)


def real_shape(tensor: torch.Tensor) -> Shape:
    """The shape of the tensor's real numbers; a complex number is two."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def shaped_like(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Real numbers, as many as in ``real_shape``, in the tensor's shape."""
    numbers = numbers.view(real_shape(tensor))
    return torch.complex(*numbers.unbind(-1)) if tensor.is_complex() else numbers


def to_vector(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as a vector of real numbers, in the dtype in which it is sent."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.reshape(-1).to(wire_dtype(tensor.dtype), copy=True)


def set_from_vector(tensor: torch.Tensor, vector: torch.Tensor) -> None:
    """Set a tensor from a vector that ``to_vector`` made."""
    tensor.detach().copy_(shaped_like(tensor, vector))
