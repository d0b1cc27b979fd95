"""hvkit's own messages: what they hold arrives as it was, and reading them runs no code."""

import contextlib
import pickle
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.communication import encoding
from hvkit.communication.encoding import decode, encode, sendable
from hvkit.errors import RanksDisagreeError


@sendable
class Point(NamedTuple):
    x: int
    names: list[str]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=12,
)  # fmt: skip


def arrived(value):
    return decode(encode(value))


@settings(max_examples=50)
@given(PLAIN)
def test_plain_values_arrive_with_their_types(value):
    found = arrived(value)
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.zeros((0, 3), np.int8),
        np.array(7),
        np.array(["a", "bcd"]),
        np.array([True, False]),
        np.arange(3).astype(ml_dtypes.bfloat16),
    ],
    ids=lambda array: f"{array.dtype}",
)
def test_arrays_arrive_and_can_be_written_to(array):
    found = arrived({"of": [array]})["of"][0]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array)
    found[...] = found


@pytest.mark.parametrize("value", [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("a")])
def test_numbers_of_numpy_keep_their_type(value):
    assert type(arrived(value)) is type(value)
    assert arrived(value) == value


def test_tensors_arrive_whatever_their_types_shapes_and_strides():
    one, many = torch.arange(4.0), torch.arange(6.0).reshape(2, 3)
    strided = one[::4], one[1].expand(1), one[:1].expand(3), many.t(), (1j * many).conj()
    kinds = torch.bfloat16, torch.complex64, torch.bool, torch.int64
    made = [torch.ones(shape, dtype=kind) for kind in kinds for shape in ((), (0, 2), (2, 3))]
    for tensor in (*strided, *made):
        found = arrived(tensor)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_records_paths_and_errors_arrive():
    point = Point(3, ["a"])
    assert arrived(point) == point
    assert type(arrived((point, Path("a/b")))[0]) is Point
    error = arrived(RanksDisagreeError("rank 1 differs"))
    assert type(error) is RanksDisagreeError
    assert str(error) == "rank 1 differs"
    missing = arrived(FileNotFoundError(2, "No such file", "a.txt"))
    assert type(missing) is FileNotFoundError
    assert missing.filename == "a.txt"


def test_large_arrays_and_tensors_travel_in_pieces(monkeypatch):
    monkeypatch.setattr(encoding, "_PIECE", 100)
    array, tensor = np.arange(100.0).reshape(4, 25), torch.arange(300).reshape(3, 100)
    found = arrived({"state": {"a": array, "b": [tensor]}})["state"]
    assert np.array_equal(found["a"], array)
    assert torch.equal(found["b"][0], tensor)
    assert array.tobytes() not in encode(array)


@pytest.mark.parametrize("value", [object(), np.array([object()]), lambda: 0, Ellipsis])
def test_other_objects_are_refused(value):
    with pytest.raises(TypeError, match="message"):
        encode({"a": value})


class Evil:
    def __reduce__(self):
        return pytest.fail, ("code ran",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        b"",
        b"\xc1",
        encode([1, 2])[:-1],
        encode([1, 2]) + b"\0",
        msgpack.packb(msgpack.ExtType(99, b"")),
        msgpack.packb(msgpack.ExtType(8, encode(["SystemExit", ["a"]]))),
        msgpack.packb(msgpack.ExtType(10, encode(["Popen", ["true"]]))),
        msgpack.packb(msgpack.ExtType(3, encode(["O", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(3, encode(["<f8", [1 << 40], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(11, encode(["load", [1], b"1"]))),
        msgpack.packb(msgpack.ExtType(11, encode(["nosuch", [1], b"abcd"]))),
        msgpack.packb(msgpack.ExtType(11, encode(["float32", [3], b"abcd"]))),
        encode({"array of hvkit": ["<f8", [1], 5]}),
    ],
)
def test_bytes_that_are_no_message_are_an_error_and_run_nothing(data):
    with pytest.raises(ValueError, match="no message of hvkit"):
        decode(data)


@given(st.binary(max_size=200))
def test_any_other_bytes_are_an_error_or_a_value(data):
    with contextlib.suppress(ValueError):
        decode(data)
