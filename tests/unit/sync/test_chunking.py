from itertools import chain

import pytest

from hvkit.sync.chunking import chunks

MIB = 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [[], [5], [MIB] * 9, [40 * MIB, 1, 40 * MIB], [100 * MIB] * 3, list(range(1, 50000, 7))],
)
def test_every_gradient_is_in_one_chunk_and_in_order(sizes):
    runs = chunks(sizes)
    assert list(chain(*runs)) == list(range(len(sizes)))
    assert all(runs)


def test_small_models_go_out_at_once():
    assert len(chunks([1000] * 50)) == 1


def test_models_of_some_megabytes_go_out_in_at_most_four_chunks():
    assert 3 <= len(chunks([100_000] * 100)) <= 5


def test_a_gpu_sends_small_models_at_once():
    assert len(chunks([100_000] * 50, on_gpu=True)) == 1
    assert len(chunks([MIB] * 100, on_gpu=True)) == 4


def test_no_chunk_of_a_large_model_is_longer_than_32_mib():
    sizes = [3 * MIB] * 200
    assert max(sum(sizes[i] for i in run) for run in chunks(sizes)) <= 32 * MIB
