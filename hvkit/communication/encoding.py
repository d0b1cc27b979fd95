"""hvkit's own messages as bytes, in MessagePack: reading them runs no code.

They hold numbers, text, bytes, lists, tuples, sets, dicts, arrays, tensors of PyTorch, errors, and
records that are marked as ``sendable``. Only what a script itself passes to ``hvkit.allgather`` and
``hvkit.broadcast`` is pickled.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np

from hvkit import errors

C = TypeVar("C", bound=type[Any])

_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        *(TypeError, ValueError, OSError),
        *(each for each in vars(errors).values() if isinstance(each, type)),
    )
    if issubclass(each, Exception)
}
_records: dict[str, type[Any]] = {}


# Errors from reading bytes that are no message.
_NOT_READABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError),
    *(MemoryError, msgpack.UnpackException),
)
# MessagePack counts bytes in 32 bits. Larger arrays and tensors are sent in pieces of so many
# bytes, in a dict with one key.
_PIECE = 1 << 30
_ARRAY, _TENSOR = "array of hvkit", "tensor of hvkit"


def sendable(record: C) -> C:
    """Decorator: let messages hold objects of this dataclass or named tuple."""
    _records[record.__name__] = record
    return record


def encode(value: Any) -> bytes:
    encoded: bytes = msgpack.packb(value, default=_extension, strict_types=True)
    return encoded


def decode(data: Any) -> Any:
    """The value of these bytes, or ValueError; arrays are copies that can be written to."""
    try:
        return msgpack.unpackb(data, ext_hook=_value, object_hook=_joined, strict_map_key=False)
    except _NOT_READABLE as error:
        raise ValueError(f"no message of hvkit: {error}") from error


def _of_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError("a message cannot hold an array of Python objects or records")
    # The name of a type that NumPy does not know itself, such as bfloat16.
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    return [dtype, list(array.shape), np.ascontiguousarray(array).tobytes()]


def _to_array(parts: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = parts
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


def bytes_of(tensor: Any) -> Any:
    """The numbers of a PyTorch tensor as uint8, of shape (n,), on its device; may share its memory.

    PyTorch views only tensors of stride 1 as another dtype. But ``contiguous()`` keeps the stride
    of a tensor with one number, such as the 0 of an expanded one.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(sys.modules["torch"].uint8)


def copied_bytes(tensor: Any) -> np.ndarray[Any, Any]:
    """A copy of a PyTorch tensor's numbers as uint8, of shape (n,), in host memory.

    PyTorch cannot resize a tensor while a NumPy array shares its memory, and forward passes resize
    some buffers.
    """
    copied: np.ndarray[Any, Any] = bytes_of(tensor).to("cpu", copy=True).numpy()
    return copied


def _of_tensor(tensor: Any) -> Any:
    data = copied_bytes(tensor).tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


def _to_tensor(parts: Any) -> Any:
    torch = sys.modules["torch"]
    name, shape, data = parts
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype of PyTorch")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def _of_error(error: Exception) -> Any:
    if isinstance(error, OSError):
        return ["OSError", [error.errno, error.strerror or str(error), error.filename]]
    return [type(error).__name__, [str(error)]]


def _of_record(record: Any) -> Any:
    values = record
    if not isinstance(record, tuple):
        values = [getattr(record, each.name) for each in dataclasses.fields(record)]
    return [type(record).__name__, list(values)]


def _is_tensor(value: Any) -> bool:
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


# The types of values, in the order in which they are tried: whether a value has this type, how it
# is sent, and how it is read. The index of a type is its number in messages.
_TYPES: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda value: type(value) is tuple, list, tuple),
    (lambda value: type(value) is set, list, set),
    (lambda value: type(value) is frozenset, list, frozenset),
    (lambda value: isinstance(value, np.ndarray), _of_array, _to_array),
    (
        lambda value: isinstance(value, np.generic),
        lambda value: _of_array(np.asarray(value)),
        lambda parts: _to_array(parts)[()],
    ),
    (lambda value: type(value) is int, str, int),
    (lambda value: type(value) is complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    (lambda value: isinstance(value, Path), str, Path),
    (lambda value: type(value).__name__ in _ERRORS, _of_error, lambda v: _ERRORS[v[0]](*v[1])),
    (lambda value: isinstance(value, OSError), _of_error, lambda v: _ERRORS[v[0]](*v[1])),
    (
        lambda value: _records.get(type(value).__name__) is type(value),
        _of_record,
        lambda v: _records[v[0]](*v[1]),
    ),
    (_is_tensor, _of_tensor, _to_tensor),
    (lambda value: isinstance(value, memoryview | bytearray), bytes, bytes),
    (lambda value: isinstance(value, dict), lambda v: [*v.items()], dict),
)


def _extension(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.nbytes > _PIECE:
        return _in_pieces(_ARRAY, _of_array(value))
    if _is_tensor(value) and value.nbytes > _PIECE:
        return _in_pieces(_TENSOR, _of_tensor(value))
    for number, (has_type, sent, _) in enumerate(_TYPES):
        if has_type(value):
            return msgpack.ExtType(number, encode(sent(value)))
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"a message between ranks cannot hold a value of type {name}: {value!r}")


def _in_pieces(key: str, parts: Any) -> dict[str, Any]:
    dtype, shape, data = parts
    return {key: [dtype, shape, [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]]}


def _joined(read: dict[Any, Any]) -> Any:
    """A dict that was read; or the array or tensor whose pieces are in it."""
    for key, make in ((_ARRAY, _to_array), (_TENSOR, _to_tensor)):
        if len(read) == 1 and key in read:
            dtype, shape, pieces = read[key]
            return make([dtype, shape, b"".join(pieces)])
    return read


def _value(number: int, data: bytes) -> Any:
    return _TYPES[number][2](decode(data))
