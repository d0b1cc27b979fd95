"""Ranks of a host share its cores and its CPU time; each has its GPU, of those that CUDA shows."""

from types import SimpleNamespace

import pytest

from hvkit.errors import LaunchError
from hvkit.host import hardware
from hvkit.host.hardware import (
    Gpu,
    Gpus,
    cores,
    cpus_of_rank,
    free_memory,
    gpu_of_rank,
    threads_of_rank,
    visible_gpus,
)


@pytest.fixture
def topology(tmp_path):
    """Two packages of two cores with two threads each: CPU n and n + 4 are one core."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
        (folder / "die_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 4 // 2}\n")
    return tmp_path


def test_hardware_threads_of_a_core_stay_together_and_packages_too(topology, tmp_path):
    assert cores(range(8), topology) == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]
    # CPUs that the process may not use are left out.
    assert cores([0, 1, 5], topology) == [{0}, {1, 5}]
    assert cores([3, 1], tmp_path / "no topology") == [{1}, {3}]


@pytest.mark.parametrize(("count", "ranks"), [(8, 2), (8, 3), (7, 4), (5, 5), (64, 6)])
def test_ranks_share_all_cores_evenly(count, ranks):
    single = [frozenset({cpu}) for cpu in range(count)]
    shares = [cpus_of_rank(single, rank, ranks) for rank in range(ranks)]
    assert sorted(cpu for taken in shares for cpu in taken) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_rank_and_ranks_on_too_few_cores_are_not_bound():
    single = [frozenset({cpu}) for cpu in range(4)]
    assert cpus_of_rank(single, 0, 1) is None
    assert cpus_of_rank(single, 0, 5) is None


@pytest.mark.parametrize(
    ("local_size", "usable", "host", "limit", "expected"),
    [
        (1, 8, 8, None, 8),
        (2, 8, 8, None, 4),
        (3, 8, 8, None, 2),
        (16, 8, 8, None, 1),
        (2, 1, 8, None, 1),  # bound to a core
        (2, 4, 8, None, 4),  # bound to half of the host
        # In a container they share the time that it has.
        (2, 64, 64, 2.0, 1),
        (2, 32, 64, 2.0, 1),  # bound to half of the host
        (2, 64, 64, 8.0, 4),
        (2, 64, 64, 5.0, 3),  # rounded up
        (1, 64, 64, 1.5, 2),
        (8, 64, 64, 0.5, 1),
        (2, 1, 64, 8.0, 1),  # bound to less than the limit gives
        (2, 64, 64, 128.0, 32),  # a limit above what the host has
    ],
)
def test_the_ranks_of_a_host_share_its_cpus(local_size, usable, host, limit, expected):
    assert threads_of_rank(local_size, usable, host, limit) == expected


@pytest.mark.parametrize(
    ("limit", "used", "cache", "free"),
    [("max", 900, 0, 5000), ("1000", 900, 0, 100), ("1000", 900, 300, 400), ("9000", 1, 0, 5000)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_free_within_the_limit_of_the_container(
    version, limit, used, cache, free, tmp_path, monkeypatch
):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5000))
    folder = tmp_path / "memory" / "job" if version == 1 else tmp_path / "job"
    folder.mkdir(parents=True)
    of_all = "total_" if version == 1 else ""
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    (tmp_path / "own").write_text("4:memory:/job\n" if version == 1 else "0::/job\n")
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{of_all}inactive_file {cache}\n")
    assert free_memory(tmp_path, tmp_path / "own") == free


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "expected"),
    [
        (3, 4, 0, None),
        (0, 4, 4, 0),
        (3, 4, 4, 3),
        (1, 2, 8, 1),
        (3, 4, 1, 0),  # the launcher shows each rank its own
    ],
)
def test_each_rank_takes_the_gpu_of_its_local_rank(local_rank, local_size, visible, expected):
    assert gpu_of_rank(local_rank, local_size, visible) == expected


def test_more_ranks_than_gpus_is_an_error():
    with pytest.raises(LaunchError, match="8 ranks on a host with 4 GPUs"):
        gpu_of_rank(0, 8, 4)


@pytest.mark.parametrize(
    ("of_host", "listed", "visible"),
    [
        (4, None, 4),
        (4, "0,1", 2),
        (4, "3", 1),
        (4, "GPU-8932f937,MIG-1b2c", 2),
        (4, "", 0),
        (4, "-1", 0),
        (4, "NoDevFiles", 0),
        (4, "0,-1,1", 1),
        (4, "1,9,2", 1),  # CUDA's list ends before the first that does not exist
        (0, "0,1", 0),
    ],
)
def test_ranks_may_use_the_gpus_that_cuda_shows_them(monkeypatch, of_host, listed, visible):
    found = tuple(Gpu(number, "H100", None, "580") for number in range(of_host))
    monkeypatch.setattr(hardware, "gpus", lambda: Gpus(found, None, "13.0"))
    assert visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == visible
