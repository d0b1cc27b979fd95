"""Every rank's part of an IterableDataset."""

import random

import pytest
from shards import (
    check_exact,
    check_rows,
    check_training,
    every_length,
    every_size,
    flat,
    numbers,
    parts,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Samples 0, 1, 2, ..., divided among workers."""

    def __init__(self, length):
        self.length, self.step, self.start = length, 1, 0

    def __iter__(self):
        return iter(range(self.start, self.length, self.step))


class Split(Stream):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers))


class Sized(Stream):
    def __len__(self):
        return self.length


class Shuffled(Stream):
    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        for number in order:
            random.random()
            yield number


def loader(dataset, **options):
    return lambda: DataLoader(dataset, batch_size=4, **options)


@every_size
@every_length
@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_those_of_one_process(length, size, drop_last):
    ranks = parts(loader(Stream(length), drop_last=drop_last), size)
    for _ in range(2):
        seen = [numbers(rank) for rank in ranks]
        check_training(seen, list(range(length)), 4, drop_last=drop_last)
    exact = parts(loader(Stream(length), drop_last=drop_last), size, exact=True)
    check_exact([numbers(rank) for rank in exact], list(range(length)))


@every_size
@every_length
def test_a_stream_without_loader(length, size):
    check_rows([list(part) for part in parts(lambda: Stream(length), size)], length)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_divide_the_stream(persistent):
    options = {"num_workers": 2, "persistent_workers": persistent}
    ranks = parts(loader(Split(41), **options), 3)
    for _ in range(2):
        seen = [numbers(rank) for rank in ranks]
        assert len({str([len(batch) for batch in batches]) for batches in seen}) == 1
        assert set(flat(flat(seen))) == set(range(41))
    exact = [numbers(rank) for rank in parts(loader(Split(41), **options), 3, exact=True)]
    assert sorted(flat(flat(exact))) == list(range(41))


def divide(worker):
    info = get_worker_info()
    info.dataset.start, info.dataset.step = info.id, info.num_workers


def test_workers_that_a_worker_init_fn_divides_the_stream_for():
    ranks = parts(loader(Stream(41), num_workers=2, worker_init_fn=divide), 2, exact=True)
    assert sorted(flat(flat(numbers(rank) for rank in ranks))) == list(range(41))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_shuffles_by_global_random_numbers_is_one_stream(workers):
    def make():
        random.random()
        return DataLoader(Shuffled(50), batch_size=4, num_workers=workers)

    (one,) = parts(make, 1)
    ranks = parts(make, 3)
    orders = [flat(numbers(one)) for _ in range(2)]
    assert orders[0] != orders[1]
    before = random.getstate()
    for order in orders:
        check_training([numbers(rank) for rank in ranks], order, 4)
    assert random.getstate() == before


def test_the_length_is_that_of_this_rank_if_the_stream_has_one():
    ranks = parts(loader(Sized(41)), 3)
    assert [len(rank) for rank in ranks] == [len(numbers(rank)) for rank in ranks]
    with pytest.raises(TypeError):
        len(parts(loader(Stream(41)), 3)[0])
