"""The user's own samplers and batch samplers keep their order on any number of ranks."""

import random

import numpy as np
import pytest
import torch
from loaders import Backwards, Batches, Counting, epoch, loader
from shards import (
    check_exact,
    check_training,
    every_length,
    every_size,
    flat,
    numbers,
    parts,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hvkit import RanksDisagreeError


class ByPython(Backwards):
    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


class ByNumpy(Backwards):
    def __iter__(self):
        return iter(np.random.permutation(self.length).tolist())


@every_size
@every_length
def test_a_sampler_of_the_users_keeps_its_order(length, size):
    make = loader(length, sampler=Backwards(length))
    check_training(epoch(parts(make, size)), list(range(length))[::-1], 4)
    check_exact(epoch(parts(make, size, exact=True)), list(range(length))[::-1])


RANDOM_SAMPLERS = {
    "python": lambda: ByPython(50),
    "numpy": lambda: ByNumpy(50),
    "subset": lambda: SubsetRandomSampler(range(50)),
    "generator": lambda: SubsetRandomSampler(range(50), torch.Generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * 50, 50),
    "replacement": lambda: RandomSampler(range(50), replacement=True),
    "num_samples": lambda: RandomSampler(range(50), num_samples=31),
}


@pytest.mark.parametrize("kind", RANDOM_SAMPLERS)
def test_a_random_sampler_gives_every_rank_the_same_order_and_every_epoch_another(kind):
    def make():
        # Ranks have drawn different numbers before.
        for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
            draw()
        return DataLoader(Counting(50), batch_size=4, sampler=RANDOM_SAMPLERS[kind]())

    (one,) = parts(make, 1)
    ranks = parts(make, 3)
    orders = [flat(numbers(one)) for _ in range(2)]
    assert orders[0] != orders[1]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for order in orders:
        check_training(epoch(ranks), order, 4)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    check_exact(epoch(parts(make, 1, exact=True)), flat(epoch(parts(make, 1, exact=True))[0]))


class WithEpoch(Backwards):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch])


def test_set_epoch_is_called_for_the_user():
    (one,) = parts(lambda: DataLoader(Counting(9), sampler=WithEpoch(1)), 1)
    assert [numbers(one), numbers(one)] == [[[0]], [[1]]]


@every_size
@every_length
def test_a_batch_sampler_of_the_users_keeps_its_batches(length, size):
    sizes = [4] * (length // 4) + [length % 4] * (length % 4 > 0)

    def make():
        return DataLoader(Counting(length), batch_sampler=Batches(sizes))

    ranks = parts(make, size)
    seen = epoch(ranks)
    check_training(seen, list(range(length)), 4)
    assert [len(rank) for rank in ranks] == [len(batches) for batches in seen]
    whole = {tuple(range(start, start + 4)) for start in range(0, length - 4 * size, 4)}
    assert whole <= {tuple(batch) for batches in seen for batch in batches}
    exact = parts(make, size, exact=True)
    seen = epoch(exact)
    check_exact(seen, list(range(length)))
    assert [len(rank) for rank in exact] == [len(batches) for batches in seen]


@every_size
def test_batches_of_different_sizes_are_divided_evenly(size):
    def make():
        return DataLoader(Counting(30), batch_sampler=Batches([1, 5, 9, 2, 8, 5]))

    for step in zip(*epoch(parts(make, size)), strict=True):
        assert len({len(batch) for batch in step}) == 1
    assert set(flat(flat(epoch(parts(make, size))))) == set(range(30))
    check_exact(epoch(parts(make, size, exact=True)), list(range(30)))


def test_pytorchs_own_batch_sampler_is_like_a_batch_size():
    def make(drop_last):
        batches = BatchSampler(SequentialSampler(range(23)), 4, drop_last)
        return DataLoader(Counting(23), batch_sampler=batches)

    check_training(epoch(parts(lambda: make(False), 2)), list(range(23)), 4)
    check_training(epoch(parts(lambda: make(True), 2)), list(range(23)), 4, drop_last=True)


@every_size
def test_a_loader_without_batches_returns_single_samples(size):
    ranks = parts(lambda: DataLoader(Counting(7), batch_size=None), size)
    seen = [[[sample] for sample in rank] for rank in ranks]
    check_training(seen, list(range(7)), 1)


class Whole(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, indices):
        assert isinstance(indices, list)
        return indices


@every_size
def test_a_sampler_that_passes_whole_batches_to_the_dataset(size):
    def make():
        batches = BatchSampler(SequentialSampler(range(23)), 4, False)
        return DataLoader(Whole(), batch_size=None, sampler=batches)

    check_training(epoch(parts(make, size)), list(range(23)), 4)


def test_an_epoch_too_long_for_memory_is_refused_at_once():
    endless = RandomSampler(range(50), replacement=True, num_samples=10**10)
    with pytest.raises(ValueError, match=r"has 10000000000 samples.*smaller num_samples"):
        parts(lambda: DataLoader(Counting(50), 4, sampler=endless), 2)


def test_a_sampler_that_differs_between_ranks_is_an_error(monkeypatch):
    def gather(call, obj):
        """Another rank has equal facts, except for the order."""
        if isinstance(obj, list):
            return [obj, [*obj[:-1], "other"]]
        return [obj, b"other" if isinstance(obj, bytes) else obj]

    _, part = parts(loader(10, sampler=Backwards(10)), 2)
    monkeypatch.setattr("hvkit.communication.collectives.gather", gather)
    with pytest.raises(RanksDisagreeError, match=r"Backwards in epoch 0.*fixed seed"):
        iter(part)
