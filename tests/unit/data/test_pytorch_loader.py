"""Sharded DataLoaders: their batches, their position, and how their workers start."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from loaders import Batches, Counting, epoch, loader
from shards import (
    check_exact,
    check_training,
    every_length,
    every_size,
    flat,
    numbers,
    parts,
)
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvkit.data
from hvkit import main_rank, runtime
from hvkit.data import pytorch_loader, shard


@every_size
@every_length
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_steps_are_those_of_one_process_and_exact_parts_hold_every_sample_once(
    exact, length, size, drop_last
):
    ranks = parts(loader(length, drop_last=drop_last), size, exact=exact)
    seen = epoch(ranks)
    if exact:
        check_exact(seen, list(range(length)))
    else:
        check_training(seen, list(range(length)), 4, drop_last=drop_last)
    assert [len(rank) for rank in ranks] == [len(batches) for batches in seen]


@pytest.mark.parametrize("length", [1, 7, 1000, 1001])
def test_every_epoch_has_an_order_that_is_one_on_any_number_of_ranks_and_by_the_seed(length):
    one, again = (parts(loader(length, 1, shuffle=True), 1, seed=3)[0] for _ in range(2))
    orders = [flat(numbers(one)) for _ in range(3)]
    assert sorted(orders[0]) == list(range(length))
    assert [flat(numbers(again)) for _ in range(3)] == orders
    (other,) = parts(loader(length, 1, shuffle=True), 1, seed=4)
    assert length < 1000 or flat(numbers(other)) != orders[0] != orders[1]
    check_exact(epoch(parts(loader(length, shuffle=True), 3, exact=True)), list(range(length)))
    for size in (2, 3, 5):
        ranks = parts(loader(length, shuffle=True), size, seed=3)
        for order in orders:
            check_training(epoch(ranks), order, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_numbers_are_left_alone(workers):
    (one,) = parts(loader(10, shuffle=True, num_workers=workers), 1)
    before = torch.get_rng_state()
    list(one)
    assert torch.equal(torch.get_rng_state(), before)


def tens(samples):
    return [10 * sample for sample in samples]


def seed_of_worker(samples):
    return torch.initial_seed()


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


class OwnIter(DataLoader):
    def __iter__(self):
        return iter(())


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return map(str, super()._get_iterator())


REFUSED = {
    "distributed": (
        loader(9, sampler=DistributedSampler(Counting(9), 2, 0)), ValueError, "leave it out",
    ),
    "own iter": (lambda: OwnIter(Counting(9)), TypeError, "own __iter__: pass a plain DataLoader"),
    "own iterator": (lambda: OwnIterator(Counting(9)), TypeError, "own _get_iterator: pass"),
    "twice": (lambda: shard(loader(9)()), ValueError, "shard the original once"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loader_that_cannot_be_sharded_is_rejected_with_the_reason(kind):
    make, error, message = REFUSED[kind]
    with pytest.raises(error, match=message):
        hvkit.data.shard(make())


@pytest.mark.parametrize(
    ("before", "after", "taken", "workers"),
    [(2, 2, 0, 0), (2, 2, 1, 0), (2, 3, 3, 0), (3, 1, 1, 0), (1, 5, 3, 0), (2, 3, 3, 2)],
)
def test_a_position_is_resumed_on_any_number_of_ranks(before, after, taken, workers):
    make = loader(101, shuffle=True, num_workers=workers)
    (one,) = parts(loader(101, batch=1, shuffle=True), 1)
    first, second, third = [flat(numbers(one)) for _ in range(3)]
    stopped = parts(make, before)
    states = []
    for rank in stopped:
        list(rank)
        batches = iter(rank)
        for _ in range(taken):
            next(batches)
        states.append(rank.state_dict())
    samples = taken * 4 * before
    assert states == [{"epoch": 1, "samples": samples}] * before
    ranks = parts(make, after)
    for rank in ranks:
        rank.load_state_dict(states[0])
    check_training(epoch(ranks), second[samples:], 4)
    assert {str(rank.state_dict()) for rank in ranks} == {"{'epoch': 2, 'samples': 0}"}
    check_training(epoch(ranks), third, 4)
    assert first != second


def test_resuming_reads_none_of_the_samples_that_are_done():
    (one,) = parts(loader(20), 1)
    one.load_state_dict({"epoch": 0, "samples": 12})
    list(one)
    assert one.dataset.read == list(range(12, 20))


def test_a_position_at_the_end_gives_nothing_and_then_the_next_epoch():
    ranks = parts(loader(10), 2)
    for rank in ranks:
        for _ in rank:
            state = rank.state_dict()
    assert state == {"epoch": 0, "samples": 10}
    ranks = parts(loader(10), 3)
    for rank in ranks:
        rank.load_state_dict(state)
        assert list(rank) == []
    check_training(epoch(ranks), list(range(10)), 4)


def test_a_position_in_a_batch_samplers_order_is_resumed():
    ranks = parts(lambda: DataLoader(Counting(23), batch_sampler=Batches([4] * 5 + [3])), 2)
    for rank in ranks:
        rank.load_state_dict({"epoch": 0, "samples": 8})
    step_2, step_3 = [[8, 9, 10, 11], [12, 13, 14, 15]], [[16, 17, 18, 19], [20, 21, 22]]
    assert list(zip(*epoch(ranks), strict=True)) == [tuple(step_2), tuple(step_3)]


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"epoch": -1, "samples": 0}, {"epoch": "1"}])
def test_a_wrong_state_is_an_error(state):
    (one,) = parts(loader(10), 1)
    with pytest.raises(ValueError, match="must be what its state_dict"):
        one.load_state_dict(state)


def test_an_epoch_that_was_left_can_be_counted_as_done():
    (one,) = parts(loader(20, shuffle=True), 1)
    for number, _ in enumerate(one):
        one.end_epoch()  # goes on: not done
        if number == 1:
            break
    assert one.state_dict() == {"epoch": 0, "samples": 8}
    one.end_epoch()
    assert one.state_dict() == {"epoch": 1, "samples": 0}
    (resumed,) = parts(loader(20, shuffle=True), 1)
    resumed.load_state_dict(one.state_dict())
    assert flat(numbers(resumed)) == flat(numbers(one))
    one.end_epoch()  # the loop has already ended it
    assert one.state_dict() == {"epoch": 2, "samples": 0}


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """``adapters(mlx5_0="4: ACTIVE")``: the kernel's folder, and MPI or Gloo in this process."""
    monkeypatch.setattr(pytorch_loader, "ADAPTERS", tmp_path)
    monkeypatch.setattr(main_rank, "_logged", set())

    def made(mpi=True, **states):
        hvd = SimpleNamespace(mpi_enabled=lambda: mpi)
        monkeypatch.setitem(runtime._engines, "torch", SimpleNamespace(hvd=hvd))
        for adapter, state in states.items():
            port = tmp_path / adapter / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")

    return made


