"""What a rank sets for Horovod and Open MPI, unless somebody has."""

import pytest

from hvkit.host import mca, rank_settings
from hvkit.host.cpus import Allowance

OF_SITE, OF_USER = "mpi/etc/openmpi-mca-params.conf", ".openmpi/mca-params.conf"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of a site with an Open MPI and a user."""
    mpirun = tmp_path / "mpi/bin/mpirun"
    for file in (mpirun, tmp_path / OF_SITE, tmp_path / OF_USER):
        file.parent.mkdir(parents=True, exist_ok=True)
    mpirun.touch()
    monkeypatch.setattr(rank_settings, "within_host", lambda: ["docker0"])
    monkeypatch.setattr(rank_settings, "program", lambda name: str(mpirun))
    return tmp_path


def found(site, **environ):
    settings = rank_settings.rank_settings({"HOME": str(site), **environ})
    assert all(each.reason for each in settings)
    return {each.variable: each.value for each in settings}


def test_ranks_of_a_bare_mpirun_exclude_docker_start_without_one_sided_messages_and_yield(site):
    settings = found(site)
    assert settings[f"{mca.RANKS.prefix}btl_tcp_if_exclude"] == "127.0.0.1/8,sppp,docker0"
    assert settings["OMPI_MCA_btl"] == "^ofi"  # those of libfabric
    assert settings["HVKIT_BLOCKING_WAITS"] == settings["OMPI_MCA_mpi_yield_when_idle"] == "1"


@pytest.mark.parametrize("file", [OF_SITE, OF_USER])
@pytest.mark.parametrize(
    ("line", "variable"),
    [("btl_tcp_if_include = eth0", "btl_tcp_if_exclude"), ("btl = tcp,self", "btl")],
)
def test_what_a_file_of_open_mpis_sets_stays(site, file, line, variable):
    (site / file).write_text(f"{line}\n")
    assert f"{mca.RANKS.prefix}{variable}" not in found(site)


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        *((name, name) for name in ("OMPI_MCA_mpi_yield_when_idle", "HVKIT_BLOCKING_WAITS")),
        *((name, name) for name in ("HVKIT_OWN_COLLECTIVES", "OMPI_MCA_btl")),
        ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
        ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"),
        ("HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    ],
)
def test_what_the_user_has_set_stays(site, variable, chosen):
    assert variable in found(site)
    assert variable not in found(site, **{chosen: "1"})


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_an_allocator_that_the_user_has_set_up_stays_as_it_is(site, name):
    settings = found(site, **{name: "glibc.malloc.trim_threshold=131072"})
    assert not [each for each in settings if each.startswith("MALLOC_")]


@pytest.mark.parametrize(("limit", "kept"), [(1 << 30, 1 << 26), (1 << 50, (1 << 31) - 1)])
def test_a_rank_keeps_a_part_of_the_memory_that_it_may_use(site, monkeypatch, limit, kept):
    pages = {"SC_PHYS_PAGES": 1 << 50, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(rank_settings.os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(rank_settings, "allowance", lambda: Allowance(None, limit))
    assert found(site)["MALLOC_TRIM_THRESHOLD_"] == str(kept)
