"""Ranks of a host share its cores."""

import pytest

from hvkit.host.cpus import cores, share


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


def test_hardware_threads_of_a_core_stay_together_and_packages_too(topology):
    assert cores(range(8), topology) == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]


def test_cpus_that_the_process_may_not_use_are_left_out(topology):
    assert cores([0, 1, 5], topology) == [{0}, {1, 5}]


def test_without_topology_each_cpu_is_a_core(tmp_path):
    assert cores([3, 1], tmp_path) == [{1}, {3}]


@pytest.mark.parametrize(("count", "ranks"), [(8, 2), (8, 3), (7, 4), (5, 5), (64, 6)])
def test_ranks_share_all_cores_evenly(count, ranks):
    single = [frozenset({cpu}) for cpu in range(count)]
    shares = [share(single, rank, ranks) for rank in range(ranks)]
    assert sorted(cpu for taken in shares for cpu in taken) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_rank_and_ranks_on_too_few_cores_are_not_bound():
    single = [frozenset({cpu}) for cpu in range(4)]
    assert share(single, 0, 1) is None
    assert share(single, 0, 5) is None
