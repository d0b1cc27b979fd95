from itertools import chain

import pytest

from hvkit.communication.exchanges import chunks

MIB = 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [[], [5], [MIB] * 9, [40 * MIB, 1, 40 * MIB], [100 * MIB] * 3, list(range(1, 50000, 7))],
)
def test_every_gradient_is_in_one_chunk_and_in_order(sizes):
    runs = chunks(sizes)
    assert list(chain(*runs)) == list(range(len(sizes)))
    assert all(runs)


@pytest.mark.parametrize(
    ("sizes", "on_gpu", "number"),
    [
        ([1000] * 50, False, 1),
        ([100_000] * 100, False, 4),
        ([100_000] * 50, True, 1),
        ([MIB] * 100, True, 4),
    ],
)
def test_small_models_go_out_in_few_chunks_and_on_a_gpu_in_fewer(sizes, on_gpu, number):
    assert len(chunks(sizes, on_gpu=on_gpu)) == number


def test_no_chunk_of_a_large_model_is_longer_than_32_mib():
    sizes = [3 * MIB] * 200
    assert max(sum(sizes[i] for i in run) for run in chunks(sizes)) <= 32 * MIB
