"""The user's own samplers and batch samplers keep their order on any number of ranks."""

import itertools
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
    steps,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hvkit.random_states import Generators


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
    make, order = loader(length, sampler=Backwards(length)), list(range(length))[::-1]
    check_training(epoch(parts(make, size)), order, 4)
    check_exact(epoch(parts(make, size, exact=True)), order)


RANDOM_SAMPLERS = {
    "python": lambda: ByPython(50),
    "numpy": lambda: ByNumpy(50),
    "subset": lambda: SubsetRandomSampler(range(50)),
    "generator": lambda: SubsetRandomSampler(range(50), torch.Generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * 50, 50),
    "replacement": lambda: RandomSampler(range(50), replacement=True),
    "num_samples": lambda: RandomSampler(range(50), num_samples=31),
}


def global_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


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
    before = global_states()
    for order in orders:
        check_training(epoch(ranks), order, 4)
    assert global_states() == before
    check_exact(epoch(parts(make, 1, exact=True)), flat(epoch(parts(make, 1, exact=True))[0]))


def with_a_generator(batch=4):
    return DataLoader(Counting(48), batch, shuffle=True, generator=torch.Generator())


@every_size
def test_a_loaders_generator_is_the_users(size):
    whole, ranks = with_a_generator(4 * size), parts(with_a_generator, size, seed=None)
    for number in (5, 6, 5):
        for each in (whole, *ranks):
            each.generator.manual_seed(number)
        check_training(epoch(ranks), flat(numbers(whole)), 4)


def test_ranks_whose_generators_are_equal_send_none(monkeypatch):
    monkeypatch.delattr("hvkit.data.samplers.from_rank")
    ranks = parts(with_a_generator, 2, seed=None)
    assert sorted(flat(flat(epoch(ranks)))) == list(range(48))


class FromLists(Backwards):
    """Draws an order for each 20 samples, and reads it from a list."""

    def __iter__(self):
        for _ in range(3):
            yield from np.random.permutation(20).tolist()


@pytest.mark.parametrize(("kind", "times"), [(ByNumpy, 1), (FromLists, 4)])
def test_generators_are_exchanged_only_where_a_sampler_may_draw(kind, times, monkeypatch):
    """The exchange takes longer than a step."""
    (one,) = parts(lambda: DataLoader(Counting(60), 1, sampler=kind(60)), 1)
    ranks = parts(lambda: DataLoader(Counting(60), 2, sampler=kind(60)), 2)
    order = flat(numbers(one))
    exchanges, states = [], Generators.states
    monkeypatch.setattr(Generators, "states", lambda self: exchanges.append(1) or states(self))
    seen = []
    for batch in zip(*ranks, strict=True):
        np.random.rand()  # as a training step may
        seen += sorted(flat(numbers(batch)))
    assert seen == flat(sorted(order[k : k + 4]) for k in range(0, 60, 4))
    assert len(exchanges) == len(ranks) * times * 2  # before the sampler's code runs, and after


class WithEpoch(Backwards):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch])


def test_set_epoch_is_called_for_the_user():
    (one,) = parts(lambda: DataLoader(Counting(9), sampler=WithEpoch(1)), 1)
    assert [numbers(one), numbers(one)] == [[[0]], [[1]]]


SIZES = {
    "none": [],
    "equal": [4] * 5,
    "the last is smaller": [4] * 50 + [1],
    "made on purpose": [1, 5, 9, 2, 8, 5, 3],  # of one length, or within a budget of tokens
}


@every_size
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_batch_sampler_of_the_users_keeps_its_batches(sizes, size):
    batches = [list(batch) for batch in Batches(sizes)]
    make = loader(sum(sizes), batch=1, batch_sampler=Batches(sizes))
    check_whole_batches(make, size, batches)


def check_whole_batches(make, size, batches):
    """Every batch is on some rank as it is; a last step with too few repeats some of its own."""
    ranks = parts(make, size)
    seen = epoch(ranks)
    assert [len(rank) for rank in ranks] == [len(mine) for mine in seen]
    in_steps = flat(zip(*seen, strict=True))
    assert in_steps[: len(batches)] == batches
    last_step = batches[(len(batches) - 1) // size * size :]
    assert all(batch in last_step for batch in in_steps[len(batches) :])
    assert len(in_steps) - len(batches) < size
    exact = parts(make, size, exact=True)
    seen = epoch(exact)
    assert [len(rank) for rank in exact] == [len(mine) for mine in seen]
    assert seen == [batches[rank::size] for rank in range(size)]


class CutByPyTorch(BatchSampler):
    """Has an attribute of its own, and leaves the cutting to PyTorch."""

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("kind", [BatchSampler, CutByPyTorch])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_that_pytorch_cuts_are_like_a_batch_size(drop_last, kind):
    batches = kind(SequentialSampler(range(23)), 4, drop_last)
    ranks = parts(loader(23, batch=1, batch_sampler=batches), 3)
    check_training(epoch(ranks), list(range(23)), 4, drop_last=drop_last)
    assert [len(rank) for rank in ranks] == [1 if drop_last else 2] * 3
    with pytest.raises(ValueError, match=r"batch_size of .* cannot change"):
        ranks[0].batch_sampler.batch_size = 8
    if kind is CutByPyTorch:
        assert ranks[0].batch_sampler.epoch == 0
        ranks[0].batch_sampler.set_epoch(7)
        assert ranks[0].batch_sampler.epoch == 7


@every_size
def test_a_loader_without_batches_returns_single_samples(size):
    ranks = parts(loader(7, batch=None), size)
    check_training([[[sample] for sample in rank] for rank in ranks], list(range(7)), 1)


class ByAttribute(WithEpoch):
    epoch = 0

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(self.length).tolist())


