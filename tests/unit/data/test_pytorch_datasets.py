"""This rank's part of a Dataset, alone or inside a sharded loader, and of an IterableDataset."""

import pickle
import random

import numpy as np
import pytest
import torch
from loaders import Backwards, Batches, Counting, epoch, loader
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
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from hvkit.data import shard

MADE = {
    "shuffled": {"shuffle": True},
    "single, shuffled": {"batch": None, "shuffle": True},
    "drop_last": {"drop_last": True},
    "sampler": {"sampler": Backwards(23)},
    "batch sampler": {"batch_sampler": Batches([4] * 5 + [3]), "batch": 1},
    "workers": {"shuffle": True, "num_workers": 2},
}


@every_size
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_a_loader_made_of_the_dataset_and_the_samplers_reads_the_same_epochs(kind, exact, size):
    ranks, again = (parts(loader(23, **MADE[kind]), size, exact=exact, seed=3) for _ in range(2))
    others = [
        DataLoader(rank.dataset, batch_sampler=rank.batch_sampler)
        if rank.batch_sampler is not None
        else DataLoader(rank.dataset, batch_size=None, sampler=rank.sampler)
        for rank in again
    ]
    assert [len(other) for other in others] == [len(rank) for rank in ranks]
    for _ in range(3):
        read = [[np.asarray(batch).tolist() for batch in each] for each in others]
        assert read == [[np.asarray(batch).tolist() for batch in rank] for rank in ranks]


def test_a_loader_made_of_it_starts_at_the_position_and_moves_it_at_the_end_of_an_epoch():
    (one,) = parts(loader(20, shuffle=True), 1)
    (whole,) = parts(loader(20, shuffle=True), 1)
    other = DataLoader(one.dataset, batch_sampler=one.batch_sampler)
    one.load_state_dict({"epoch": 0, "samples": 8})
    (first,) = epoch([whole])
    batches = iter(other)
    assert next(batches).tolist() == first[2]
    assert one.state_dict() == {"epoch": 0, "samples": 8}
    assert epoch([batches]) == [first[3:]]
    assert one.state_dict() == {"epoch": 1, "samples": 0}
    assert epoch([other]) == epoch([whole])
    for _ in other:
        break
    one.end_epoch()
    assert one.state_dict() == {"epoch": 3, "samples": 0}


def test_two_simultaneous_iterations_read_an_epoch_each():
    (one,) = parts(loader(20, shuffle=True), 1)
    (whole,) = parts(loader(20, shuffle=True), 1)
    pairs = list(zip(one, one, strict=True))
    assert epoch(zip(*pairs, strict=True)) == epoch([whole, whole])


@every_size
@every_length
@pytest.mark.parametrize("exact", [False, True])
def test_it_equals_the_part_of_the_dataset_alone(length, size, exact):
    ranks = parts(loader(length, shuffle=length > 0), size, exact=exact)
    mine = [[rank.dataset[i] for i in range(len(rank.dataset))] for rank in ranks]
    # Division of a sum by its length is the mean over this rank's samples of an epoch.
    assert list(map(len, mine)) == [sum(map(len, rank)) for rank in ranks]
    assert mine == [list(part) for part in parts(lambda: Counting(length), size, exact=exact)]
    if exact:
        check_exact([[part] if part else [] for part in mine], list(range(length)))
    else:
        check_rows(mine, length)


def test_on_one_rank_it_is_the_dataset_itself():
    whole = DataLoader(Counting(9))
    (one,) = parts(lambda: whole, 1)
    assert one.dataset is whole.dataset
    assert all(type(index) is int for index in one.sampler)


def test_another_loader_or_split_of_it_reads_this_ranks_samples_only():
    first, second = parts(loader(20, shuffle=True), 2)
    assert sorted(flat(epoch([DataLoader(second.dataset, shuffle=True)])[0])) == list(
        range(1, 20, 2)
    )
    halves = random_split(first.dataset, [5, 5])
    assert sorted(flat(list(half) for half in halves)) == list(range(0, 20, 2))
    assert list(Subset(second.dataset, np.array([0, 9]))) == [1, 19]
    assert second.dataset[-1] == 19
    assert isinstance(second.dataset, Subset)
    assert list(second.dataset.indices) == list(range(1, 20, 2))


class Labelled(Counting):
    classes = ("a", "b")
    transform = None

    def __getitem__(self, index):
        return self.transform(index) if self.transform else index


