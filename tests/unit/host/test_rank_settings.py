"""What a rank sets for Horovod and Open MPI, unless somebody has."""

from pathlib import Path

import pytest

from hvkit.host import allocator, mca, rank_settings
from hvkit.host.cpus import Allowance


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a site with an Open MPI and a user."""
    mpirun = tmp_path / "mpi/bin/mpirun"
    mpirun.parent.mkdir(parents=True)
    mpirun.touch()
    (tmp_path / "mpi/etc").mkdir()
    (tmp_path / ".openmpi").mkdir()
    monkeypatch.setattr(rank_settings, "within_host", lambda: ["docker0"])
    monkeypatch.setattr(rank_settings, "program", lambda name: str(mpirun))
    return tmp_path


def found(site: Path, **environ: str) -> dict[str, str]:
    settings = rank_settings.rank_settings({"HOME": str(site), **environ})
    assert all(each.reason for each in settings)
    return {each.variable: each.value for each in settings}


@pytest.mark.parametrize(
    "file", ["mpi/etc/openmpi-mca-params.conf", ".openmpi/mca-params.conf", ""]
)
def test_ranks_of_a_bare_mpirun_exclude_docker_unless_a_file_sets_interfaces(
    site: Path, file: str
) -> None:
    if file:
        (site / file).write_text("btl_tcp_if_include = eth0\n")
    expected = None if file else "127.0.0.1/8,sppp,docker0"
    assert found(site).get(f"{mca.RANKS.prefix}btl_tcp_if_exclude") == expected


@pytest.mark.parametrize("set_by", ["file", "variable", None])
def test_open_mpi_starts_without_libfabrics_one_sided_messages_unless_transports_are_set(
    site: Path, set_by: str | None
) -> None:
    if set_by == "file":
        (site / "mpi/etc/openmpi-mca-params.conf").write_text("btl = tcp,self\n")
    environ = {"OMPI_MCA_btl": "tcp,self"} if set_by == "variable" else {}
    assert found(site, **environ).get("OMPI_MCA_btl") == (None if set_by else "^ofi")


def test_ranks_wait_without_a_core(site: Path) -> None:
    settings = found(site)
    assert settings["HVKIT_BLOCKING_WAITS"] == settings["OMPI_MCA_mpi_yield_when_idle"] == "1"


@pytest.mark.parametrize(
    "variable",
    [
        "OMPI_MCA_mpi_yield_when_idle",
        "HVKIT_BLOCKING_WAITS",
        "HVKIT_OWN_COLLECTIVES",
        "OMPI_MCA_btl",
        "MALLOC_TRIM_THRESHOLD_",
    ],
)
def test_what_the_user_has_set_stays(site: Path, variable: str) -> None:
    assert variable in found(site)
    assert variable not in found(site, **{variable: "0"})


@pytest.mark.parametrize(
    "chosen",
    [{"MALLOC_ARENA_MAX": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
)
def test_an_allocator_that_the_user_has_set_up_stays_as_it_is(
    site: Path, chosen: dict[str, str]
) -> None:
    assert not {name for name in found(site, **chosen) if name.startswith("MALLOC_")}


@pytest.mark.parametrize(("limit", "kept"), [(1 << 30, 1 << 26), (1 << 50, (1 << 31) - 1)])
def test_a_rank_keeps_a_part_of_the_memory_that_it_may_use(
    site: Path, monkeypatch: pytest.MonkeyPatch, limit: int, kept: int
) -> None:
    pages = {"SC_PHYS_PAGES": 1 << 50, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(allocator.os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(allocator, "allowance", lambda: Allowance(None, limit))
    assert found(site)["MALLOC_TRIM_THRESHOLD_"] == str(kept)


def test_a_setting_of_horovods_own_check_keeps_it_on(site: Path) -> None:
    assert "HOROVOD_STALL_CHECK_DISABLE" in found(site)
    assert "HOROVOD_STALL_CHECK_DISABLE" not in found(site, HOROVOD_STALL_CHECK_TIME_SECONDS="9")
