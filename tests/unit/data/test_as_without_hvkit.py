"""One process reads from sharded data what it reads without hvkit, and draws the same numbers."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from loaders import Batches
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from hvkit import random_states
from hvkit.data import shard


class Noisy(Dataset):
    """Samples whose numbers depend on all global generators, of a worker if there is one."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index + torch.rand(()).item() / 4 + random.random() / 4 + np.random.rand() / 4


class Stream(IterableDataset):
    def __iter__(self):
        worker, order = get_worker_info(), list(range(22))
        random.shuffle(order)
        return iter(order[worker.id :: worker.num_workers] if worker else order)


class Eager(Sampler):
    """Draws when it is asked for its iterator."""

    def __len__(self):
        return 22

    def __iter__(self):
        return iter(np.random.permutation(22).tolist())


class Lazy(Sampler):
    """Draws a number for each sample, and has no end and no length."""

    def __iter__(self):
        while True:
            yield random.randrange(22)


class EndlessWithLength(Lazy):
    def __len__(self):
        return 22


class EagerBatches(Sampler):
    """Batches of different sizes, in a new order each time, as tuples; no length."""

    def __iter__(self):
        batches = [tuple(batch) for batch in Batches([3, 4, 1, 5, 2, 7])]
        random.shuffle(batches)
        return iter(batches)


class WithEpoch(BatchSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(22).tolist()
        return iter([order[k : k + 4] for k in range(0, 22, 4)])


def seeded():
    return torch.Generator().manual_seed(9)


LOADERS = {
    "shuffle": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(Noisy(), 4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=seeded()),
    "replacement": lambda: DataLoader(
        Noisy(), 4, sampler=RandomSampler(range(22), True, 45, seeded())
    ),
    "num_samples": lambda: DataLoader(Noisy(), 4, sampler=RandomSampler(range(22), False, 45)),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * 22, 30)),
    "subset": lambda: DataLoader(Noisy(), 4, sampler=SubsetRandomSampler(range(5, 22))),
    "eager": lambda: DataLoader(Noisy(), 4, sampler=Eager()),
    "lazy": lambda: DataLoader(Noisy(), 4, sampler=Lazy()),
    "endless with length": lambda: DataLoader(Noisy(), 4, sampler=EndlessWithLength()),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=EagerBatches()),
    "epochs": lambda: DataLoader(Noisy(), batch_sampler=WithEpoch(range(22), 4, False)),
    "single samples": lambda: DataLoader(Noisy(), None, sampler=Eager()),
    "shuffled single samples": lambda: DataLoader(Noisy(), None, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Noisy(), 4, sampler=Eager(), num_workers=2, persistent_workers=True, generator=seeded()
    ),
    "shuffled by persistent workers' generator": lambda: DataLoader(
        Noisy(), 4, True, num_workers=2, persistent_workers=True, generator=seeded()
    ),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream with workers": lambda: DataLoader(Stream(), 4, num_workers=2, drop_last=True),
}  # fmt: skip


def seed():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def trained(loader, first=0, end=3):
    """The batches of some epochs, each with a number that a training step draws."""
    for epoch in range(first, end):
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        for batch in itertools.islice(loader, 50):  # some have no end
            yield torch.as_tensor(batch).tolist(), torch.rand(()).item()


def without_noise(steps):
    return [[int(number) for number in np.ravel(batch)] for batch, _ in steps]


# What streams and a worker draw, and what a sampler draws between the steps, is not saved.
NOT_SAVED = "lazy", "endless with length", "stream", "stream with workers"


@pytest.mark.parametrize("kind", LOADERS)
def test_one_process_draws_what_it_draws_without_hvkit_also_when_it_resumes(kind):
    seed()
    plain = list(trained(LOADERS[kind]()))
    for exact in (False, True):
        seed()
        assert list(trained(shard(LOADERS[kind](), exact=exact))) == plain
    for steps_of_an_epoch in (0, 2) if kind not in NOT_SAVED else ():
        seed()
        stopped = shard(LOADERS[kind]())
        seen = list(trained(stopped, end=1))
        seen += itertools.islice(trained(stopped, first=1), steps_of_an_epoch)
        state, generators = stopped.state_dict(), random_states.global_states()
        resumed = shard(LOADERS[kind]())
        resumed.load_state_dict(json.loads(json.dumps(state)))
        random_states.set_global_states(generators)
        seen += trained(resumed, first=1)
        if "workers" in kind:
            assert without_noise(seen) == without_noise(plain)
        else:
            assert seen == plain
