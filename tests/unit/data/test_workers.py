"""Whether workers may be forked, as far as one process can tell."""

import multiprocessing
from types import SimpleNamespace

import pytest
from loaders import loader

from hvkit import main_rank, runtime
from hvkit.data import pytorch_loader, shard


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """``adapters(mlx5_0="4: ACTIVE")``: the kernel's folder, and MPI running in this process."""
    monkeypatch.setattr(pytorch_loader, "ADAPTERS", tmp_path)
    monkeypatch.setattr(main_rank, "_said", set())
    hvd = SimpleNamespace(mpi_enabled=lambda: True)
    monkeypatch.setitem(runtime._engines, "torch", SimpleNamespace(hvd=hvd))

    def made(**states):
        for adapter, state in states.items():
            port = tmp_path / adapter / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")

    return made


def method(**options):
    context = shard(loader(9, **options)()).multiprocessing_context
    return context and context.get_start_method()


def test_beside_an_adapter_that_is_in_use_workers_are_not_forked(adapters, capsys):
    adapters(mlx5_0="1: DOWN", mlx5_1="4: ACTIVE")
    assert method(num_workers=1) == "forkserver"
    assert method(num_workers=1) == "forkserver"
    said = capsys.readouterr().err
    assert said.count("hvkit: MPI may use the InfiniBand adapter mlx5_1") == 1
    assert 'multiprocessing_context="fork" to the DataLoader' in said


@pytest.mark.parametrize("states", [{}, {"mlx5_0": "1: DOWN"}, {"mlx5_0": "2: INIT"}])
def test_elsewhere_they_start_as_without_hvkit(adapters, capsys, states):
    adapters(**states)
    assert method(num_workers=1) is None
    assert capsys.readouterr().err == ""


def test_they_start_as_the_user_says(adapters, monkeypatch):
    adapters(mlx5_0="4: ACTIVE")
    assert method(num_workers=1, multiprocessing_context="fork") == "fork"
    assert method(num_workers=0) is None
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert method(num_workers=1) is None


def test_under_gloo_they_are_forked(adapters, monkeypatch):
    adapters(mlx5_0="4: ACTIVE")
    hvd = SimpleNamespace(mpi_enabled=lambda: False)
    monkeypatch.setitem(runtime._engines, "torch", SimpleNamespace(hvd=hvd))
    assert method(num_workers=1) is None
