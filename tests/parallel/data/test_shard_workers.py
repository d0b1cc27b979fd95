"""With an InfiniBand adapter, workers of sharded loaders are not forks and read the same data."""

import gc
import multiprocessing
import os

import pytest
import torch
from cases import cases
from ranks import error_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import hvkit
from hvkit.data import pytorch_loader, shard

# Workers belong to one rank.
pytestmark = pytest.mark.two_ranks


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, os.getppid()


class Stream(IterableDataset):
    def __iter__(self):
        assert get_worker_info().num_workers == 1
        return ((index, os.getppid()) for index in range(24))


class Broken(Numbers):
    def __getitem__(self, index):
        raise KeyError("no such sample")


@pytest.fixture(autouse=True)
def _no_workers_left(monkeypatch):
    """PyTorch keeps an error from a worker, and with it the iterator, until garbage is collected.

    That may happen inside a later test's collective, and takes seconds a worker, 5 by default.
    """
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    yield
    gc.collect()


@pytest.fixture
def infiniband(tmp_path, monkeypatch):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    monkeypatch.setattr(pytorch_loader, "ADAPTERS", tmp_path)


def read(loader):
    return [(numbers.tolist(), set(parents.tolist())) for numbers, parents in loader]


@pytest.mark.parametrize("options", cases([{"num_workers": 2}, {"num_workers": 1}]))
@pytest.mark.parametrize("persistent", cases([False, True]))
def test_no_worker_is_a_fork_of_its_rank_and_the_data_is_the_same(infiniband, options, persistent):
    options = {**options, "shuffle": True, "persistent_workers": persistent}
    plain = shard(DataLoader(Numbers(), 4, shuffle=True), seed=0)
    part = shard(DataLoader(Numbers(), 4, **options), seed=0)
    for _ in range(2):
        seen = read(part)
        assert [numbers for numbers, _ in seen] == [numbers for numbers, _ in read(plain)]
        assert all(os.getpid() not in parents for _, parents in seen)


def test_no_worker_of_a_stream_is_a_fork_of_its_rank(infiniband):
    seen = read(shard(DataLoader(Stream(), 4, num_workers=1)))
    assert [n for numbers, _ in seen for n in numbers] == list(range(24))[
        hvkit.rank() :: hvkit.size()
    ]
    assert all(os.getpid() not in parents for _, parents in seen)


def test_forkserver_has_imported_pytorch_before_it_forks_workers(infiniband):
    shard(DataLoader(Numbers(), 4, num_workers=1))
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(eval, ("'torch' in __import__('sys').modules",))


def test_a_loader_that_a_script_drops_ends_its_workers_at_once():
    gc.disable()  # which would find it later, and let PyTorch wait 5 s for each worker
    try:
        part = shard(DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True))
        read(part)
        (worker,) = part._iterator._workers
        del part
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_a_function_that_does_not_pickle_is_an_error_that_names_the_fix(infiniband):
    part = shard(DataLoader(Numbers(), 4, num_workers=1, collate_fn=lambda samples: samples))
    error, text = error_of(lambda: list(part))
    assert error is hvkit.LaunchError
    assert "the DataLoader's workers could not start: " in text
    assert "pickle" in text
    assert "InfiniBand adapter mlx5_0" in text
    assert 'multiprocessing_context="fork" to the DataLoader' in text
    hvkit.barrier()


def test_an_error_of_the_dataset_in_a_worker_keeps_its_type(infiniband):
    error, text = error_of(lambda: list(shard(DataLoader(Broken(), 4, num_workers=1))))
    assert error is KeyError
    assert "no such sample" in text
    hvkit.barrier()
