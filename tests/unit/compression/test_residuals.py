"""Compressions that keep what they have not sent, on both frameworks' tensors."""

import numpy as np
import pytest
from libraries import Ranks

import hvkit

SHAPES = [(20, 30), (7,), (4, 5, 3, 3), ()]
SIZES = [600, 7, 180, 1]


def gradients(ranks, seed=0):
    return np.random.default_rng(seed).normal(size=(ranks, sum(SIZES))).astype(np.float32)


@pytest.mark.parametrize("ranks", [2, 3])
def test_top_k_of_everything_is_the_mean(ranks, library):
    everyone = Ranks(hvkit.TopK(1), SHAPES, ranks, library)
    vectors = gradients(ranks)
    found = everyone.mean(vectors)
    assert all(np.array_equal(each, found[0]) for each in found)
    assert np.allclose(found[0], vectors.mean(0), atol=1e-6)
    assert not everyone.state("residual").any()


@pytest.mark.parametrize(
    "compression", [hvkit.TopK(0.01), hvkit.TopK(0.3), hvkit.PowerSGD(1), hvkit.PowerSGD(3)]
)
def test_means_and_residuals_add_up_to_the_gradients(compression, library):
    everyone = Ranks(compression, SHAPES, 3, library)
    sent, given = 0, 0
    for step in range(5):
        vectors = gradients(3, step)
        given = given + vectors.mean(0)
        found = everyone.mean(vectors)
        assert all(np.array_equal(each, found[0]) for each in found)
        sent = sent + found[0]
    left = np.zeros(sum(SIZES))
    residual = everyone.state("residual").mean(0)
    if isinstance(compression, hvkit.TopK):
        left = residual
    else:  # small tensors travel whole
        left[:600], left[607:787] = residual[:600], residual[600:]
    assert np.allclose(sent + left, given, atol=1e-4)


def test_top_k_sends_the_largest_values(library):
    everyone = Ranks(hvkit.TopK(0.25), [(8,)], 2, library)
    found = everyone.mean([[1, -9, 2, 8, 0, 0, 0, 0], [1, 0, 0, 0, 7, -6, 0, 0]])[0]
    assert found.tolist() == [0, -4.5, 0, 4, 3.5, -3, 0, 0]
    assert everyone.state("residual").tolist() == [[1, 0, 2, 0, 0, 0, 0, 0], [1] + [0] * 7]
    assert everyone.handed_over == [2 * 8]


def test_a_value_that_waits_is_sent_in_the_end(library):
    everyone = Ranks(hvkit.TopK(0.25), [(4,)], 2, library)
    found = [everyone.mean([[3, 2, 0, 0]] * 2)[0].tolist() for _ in range(3)]
    assert found == [[3, 0, 0, 0], [0, 4, 0, 0], [6, 0, 0, 0]]


def test_with_as_many_columns_as_the_gradients_have_rank_it_is_the_mean(library):
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=(3, 40, 2)) @ rng.normal(size=(3, 2, 60))
    vectors = matrices.reshape(3, -1).astype(np.float32)
    everyone = Ranks(hvkit.PowerSGD(6), [(40, 60)], 3, library)
    assert np.abs(everyone.mean(vectors)[0] - vectors.mean(0)).max() < 1e-5
    assert np.abs(everyone.state("residual")).max() < 1e-5
    fewer = Ranks(hvkit.PowerSGD(5), [(40, 60)], 3, library)
    assert np.abs(fewer.mean(vectors)[0] - vectors.mean(0)).max() > 1e-2


def test_a_nan_is_among_the_largest_values(library):
    everyone = Ranks(hvkit.TopK(0.25), [(4,)], 2, library)
    found = everyone.mean([[1, 2, np.nan, 3], [1, 2, 0, 3]])[0]
    assert np.isnan(found[2])
    assert not np.isnan(everyone.state("residual")).any()


def test_power_sgd_trains_a_layer_whose_first_gradient_was_zero(library):
    everyone = Ranks(hvkit.PowerSGD(2), [(40, 30)], 2, library)
    assert not everyone.mean(np.zeros((2, 1200), np.float32))[0].any()
    # The first rows, towards which a basis made from zeros points, have no gradient.
    later = np.zeros((2, 40, 30), np.float32)
    later[:, 10:] = np.outer(np.arange(1, 31), np.ones(30))
    found = everyone.mean(later.reshape(2, -1))[0]
    assert np.allclose(found, later[0].reshape(-1), atol=1e-3)


def test_power_sgd_sends_thin_matrices_and_small_tensors_whole(library):
    everyone = Ranks(hvkit.PowerSGD(2), SHAPES, 2, library)
    everyone.mean(gradients(2))
    # 20x30 and 4x45 are thin; 7 values and one travel as they are.
    assert everyone.handed_over == [4 * (2 * 20 + 2 * 4 + 8), 4 * (2 * 30 + 2 * 45)]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: hvkit.TopK(0), ValueError, "ratio must be above 0 and at most 1, got 0"),
        (lambda: hvkit.TopK(1.5), ValueError, "got 1.5"),
        (lambda: hvkit.TopK("1%"), TypeError, "ratio must be a number, got '1%' of type str"),
        (lambda: hvkit.PowerSGD(0), ValueError, "rank must be at least 1, got 0"),
        (lambda: hvkit.PowerSGD(2.5), TypeError, "rank must be an int, got 2.5"),
    ],
)
def test_compressions_check_themselves(make, error, text):
    with pytest.raises(error, match=text):
        make()
