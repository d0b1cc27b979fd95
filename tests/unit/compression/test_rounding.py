"""Compression by rounding, on both frameworks' tensors, with ranks that take turns."""

import numpy as np
import pytest
from libraries import Ranks

import hvkit
from hvkit.compression import BY_NAME, BFloat16, Float16, Int8, for_rows


def reduced(compression, vectors, library):
    ranks = Ranks(compression, [(len(vectors[0]),)], len(vectors), library)
    return ranks.mean(vectors), ranks.handed_over


def by_rank_0(name):
    return hvkit.Centralized().gradient_compression(BY_NAME[name])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [1, 255, 256, 1000])
@pytest.mark.parametrize(
    ("compression", "error"),
    [
        *((Float16(), 2**-10), (BFloat16(), 2**-7), (Int8(), 2 / 127)),
        *((by_rank_0("none"), 1e-7), (by_rank_0("bf16"), 2**-8), (by_rank_0("int8"), 1 / 127)),
    ],
)
def test_all_ranks_get_the_mean_up_to_two_roundings(compression, error, length, ranks, library):
    vectors = np.random.default_rng(0).normal(size=(ranks, length)).astype(np.float32)
    found, _ = reduced(compression, vectors, library)
    assert all(np.array_equal(each, found[0]) for each in found)
    assert found[0].shape == (length,)
    assert np.abs(found[0] - vectors.mean(0)).max() <= error * np.abs(vectors).max()


@pytest.mark.parametrize(("compression", "share"), [(Float16(), 1 / 2), (Int8(), 1 / 3.8)])
def test_bytes(compression, share, library):
    vectors = np.ones((4, 4096), np.float32)
    _, (to_the_mean, means) = reduced(compression, vectors, library)
    # An all-to-all sends 3/4 of its rows, an allgather 3 times, a ring allreduce 6/4.
    sent = to_the_mean * 3 / 4 + means * 3
    assert sent <= share * 4 * 4096 * 6 / 4


def test_eight_bits_hold_multiples_of_the_scale_exactly(library):
    whole = np.random.default_rng(0).integers(-126, 127, size=512).astype(np.float32)
    whole[[0, 256]] = 127, -127
    for scale in (1.0, 0.5, 2.0**-100, 2.0**100):
        vector = library.tensor(whole * np.float32(scale))
        rows = Int8().encode(vector, library.ops)
        assert tuple(rows.shape) == (2, 260)
        found = np.asarray(Int8().decode(rows, library.ops))
        assert np.array_equal(found, whole * np.float32(scale))


def test_eight_bits_err_by_half_a_scale_at_most(library):
    values = np.random.default_rng(0).normal(size=(50, 256)).astype(np.float32)
    values *= 10.0 ** np.arange(-20, 30)[:, None]
    encoded = Int8().encode(library.tensor(values.reshape(-1)), library.ops)
    found = np.asarray(Int8().decode(encoded, library.ops)).reshape(values.shape)
    scale = np.abs(values).max(1, keepdims=True) / 127
    assert (np.abs(found - values) <= scale * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("compression", [Float16(), BFloat16(), Int8()])
def test_an_overflow_on_one_rank_is_one_on_all(compression, bad, library):
    vectors = np.ones((2, 600), np.float32)
    vectors[1, 300] = bad
    found, _ = reduced(compression, vectors, library)
    for each in found:
        assert not np.isfinite(each[300])
        assert np.isfinite(each[:256]).all()
        assert np.isfinite(each[512:]).all()


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_zeros_stay_zero_and_tiny_values_are_no_overflow(value, library):
    found, _ = reduced(Int8(), np.full((2, 700), value, np.float32), library)
    assert np.isfinite(found[0]).all()
    assert value or not found[0].any()


def test_names_and_the_rows_of_sparse_gradients():
    assert set(BY_NAME) == {"none", "fp16", "bf16", "int8"}
    assert for_rows(BFloat16()) == BFloat16()
    assert for_rows(Int8()) is None
    assert for_rows(None) is None