def test_its_attributes_are_those_of_the_dataset():
    whole = Labelled(10)
    _, part = parts(lambda: DataLoader(whole, batch_size=2), 2)
    assert part.dataset.classes == ("a", "b")
    part.dataset.transform = str
    assert whole.transform is str
    assert next(iter(part)) == ["1", "3"]
    with pytest.raises(AttributeError, match="'Labelled' object has no attribute 'none'"):
        part.dataset.none  # noqa: B018


class Keys(Counting):
    """A sampler of pairs of an index and an image size, or of tensors."""

    def __iter__(self):
        return iter([(index, index // 4) for index in range(10)])


class TensorKeys(Counting):
    def __iter__(self):
        return iter(torch.arange(10))


class OfPairs(Counting):
    def __getitem__(self, pair):
        index, size = pair
        return 100 * size + index


class OfTensors(Counting):
    def __getitem__(self, index):
        return index.item()


class SeveralAtOnce(Counting):
    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        return [10 * index for index in indices]


@pytest.mark.parametrize(
    ("dataset", "sampler", "order"),
    [
        (OfPairs, Keys(10), [100 * (index // 4) + index for index in range(10)]),
        (OfTensors, TensorKeys(10), list(range(10))),
        (SeveralAtOnce, None, [10 * index for index in range(10)]),
    ],
)
def test_the_dataset_gets_the_samplers_keys_unchanged(dataset, sampler, order):
    ranks = parts(lambda: DataLoader(dataset(10), batch_size=2, sampler=sampler), 2)
    check_training(epoch(ranks), order, 2)


def test_it_pickles():
    _, part = parts(lambda: DataLoader(TensorDataset(torch.arange(9)), batch_size=2), 2)
    again = pickle.loads(pickle.dumps(part.dataset))
    assert list(again) == list(part.dataset)
    keys = list(part.sampler)
    assert again.__getitems__(keys) == [(number,) for number in map(int, keys)]


def test_a_dataset_that_has_grown_has_longer_parts():
    whole = Counting(4)
    _, part = parts(lambda: DataLoader(whole), 2)
    assert list(part.dataset) == [1, 3]
    whole.length = 8
    assert list(part.dataset) == [1, 3, 5, 7]


@pytest.mark.parametrize(
    "again",
    [DataLoader, lambda part: DataLoader(Subset(part, [0, 1])), lambda part: part],
    ids=["loader", "subset", "alone"],
)
def test_a_part_is_not_divided_again(again):
    part, _ = parts(loader(20), 2)
    with pytest.raises(ValueError, match=r"one rank's part.*not both"):
        shard(again(part.dataset))


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


def stream_loader(dataset, **options):
    return lambda: DataLoader(dataset, batch_size=4, **options)


@every_size
@every_length
@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_those_of_one_process(length, size, drop_last):
    ranks = parts(stream_loader(Stream(length), drop_last=drop_last), size)
    for _ in range(2):
        seen = [numbers(rank) for rank in ranks]
        check_training(seen, list(range(length)), 4, drop_last=drop_last)
    check_rows([list(part) for part in parts(lambda: Stream(length), size)], length)
    exact = parts(stream_loader(Stream(length), drop_last=drop_last), size, exact=True)
    check_exact([numbers(rank) for rank in exact], list(range(length)))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_divide_the_stream(persistent):
    options = {"num_workers": 2, "persistent_workers": persistent}
    ranks = parts(stream_loader(Split(41), **options), 3)
    for _ in range(2):
        seen = [numbers(rank) for rank in ranks]
        assert len({str([len(batch) for batch in batches]) for batches in seen}) == 1
        assert set(flat(flat(seen))) == set(range(41))
    exact = [numbers(rank) for rank in parts(stream_loader(Split(41), **options), 3, exact=True)]
    assert sorted(flat(flat(exact))) == list(range(41))


def divide(worker):
    info = get_worker_info()
    info.dataset.start, info.dataset.step = info.id, info.num_workers


def test_workers_that_a_worker_init_fn_divides_the_stream_for():
    ranks = parts(stream_loader(Stream(41), num_workers=2, worker_init_fn=divide), 2, exact=True)
    assert sorted(flat(flat(numbers(rank) for rank in ranks))) == list(range(41))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_shuffles_by_global_random_numbers_is_the_same_on_every_rank(workers):
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
    ranks = parts(stream_loader(Sized(41)), 3)
    assert [len(rank) for rank in ranks] == [len(numbers(rank)) for rank in ranks]
    with pytest.raises(TypeError):
        len(parts(stream_loader(Stream(41)), 3)[0])
