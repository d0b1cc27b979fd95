"""One array or number of each rank, reduced to one for all."""

import math
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from cases import pairwise
from ranks import error_of, same_on_all_ranks
from torch_nets import raised_everywhere

import hvkit
from hvkit import runtime

REDUCED = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}
SHAPES = [(), (1,), (0, 3), (2, 3, 4)]
MAKERS = {
    "torch": lambda array, dtype: torch.tensor(array, dtype=getattr(torch, dtype)),
    "tensorflow": lambda array, dtype: tf.cast(tf.constant(array), dtype),
    "keras": lambda array, dtype: keras.Variable(array, dtype=dtype),
    "numpy": lambda array, dtype: array.astype(dtype),
}


def everyones(shape):
    """What each rank has, known on all: small multiples of 1/4, exact in every dtype."""
    rng = np.random.default_rng(len(shape))
    return rng.integers(0, 12, (hvkit.size(), *shape)).astype(np.float64)


def values(result):
    """The elements of any result, in float64."""
    if isinstance(result, torch.Tensor):
        result = result.to(torch.float64)
    elif tf.is_tensor(result):
        result = tf.cast(result, tf.float64)
    return np.asarray(result).astype(np.float64)


FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize(
    ("library", "dtype", "op", "shape"), pairwise(list(MAKERS), FLOATS, list(REDUCED), SHAPES)
)
def test_floats_of_every_library_and_shape(library, dtype, op, shape):
    if (library, dtype) == ("numpy", "bfloat16"):
        dtype = ml_dtypes.bfloat16
    everyone = everyones(shape)
    mine = MAKERS[library](everyone[hvkit.rank()], dtype)
    kind = tf.Tensor if library in ("tensorflow", "keras") else type(mine)
    result = hvkit.allreduce(mine, op)
    assert isinstance(result, kind)
    assert result.dtype == mine.dtype
    assert tuple(result.shape) == shape
    expected = MAKERS["torch"](REDUCED[op](everyone, axis=0), "float64").numpy()
    if op == "mean":
        np.testing.assert_allclose(values(result), expected, rtol=4e-3)
    else:
        np.testing.assert_array_equal(values(result), expected)
    assert same_on_all_ranks([values(result)])


INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]


@pytest.mark.parametrize(
    ("library", "dtype", "op"),
    pairwise(["torch", "tensorflow", "numpy"], INTEGERS, ["sum", "min", "max"]),
)
def test_integers_stay_integers(library, dtype, op):
    everyone = everyones((5,))
    mine = MAKERS[library](everyone[hvkit.rank()].astype(int), dtype)
    result = hvkit.allreduce(mine, op)
    assert result.dtype == mine.dtype
    np.testing.assert_array_equal(values(result), REDUCED[op](everyone, axis=0))


def test_integers_beyond_floats_are_exact_and_overflow_as_their_own_dtype():
    large = 2**62 - 1
    assert hvkit.allreduce(torch.tensor(large), "max").item() == large
    assert hvkit.allreduce(np.int64(2**53 + 1), "min") == 2**53 + 1
    assert hvkit.allreduce(np.uint32(2**32 - 1), "min") == 2**32 - 1
    added = hvkit.allreduce(torch.tensor([100], dtype=torch.int8), "sum")
    assert added.item() == (100 * hvkit.size() + 128) % 256 - 128


def test_halves_are_rounded_once():
    # 2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16.
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        mine = torch.tensor(large if hvkit.rank() == 0 else 1.0, dtype=dtype)
        exact = torch.tensor(large + hvkit.size() - 1, dtype=torch.float64)
        assert hvkit.allreduce(mine, "sum") == exact.to(dtype)
    full = torch.full((3,), 60_000.0, dtype=torch.float16)
    assert hvkit.allreduce(full).tolist() == full.tolist()
    assert hvkit.allreduce(full, "sum").tolist() == [math.inf] * 3


@pytest.mark.parametrize("library", ["torch", "tensorflow", "numpy"])
def test_bools_are_all_or_any(library):
    flags = np.array([True, False, hvkit.rank() == 1])
    mine = MAKERS[library](flags, "bool")
    everywhere, anywhere = hvkit.allreduce(mine, "min"), hvkit.allreduce(mine, "max")
    assert everywhere.dtype == mine.dtype
    assert values(everywhere).tolist() == [1, 0, 0]
    assert values(anywhere).tolist() == [1, 0, 1]


def test_complex_numbers_are_added():
    mine = np.array([1 + 2j * hvkit.rank()], np.complex64)
    total = 1j * hvkit.size() * (hvkit.size() - 1) + hvkit.size()
    assert hvkit.allreduce(mine, "sum").tolist() == [total]
    assert hvkit.allreduce(torch.from_numpy(mine).conj(), "sum").tolist() == [total.conjugate()]


@pytest.mark.parametrize("op", ["min", "max", "mean", "sum"])
def test_a_nan_of_any_rank_is_seen_by_all(op):
    for other in range(hvkit.size()):
        mine = torch.tensor([math.nan if hvkit.rank() == other else 1.0, 2.0])
        result = hvkit.allreduce(mine, op)
        assert result.isnan().tolist() == [True, False]
        assert math.isnan(hvkit.allreduce(mine[0].item(), op))


