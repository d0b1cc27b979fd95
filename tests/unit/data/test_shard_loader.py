"""Every rank's part of a DataLoader or Dataset."""

import pytest
import torch
from loaders import Counting, epoch, loader
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
    Sampler,
)
from torch.utils.data.distributed import DistributedSampler

import hvkit.data
from hvkit.data import shard


@every_size
@every_length
@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_those_of_one_process(length, size, drop_last):
    ranks = parts(loader(length, drop_last=drop_last), size)
    seen = epoch(ranks)
    check_training(seen, list(range(length)), 4, drop_last=drop_last)
    assert [len(rank) for rank in ranks] == [len(batches) for batches in seen]


@every_size
@every_length
@pytest.mark.parametrize("drop_last", [False, True])
def test_exact_parts_hold_every_sample_once(length, size, drop_last):
    ranks = parts(loader(length, drop_last=drop_last), size, exact=True)
    seen = epoch(ranks)
    check_exact(seen, list(range(length)))
    assert [len(rank) for rank in ranks] == [len(batches) for batches in seen]


@pytest.mark.parametrize("length", [1, 7, 1000, 1001])
def test_the_shuffled_order_is_one_on_any_number_of_ranks(length):
    (one,) = parts(loader(length, batch=1, shuffle=True), 1, seed=3)
    orders = [flat(numbers(one)) for _ in range(3)]
    assert sorted(orders[0]) == list(range(length))
    for size in (2, 3, 5):
        ranks = parts(loader(length, shuffle=True), size, seed=3)
        for order in orders:
            check_training(epoch(ranks), order, 4)


def test_every_epoch_is_shuffled_anew_and_by_the_seed():
    (one,) = parts(loader(100, shuffle=True), 1)
    (again,) = parts(loader(100, shuffle=True), 1)
    (other,) = parts(loader(100, shuffle=True), 1, seed=1)
    first, second = flat(numbers(one)), flat(numbers(one))
    assert first != second
    assert [flat(numbers(again)), flat(numbers(again))] == [first, second]
    assert flat(numbers(other)) != first


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_numbers_are_left_alone(workers):
    (one,) = parts(loader(10, shuffle=True, num_workers=workers), 1)
    before = torch.get_rng_state()
    list(one)
    assert torch.equal(torch.get_rng_state(), before)


def test_exact_parts_of_a_shuffled_loader_are_in_the_original_order():
    check_exact(epoch(parts(loader(1001, shuffle=True), 3, exact=True)), list(range(1001)))


def tens(samples):
    return [10 * sample for sample in samples]


def seed_of_worker(samples):
    return torch.initial_seed()


def name_of_worker(samples):
    return torch.utils.data.get_worker_info().id


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_and_collate_function_stay(persistent):
    options = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 3}
    ranks = parts(loader(23, shuffle=True, collate_fn=tens, **options), 2)
    assert {part.num_workers for part in ranks} == {2}
    assert {part.prefetch_factor for part in ranks} == {3}
    (one,) = parts(loader(23, batch=1, shuffle=True), 1)
    for _ in range(3):
        check_training(epoch(ranks), [10 * number for number in flat(numbers(one))], 4)


def test_options_stay():
    def init(worker):
        pass

    options = {"drop_last": True, "worker_init_fn": init, "num_workers": 1, "timeout": 9.0}
    (one, _) = parts(loader(23, multiprocessing_context="spawn", **options), 2)
    assert (one.batch_size, one.drop_last, one.timeout) == (4, True, 9.0)
    assert one.worker_init_fn is init
    assert one.multiprocessing_context.get_start_method() == "spawn"


def test_workers_have_seeds_of_their_own_on_every_rank_and_in_every_epoch():
    ranks = parts(loader(8, batch=1, num_workers=1, collate_fn=seed_of_worker), 2)
    seeds = [set(rank) for rank in ranks for _ in range(2)]
    assert [len(each) for each in seeds] == [1] * 4
    assert len(set.union(*seeds)) == 4
    again = parts(loader(8, batch=1, num_workers=1, collate_fn=seed_of_worker), 2)
    assert [set(rank) for rank in again for _ in range(2)] == seeds


@every_size
@every_length
def test_a_dataset_becomes_a_dataset_of_every_nth_sample(length, size):
    ranks = parts(lambda: Counting(length), size)
    check_rows([list(part) for part in ranks], length)
    exact = parts(lambda: Counting(length), size, exact=True)
    check_exact([[list(part)] if len(part) else [] for part in exact], list(range(length)))


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


class OwnIter(DataLoader):
    def __iter__(self):
        return iter(())


REFUSED = {
    "distributed": (
        loader(9, sampler=DistributedSampler(Counting(9), 2, 0)), ValueError, "leave it out",
    ),
    "no length": (loader(9, sampler=Endless()), TypeError, "Endless has no __len__"),
    "own iter": (lambda: OwnIter(Counting(9)), TypeError, "pass a plain DataLoader"),
    "twice": (lambda: shard(loader(9)()), ValueError, "shard the original once"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_shared_is_refused_with_the_reason(kind):
    make, error, message = REFUSED[kind]
    with pytest.raises(error, match=message):
        hvkit.data.shard(make())