class BatchesByAttribute(ByAttribute):
    def __iter__(self):
        return ([number] * 2 for number in super().__iter__())


@every_size
def test_attributes_that_a_script_sets_reach_its_sampler(size):
    samples = parts(loader(30, 5, sampler=ByAttribute(30)), size, seed=None)
    batches = parts(loader(30, 1, batch_sampler=BatchesByAttribute(30)), size, seed=None)
    for number in (3, 2):
        for one, other in zip(samples, batches, strict=True):
            one.sampler.epoch = other.batch_sampler.epoch = number
        order = np.random.default_rng(number).permutation(30).tolist()
        check_training(epoch(samples), order, 5)
        assert steps(epoch(batches)) == [
            [each for each in order[k : k + size] for _ in range(2)] for k in range(0, 30, size)
        ]


class OfLists(Counting):
    def __getitem__(self, indices):
        assert isinstance(indices, list)
        return indices


@every_size
def test_a_sampler_that_passes_whole_batches_to_the_dataset(size):
    batches = BatchSampler(SequentialSampler(range(23)), 4, False)
    ranks = parts(lambda: DataLoader(OfLists(23), batch_size=None, sampler=batches), size)
    check_training(epoch(ranks), list(range(23)), 4)


class Endless(Sampler):
    """Numbers without an end; remembers how many were read."""

    read = 0

    def __iter__(self):
        for number in itertools.count():
            self.read += 1
            yield number % 50


class EndlessWithLength(Endless):
    def __len__(self):
        return 50


class EndlessBatches(Endless):
    def __iter__(self):
        for number in super().__iter__():
            yield [number] * (1 + number % 3)


ENDLESS = {
    "with a length": lambda: {"batch_size": 4, "sampler": EndlessWithLength()},
    "without": lambda: {"batch_size": 4, "sampler": Endless()},
    "batches": lambda: {"batch_sampler": EndlessBatches()},
    "single": lambda: {"batch_size": None, "sampler": Endless()},
}


@every_size
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("seed", [0, None])
def test_of_a_sampler_without_an_end_only_what_is_needed_is_read(kind, size, seed):
    ranks = parts(lambda: DataLoader(Counting(50), **ENDLESS[kind]()), size, seed=seed)
    first = [numbers(np.atleast_1d(batch) for batch in itertools.islice(part, 3)) for part in ranks]
    step = size * (ranks[0].batch_size or 1)
    sources = [part.batch_sampler if kind == "batches" else part.sampler for part in ranks]
    assert [source.read for source in sources] == [3 * step] * size
    seen = [sorted(flat(batches)) for batches in zip(*first, strict=True)]
    if kind != "batches":
        drawn = [range(step * k, step * (k + 1)) for k in range(3)]
        assert seen == [sorted(i % 50 for i in each) for each in drawn]


class Reversed(BatchSampler):
    """Has a ``__len__``, which fails if its sampler has none."""

    def __iter__(self):
        return (batch[::-1] for batch in super().__iter__())


@every_size
def test_a_batch_sampler_over_a_sampler_without_a_length_is_read(size):
    def make():
        return DataLoader(Counting(50), batch_sampler=Reversed(Endless(), 4, False))

    first = [numbers(itertools.islice(part, 3)) for part in parts(make, size)]
    batches = [list(range(4 * k, 4 * k + 4))[::-1] for k in range(3 * size)]
    assert first == [[[i % 50 for i in each] for each in batches[r::size]] for r in range(size)]


def test_a_sampler_without_a_length_makes_a_loader_without_a_length():
    with pytest.raises(TypeError, match="no len"):
        len(parts(loader(9, sampler=Endless()), 2)[0])


def test_an_epoch_too_long_for_memory_is_read_step_by_step():
    long = RandomSampler(range(50), replacement=True, num_samples=10**12)
    ranks = parts(lambda: DataLoader(Counting(50), 4, sampler=long), 2)
    assert [len(rank) for rank in ranks] == [10**12 // 8] * 2
    assert all(len(list(itertools.islice(rank, 3))) == 3 for rank in ranks)