def test_numbers_of_python_stay_such():
    n, rank = hvkit.size(), hvkit.rank()
    assert hvkit.allreduce(rank) == (n - 1) / 2
    assert hvkit.allreduce(rank + 2**70, "max") == 2**70 + n - 1
    assert type(hvkit.allreduce(rank, "sum")) is int
    assert hvkit.allreduce(0.5 if rank == 0 else 1, "sum") == n - 0.5
    assert hvkit.allreduce(rank == 1, "max") is True
    assert hvkit.allreduce(rank == 1, "min") is False


def test_the_value_itself_stays_and_the_result_is_new():
    mine = torch.full((2,), float(hvkit.rank()), requires_grad=True)
    result = hvkit.allreduce(mine, "sum")
    assert mine.tolist() == [hvkit.rank()] * 2
    assert not result.requires_grad
    view = torch.arange(6.0).reshape(2, 3).T[::2]
    assert torch.equal(hvkit.allreduce(view), view)
    swapped = np.arange(4, dtype=">f4")
    assert hvkit.allreduce(swapped).tolist() == [0, 1, 2, 3]


def test_long_arrays_go_out_in_pieces(monkeypatch):
    monkeypatch.setattr(sys.modules["hvkit.communication.allreduce"], "_PIECE", 7)
    everyone = everyones((5, 5))
    for op, reduce in REDUCED.items():
        result = hvkit.allreduce(everyone[hvkit.rank()], op)
        np.testing.assert_allclose(result, reduce(everyone, axis=0), rtol=1e-15)


LARGE = 1 << 18  # bytes


@pytest.mark.parametrize(
    ("framework", "dtype", "bytes_more"),
    pairwise(
        ["torch", "tensorflow"],
        ["int32", "int64", "float32", "float64"],
        [9 * 8 - LARGE, -8, 0, 8, 560_008],
    ),
)
def test_both_engines_reduce_alike_whatever_the_length(framework, dtype, bytes_more):
    engine = runtime.engine(framework)
    everyone = everyones(((LARGE + bytes_more) // np.dtype(dtype).itemsize,))
    for op in ("sum", "min", "max"):
        result = engine.allreduce(everyone[hvkit.rank()].astype(dtype), op)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, REDUCED[op](everyone, axis=0))


@pytest.mark.parametrize(
    ("value", "op", "kind", "message"),
    [
        ([1.0], "mean", TypeError, "got [1.0] of type list; hvkit.allgather takes any object"),
        (1.0, "avg", ValueError, "op must be one of ['mean', 'sum', 'min', 'max'], got 'avg'"),
        (torch.ones(2, dtype=torch.int32), "mean", TypeError, "int32 has no mean of its own dtype"),
        (np.array([True]), "sum", TypeError, "bool has op='min' (all) and op='max' (any)"),
        (np.array([1j]), "max", TypeError, "complex numbers have no order, got op='max'"),
        (np.array(["a"]), "max", TypeError, "complex128, got str"),
        (torch.ones(2).to_sparse(), "sum", TypeError, "dense tensors, got layout torch.sparse_coo"),
        (tf.constant("a"), "sum", TypeError, "complex128, got string"),
        (np.ma.array([1.0]), "sum", TypeError, "of type MaskedArray"),
    ],
)
def test_a_value_that_one_rank_cannot_reduce_is_an_error_on_all(value, op, kind, message):
    wrong = hvkit.rank() == 1
    error, text = error_of(lambda: hvkit.allreduce(value if wrong else 1.0, op if wrong else "sum"))
    assert error is kind
    assert message in text
    assert wrong or text.startswith("on rank 1: ")


@pytest.mark.parametrize(
    ("mine", "others", "differing"),
    [
        ((torch.ones(2), "sum"), (torch.ones(3), "sum"), "float32 of shape (3,)"),
        ((torch.ones(2), "sum"), (np.ones(2), "sum"), "float64 of shape (2,)"),
        ((1.0, "sum"), (1.0, "max"), "'max' of a number"),
        ((1.0, "sum"), (np.ones(()), "sum"), "float64 of shape ()"),
    ],
)
def test_ranks_that_disagree_get_the_same_error(mine, others, differing):
    own = mine if hvkit.rank() == 0 else others
    text = "rank 1 calls allreduce with "
    assert raised_everywhere(lambda: hvkit.allreduce(*own), text, differing)


@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_inside_a_graph_it_gives_what_it_gives_outside(op):
    values = tf.constant([1.0, np.nan, 3.0], "float16") * (1.0 + hvkit.rank())
    inside = tf.function(lambda x: hvkit.allreduce(x, op))(values)
    outside = hvkit.allreduce(values, op)
    assert inside.dtype == outside.dtype
    assert np.array_equal(inside.numpy(), outside.numpy(), equal_nan=True)
    with pytest.raises(TypeError, match="int32 has no mean of its own dtype"):
        tf.function(hvkit.allreduce)(tf.ones(2, tf.int32))
