"""N ranks read the samples that one process reads without hvkit, whatever their own seeds."""

import itertools
import random

import numpy as np
import pytest
import torch
from cases import MORE
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch_nets import raised_everywhere

import hvkit
from hvkit.data import shard

LENGTH = 120  # for 2 and 3 ranks a multiple of each step's samples
DATA = TensorDataset(torch.arange(LENGTH))


class ByNumpy(Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(np.random.permutation(LENGTH).tolist())


class Lazy(Sampler):
    """Draws a number for each sample, and has no end."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        while True:
            yield random.randrange(LENGTH)


def generator(rank):
    return torch.Generator().manual_seed(7 + rank)


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
SAMPLERS = {
    "shuffle": lambda rank: {"shuffle": True},
    "generator": lambda rank: {"shuffle": True, "generator": generator(rank)},
    "workers": lambda rank: {"shuffle": True, "num_workers": 1},
    "persistent": lambda rank: PERSISTENT | {"shuffle": True},
    "persistent, generator": lambda rank: (
        PERSISTENT | {"shuffle": True, "generator": generator(rank)}
    ),
    "replacement": lambda rank: {"sampler": RandomSampler(DATA, True, LENGTH, generator(rank))},
    "weighted": lambda rank: {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)},
    "subset": lambda rank: {"sampler": SubsetRandomSampler(range(LENGTH))},
    "numpy": lambda rank: {"sampler": ByNumpy()},
    "lazy": lambda rank: {"sampler": Lazy()},
}


def read(loader, test_loader, steps=8):
    """The samples of three epochs' steps, with an evaluation after each; None for all steps."""
    seen = []
    for _ in range(3):
        seen += [each.tolist() for (each,) in itertools.islice(loader, steps)]
        assert list(test_loader)
    return seen


def seed(rank):
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def loader(kind, rank, batch):
    return DataLoader(DATA, batch, **SAMPLERS[kind](rank))


@MORE
@pytest.mark.parametrize(
    ("kind", "steps"),
    [(kind, 8) for kind in SAMPLERS] + [(kind, None) for kind in SAMPLERS if kind != "lazy"],
)
def test_n_ranks_read_what_one_process_reads_without_hvkit(kind, steps):
    seed(0)
    whole = read(loader(kind, 0, 4 * hvkit.size()), DataLoader(DATA, 10, shuffle=True), steps)
    seed(hvkit.rank())
    test = shard(DataLoader(DATA, 10, shuffle=True), exact=True)
    mine = read(shard(loader(kind, hvkit.rank(), 4)), test, steps)
    for ours, reference in zip(zip(*hvkit.allgather(mine), strict=True), whole, strict=True):
        assert sorted(itertools.chain(*ours)) == sorted(reference)


@pytest.mark.parametrize("kind", ["shuffle", "generator", "weighted"])
def test_ranks_with_equal_seeds_still_draw_equal_numbers(kind):
    seed(5)
    for _ in shard(loader(kind, 0, 4)):
        pass
    assert len(set(hvkit.allgather((torch.rand(()).item(), random.random())))) == 1


class DriftsApart(Sampler):
    """The same samples on every rank at first."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        order = list(range(LENGTH))
        order[LENGTH // 2 :] = np.random.default_rng(hvkit.rank()).permutation(order[LENGTH // 2 :])
        return iter(order)


class EndsEarly(Sampler):
    def __iter__(self):
        return iter(range(LENGTH - 8 * hvkit.size() * (hvkit.rank() == 0)))


@pytest.mark.parametrize("sampler", [DriftsApart, EndsEarly])
@pytest.mark.parametrize("exact", [False, True])
def test_a_sampler_that_differs_later_in_the_epoch_is_an_error_on_all(sampler, exact):
    loader = DataLoader(DATA, 1, sampler=sampler())
    text = f"order of {sampler.__name__} in epoch 0"
    assert raised_everywhere(lambda: list(shard(loader, exact=exact)), text)