def method(**options):
    context = shard(loader(9, **options)()).multiprocessing_context
    return context and context.get_start_method()


def test_with_an_active_adapter_workers_are_not_forked(adapters, capsys):
    adapters(mlx5_0="1: DOWN", mlx5_1="4: ACTIVE")
    assert method(num_workers=1) == "forkserver"
    assert method(num_workers=1) == "forkserver"
    log = capsys.readouterr().err
    assert log.count("hvkit: MPI may use the InfiniBand adapter mlx5_1") == 1
    assert 'multiprocessing_context="fork" to the DataLoader' in log


@pytest.mark.parametrize(
    ("state", "mpi", "options", "chosen"),
    [
        (None, True, {}, None),
        ("1: DOWN", True, {}, None),
        ("2: INIT", True, {}, None),
        ("4: ACTIVE", False, {}, None),  # Gloo
        ("4: ACTIVE", True, {"num_workers": 0}, None),
        ("4: ACTIVE", True, {"multiprocessing_context": "fork"}, "fork"),
    ],
)
def test_otherwise_they_start_as_without_hvkit(state, mpi, options, chosen, adapters, capsys):
    adapters(mpi, **({"mlx5_0": state} if state else {}))
    assert method(**{"num_workers": 1, **options}) == chosen
    assert capsys.readouterr().err == ""


def test_a_method_that_the_script_has_set_stays(adapters, monkeypatch):
    adapters(mlx5_0="4: ACTIVE")
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert method(num_workers=1) is None


def test_one_process_takes_every_batch_in_the_order_of_a_part():
    orders = []
    for dynamic in (False, True):
        torch.manual_seed(1)
        part = hvkit.shard(DataLoader(range(10), batch_size=3, shuffle=True), dynamic=dynamic)
        orders.append([batch.tolist() for batch in part])
    assert orders[0] == orders[1]
