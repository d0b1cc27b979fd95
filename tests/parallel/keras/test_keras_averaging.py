"""Keras: strategies that average gradients in every step."""

import keras
import pytest
from cases import cases
from models import LOOPS, local, mlp, regression, weights
from ranks import largest_difference, same_on_all_ranks

import hvkit


def trained(strategy, loop="function", **options):
    before = hvkit.traffic().get("gradients", (0, 0))[0]
    model, optimizer = hvkit.distribute(
        mlp(hvkit.rank()), keras.optimizers.SGD(0.05), strategy=strategy, **options
    )
    LOOPS[loop](model, optimizer, local(regression(steps=20)))
    return weights(model), hvkit.traffic()["gradients"].bytes - before


@pytest.mark.parametrize("loop", cases(LOOPS))
def test_one_rank_that_averages_for_all_gives_the_weights_of_a_ring(loop):
    ring, _ = trained(hvkit.Synchronous(), loop)
    found, sent = trained(hvkit.Centralized(), loop)
    assert largest_difference(found, ring) < 2e-6
    assert same_on_all_ranks(found)
    size = sum(w.nbytes for w in found)
    assert sent == 20 * size * (hvkit.size() - 1 if hvkit.rank() == 0 else 1)
    rounded, _ = trained(hvkit.Centralized(), loop, compression="bf16")
    assert 0 < largest_difference(rounded, found) < 0.01
