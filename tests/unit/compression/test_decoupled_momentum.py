"""Decoupled momentum, on both frameworks' tensors, with ranks that take turns."""

import math

import numpy as np
import pytest
from libraries import Ranks

import hvkit

SHAPES = [(6, 10), (7,), (3, 2, 3, 3), (128, 64), (), (13, 11), (67, 5)]
LENGTHS = [math.prod(shape) for shape in SHAPES]
ALL = {"top_k": 16, "chunk": 4}


def gradients(ranks=3, seed=0):
    return np.random.default_rng(seed).normal(size=(ranks, sum(LENGTHS))).astype(np.float32)


def ranks_with(library, count=3, **options):
    return Ranks(hvkit.DeMo(**options), SHAPES, count, library)


def reference(gradient, momenta, top_k, chunk, decay, sign):
    """The mean that ranks agree on for one matrix, and their new momenta, by SciPy."""
    fft = pytest.importorskip("scipy.fft")
    rows, columns = gradient.shape[1:]
    mean, kept = np.zeros((rows, columns)), []
    for g, m in zip(gradient, momenta, strict=True):
        new = decay * m + g
        sent = np.zeros_like(new)
        for i in range(0, rows, chunk):
            for j in range(0, columns, chunk):
                block = fft.dctn(new[i : i + chunk, j : j + chunk], norm="ortho")
                bound = np.sort(np.abs(block), axis=None)[-top_k]
                block[np.abs(block) < bound] = 0
                sent[i : i + chunk, j : j + chunk] = fft.idctn(block, norm="ortho")
        mean += sent / len(gradient)
        kept.append(new - sent)
    return (np.sign(mean) if sign else mean), np.array(kept)


def test_with_everything_kept_it_is_the_mean(library):
    ranks = ranks_with(library, decay=0.0, sign=False, **ALL)
    for seed in range(3):
        mine = gradients(seed=seed)
        for mean in ranks.mean(mine):
            assert np.abs(mean - mine.mean(0)).max() < 1e-5
    assert np.abs(ranks.state("momentum")).max() < 1e-5


@pytest.mark.parametrize("sign", [False, True])
def test_it_is_the_transform_of_the_paper(sign, library):
    options = {"top_k": 3, "chunk": 4, "decay": 0.9, "sign": sign}
    ranks = Ranks(hvkit.DeMo(**options), [(8, 12)], 2, library)
    momenta = np.zeros((2, 8, 12))
    for seed in range(3):
        mine = np.random.default_rng(seed).normal(size=(2, 96)).astype(np.float32)
        expected, momenta = reference(mine.reshape(2, 8, 12), momenta, **options)
        found = ranks.mean(mine)
        certain = np.abs(expected).reshape(-1) > 1e-6
        assert np.allclose(found[0][certain], expected.reshape(-1)[certain], atol=1e-5)
        assert np.allclose(ranks.state("momentum"), momenta.reshape(2, -1), atol=1e-5)
        assert np.array_equal(found[0], found[1])


def test_unsent_coefficients_stay_in_the_momentum(library):
    ranks = ranks_with(library, top_k=1, chunk=8, decay=1.0, sign=False)
    sent = np.zeros(sum(LENGTHS))
    added = np.zeros((3, sum(LENGTHS)))
    for seed in range(5):
        added += (mine := gradients(seed=seed))
        sent += ranks.mean(mine)[0]
    assert np.abs(ranks.state("momentum")).max() > 0.1
    assert np.allclose(sent + ranks.state("momentum").mean(0), added.mean(0), atol=1e-4)


def test_a_nan_makes_its_chunk_nan_instead_of_zero(library):
    ranks = Ranks(hvkit.DeMo(top_k=2, chunk=4), [(8, 4)], 2, library)
    mine = np.ones((2, 8, 4), np.float32)
    mine[1, 0, 0] = np.nan
    for found in ranks.mean(mine.reshape(2, -1)):
        assert np.isnan(found[:16]).all()
        assert np.isfinite(found[16:]).all()


def test_it_sends_six_bytes_a_coefficient(library):
    ranks = Ranks(hvkit.DeMo(), [(640, 640)], 2, library)
    ranks.mean(np.ones((2, 640 * 640), np.float32))
    assert ranks.handed_over == [100 * 16 * 6]


@pytest.mark.parametrize("shape", [(131, 131), (67, 1009), (1009,), (3, 1)])
def test_sides_without_divisors_cost_little_more(shape, library):
    ranks = Ranks(hvkit.DeMo(), [shape], 2, library)
    ranks.mean(np.ones((2, math.prod(shape)), np.float32))
    (sent,) = ranks.handed_over
    assert sent <= 1.3 * math.prod(shape) * 16 * 6 / 64**2 + 6 * 16


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 17, "chunk": 4}, ValueError, "top_k must be at most chunk"),
        ({"chunk": 129}, ValueError, "chunk must be at most 128, got 129"),
        ({"decay": 1.1}, ValueError, "decay must be .* got 1.1"),
        ({"sign": 1}, TypeError, "sign must be True or False, got 1"),
    ],
)
def test_it_checks_itself(options, error, text):
    with pytest.raises(error, match=text):
        hvkit.DeMo(**options)
