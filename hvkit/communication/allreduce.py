"""``hvkit.allreduce``: sum, mean, minimum or maximum over ranks of an array of any library.

Arrays of every type are sent as NumPy arrays in host memory. Half precision is summed in float32
and rounded once, short integers are summed in int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from hvkit import runtime
from hvkit.communication.collectives import gather_or_raise
from hvkit.errors import RanksDisagreeError
from hvkit.registry import gather_module, in_graph, tensor_in
from hvkit.watch.calls import named
from hvkit.watch.rank_errors import mark_as_shown_by

Tensor = TypeVar("Tensor")

Operation = Literal["mean", "sum", "min", "max"]
_OPS = get_args(Operation)

# Elements in one allreduce: MPI counts them in a C int, and each piece is copied once.
_PIECE = 1 << 26

# The dtype in which each dtype is sent: one that all of Horovod's libraries have.
_SENT_AS = {
    **dict.fromkeys(("bool", "int32"), "int32"),
    **dict.fromkeys(("int8", "int16", "int64", "uint8", "uint16", "uint32"), "int64"),
    **dict.fromkeys(("float16", "bfloat16", "float32", "complex64"), "float32"),
    **dict.fromkeys(("float64", "complex128"), "float64"),
}


@dataclass(frozen=True)
class _Value:
    """A value as an array, and how to convert back."""

    dtype: str  # the value's, a key of ``_SENT_AS``
    array: NDArray[Any]  # its elements; bfloat16, which NumPy lacks, as float32
    restore: Callable[[NDArray[Any]], Any]  # turns an array of the same shape into the value's type


@overload
def allreduce(value: float, op: Operation = "mean") -> float: ...


@overload
def allreduce(value: Tensor, op: Operation = "mean") -> Tensor: ...


@named("hvkit.allreduce")
def allreduce(value: Any, op: Operation = "mean") -> Any:
    """Reduce each element over the ranks; every rank gets the same result.

    ``correct = hvkit.allreduce(correct, op="sum")``. A collective: every rank must call it, with
    the same ``op``, dtype and shape. For means weighted by samples use ``hvkit.average``.
    Gradients need no call.

    Args:
        value: a PyTorch tensor; a TensorFlow tensor or variable or a Keras variable, also inside
            of ``tf.function``, as in a loss of ``fit``; a NumPy array; or a Python number. Any
            shape. bool, int8 to int64, uint8 to uint32, float16, bfloat16, float32, float64,
            complex64 or complex128 (not in graphs).
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``. As in PyTorch, integer tensors have no
            mean; Python integers do, a float. bool has ``"min"`` (all true) and ``"max"`` (any
            true). Complex numbers have no ``"min"`` and ``"max"``.

    Returns:
        A new tensor, array or number of the same dtype, shape and device; a tensor for a variable.
        float16 and bfloat16 are summed in float32 and rounded once. Integers overflow as their
        dtype does. A NaN on any rank makes that element NaN. Gradients do not flow through it.

    Raises:
        TypeError: the value has another type, or its dtype has no such ``op``; on every rank.
        ValueError: unknown ``op``; on every rank.
        RanksDisagreeError: the ranks' shapes, dtypes or ``op`` differ.
    """
    local: _Value | None = None
    problem: Exception | None = None
    number = isinstance(value, bool | int | float)
    if in_graph("hvkit.allreduce", value):
        return _in_graph(value, op)
    try:
        if op not in _OPS:
            raise ValueError(f"op must be one of {list(_OPS)}, got {op!r}")
        if not number:
            local = _converted(value)
            _require_defined(local.dtype, op)
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    facts = "a number" if local is None else f"{local.dtype} of shape {local.array.shape}"
    gathered = gather_or_raise(
        "allreduce", problem, (f"{op!r} of {facts}", value if number else None)
    )
    _require_same([facts for facts, _ in gathered])
    if local is None:
        return _of_numbers([number for _, number in gathered], op)
    return local.restore(_reduced(local, op))


def _in_graph(value: Any, op: Operation) -> Any:
    import tensorflow as tf

    tensor = tf.convert_to_tensor(value)
    if op not in _OPS:
        raise ValueError(f"op must be one of {list(_OPS)}, got {op!r}")
    _require_defined(tensor.dtype.name, op)
    if tensor.dtype.is_complex:
        raise TypeError(
            "in a graph hvkit.allreduce takes no complex numbers: reduce their real and imaginary "
            "parts"
        )
    return gather_module("tensorflow").allreduce(tensor, op, _SENT_AS[tensor.dtype.name])


def _require_same(gathered: list[str]) -> None:
    for rank, facts in enumerate(gathered):
        if facts != gathered[0]:
            error = RanksDisagreeError(
                f"rank {rank} calls allreduce with {facts}, rank 0 with {gathered[0]}: op, dtype "
                "and shape must be the same on every rank; hvkit.allgather takes objects that "
                "differ"
            )
            raise mark_as_shown_by(error, 0)


def _require_defined(dtype: str, op: str) -> None:
    if dtype not in _SENT_AS:
        raise TypeError(f"allreduce takes {', '.join(_SENT_AS)}, got {dtype}")
    if dtype == "bool" and op in ("mean", "sum"):
        raise TypeError(
            f"allreduce: bool has op='min' (all) and op='max' (any), got op={op!r}: convert it to "
            "an integer or float dtype first"
        )
    if "int" in dtype and op == "mean":
        raise TypeError(
            f"allreduce: {dtype} has no mean of its own dtype: convert it to a float dtype first, "
            "or use op='sum'"
        )
    if dtype.startswith("complex") and op in ("min", "max"):
        raise TypeError(
            f"allreduce: complex numbers have no order, got op={op!r}: use 'sum' or 'mean', or "
            "reduce the absolute values"
        )


def _of_numbers(numbers: list[Any], op: str) -> float:
    """The result for Python numbers; a NaN makes minimum and maximum NaN."""
    if op in ("min", "max") and not any(n != n for n in numbers):
        least_or_most: float = min(numbers) if op == "min" else max(numbers)
        return least_or_most
    total: float = sum(numbers)
    return total / len(numbers) if op == "mean" else total


def _reduced(value: _Value, op: str) -> NDArray[Any]:
    flat = np.ascontiguousarray(value.array).reshape(-1)
    result = np.empty_like(flat)
    for start in range(0, flat.size, _PIECE):
        piece = slice(start, start + _PIECE)
        result[piece] = _reduced_piece(flat[piece], value.dtype, op)
    return result.reshape(value.array.shape)


def _reduced_piece(piece: NDArray[Any], dtype: str, op: str) -> NDArray[Any]:
    if runtime.size() == 1:
        return piece
    dtype_here = piece.dtype
    sent = piece.view(dtype_here.type(0).real.dtype) if dtype_here.kind == "c" else piece
    sent = sent.astype(_SENT_AS[dtype])
    reduced = runtime.any_engine().allreduce(sent, "sum" if op == "mean" else op)
    if op == "mean":
        reduced = reduced / reduced.dtype.type(runtime.size())
    if op in ("min", "max") and reduced.dtype.kind == "f":
        # With MPI the result of a NaN depends on the order of ranks.
        nan = runtime.any_engine().allreduce(np.isnan(sent).astype(np.int32), "max") > 0
        reduced = np.where(nan, reduced.dtype.type(np.nan), reduced)
    if dtype_here.kind == "c":
        return reduced.view(dtype_here)
    with np.errstate(over="ignore", invalid="ignore"):
        return reduced.astype(dtype_here)


def _converted(value: Any) -> _Value:
    """The value as an array; imports no framework that the script has not imported."""
    package, value = tensor_in(value)
    if package:
        convert = {"torch": _from_torch, "tensorflow": _from_tensorflow, "jax": _from_jax}[package]
        return convert(value)
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="))
        scalar = isinstance(value, np.generic)
        return _Value(array.dtype.name, array, lambda new: new[()] if scalar else new)
    raise TypeError(
        "allreduce takes a dense tensor of PyTorch or TensorFlow, an array of NumPy or JAX, or a "
        f"number, got {value!r} of type {type(value).__name__}; hvkit.allgather takes any object"
    )


def _from_torch(value: Any) -> _Value:
    import torch

    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or dtype not in _SENT_AS:
        _require_defined(dtype, "sum")
        raise TypeError(f"allreduce takes dense tensors, got layout {value.layout}")
    # A copy: an array with the memory of the tensor would keep that from being resized.
    here = value.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
    array = (here.float() if dtype == "bfloat16" else here).numpy()
    return _Value(
        dtype, array, lambda new: torch.from_numpy(new).to(dtype=value.dtype, device=value.device)
    )


def _from_tensorflow(value: Any) -> _Value:
    import tensorflow as tf

    if not hasattr(value, "numpy"):
        raise TypeError("allreduce needs the values of a tensor, got one of another graph")
    dtype = value.dtype.name
    _require_defined(dtype, "max" if dtype == "bool" else "sum")
    array = (tf.cast(value, tf.float32) if dtype == "bfloat16" else value).numpy()

    def restore(new: NDArray[Any]) -> Any:
        with tf.device(value.device):
            return tf.cast(tf.constant(new), value.dtype)

    return _Value(dtype, array, restore)


def _from_jax(value: Any) -> _Value:
    import jax

    if not value.is_fully_addressable and not value.is_fully_replicated:
        raise TypeError(
            f"allreduce takes an array of one rank, but this one of shape {value.shape} belongs to "
            "all ranks: reduce it with jax.numpy"
        )
    _require_defined(value.dtype.name, "max" if value.dtype.name == "bool" else "sum")
    array = np.asarray(value)
    array = array.astype(np.float32) if value.dtype.name == "bfloat16" else array
    return _Value(value.dtype.name, array, lambda new: jax.numpy.asarray(new).astype(value.dtype))
