"""What launchers leave in the environment of ranks, and what a rank sets, unless somebody has."""

import os

import pytest

from hvkit.errors import LaunchError
from hvkit.host import mca, rank_variables
from hvkit.host.hardware import CgroupLimits
from hvkit.host.rank_variables import Launched, launch_id, launched, rank_id


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, Launched(4, "mpirun")),
        ({"PMI_SIZE": "3"}, Launched(3, "mpiexec")),
        ({"HOROVOD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, Launched(2, "horovodrun")),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "8"}, Launched(8, "mpirun")),
        ({"SLURM_STEP_NUM_TASKS": "5"}, Launched(5, "srun")),
        # An allocation is not a launch: SLURM_NTASKS is set in an interactive shell too.
        ({"SLURM_NTASKS": "5"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"MASTER_ADDR": "a", "RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, Launched(4, "mpirun")),
    ],
)
def test_launchers_are_recognised_by_their_variables(environ, expected):
    assert launched(environ) == expected


def test_a_command_in_the_shell_of_srun_is_one_process_whatever_the_number_of_tasks():
    typed = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "39761", "SLURM_TASK_PID": "1"}
    assert launched(typed) is None
    assert launched({**typed, "OMPI_COMM_WORLD_SIZE": "2"}) == Launched(2, "mpirun")
    assert launched({**typed, "SLURM_TASK_PID": str(os.getpid())}) == Launched(4, "srun")


@pytest.mark.parametrize("value", ["", "two", "0", "-1", "1.5"])
def test_a_size_that_is_none_is_an_error_that_names_variable_and_value(value):
    with pytest.raises(LaunchError, match=rf"OMPI_COMM_WORLD_SIZE must be .*, got '{value}'"):
        launched({"OMPI_COMM_WORLD_SIZE": value})


OTHER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("environ", "started_by"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, r"torchrun started .* \(WORLD_SIZE=2"),
        (OTHER, "a launcher of torch.distributed started this process"),
    ],
)
def test_torchrun_and_its_like_are_refused_rather_than_trained_apart(environ, started_by):
    with pytest.raises(LaunchError, match=started_by):
        launched(environ)


def test_variables_that_do_not_tell_launches_apart_make_no_id_of_a_rank():
    assert rank_id({"PMI_RANK": "1", "PMI_SIZE": "2"}) is None
    assert rank_id({"PMIX_NAMESPACE": "a"}) is None
    assert rank_id({"PMI_RANK": "1", "HVKIT_REPORTS": "9:77"}) == "9:77 1"


def test_a_launch_nested_in_another_has_an_id_of_its_own():
    outer = {"PMIX_NAMESPACE": "prterun-host-1@1", "SLURM_JOB_ID": "7"}
    assert launch_id(outer) == launch_id({**outer, "OMPI_COMM_WORLD_RANK": "1"})
    assert launch_id(outer) != launch_id({**outer, "PMIX_NAMESPACE": "prterun-host-2@1"})
    assert launch_id(outer) != launch_id({**outer, "SLURM_STEP_ID": "0"})


OF_SITE, OF_USER = "mpi/etc/openmpi-mca-params.conf", ".openmpi/mca-params.conf"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of a site with an Open MPI and a user."""
    mpirun = tmp_path / "mpi/bin/mpirun"
    for file in (mpirun, tmp_path / OF_SITE, tmp_path / OF_USER):
        file.parent.mkdir(parents=True, exist_ok=True)
    mpirun.touch()
    monkeypatch.setattr(rank_variables, "within_host", lambda: ["docker0"])
    monkeypatch.setattr(rank_variables, "program", lambda name: str(mpirun))
    return tmp_path


def found(site, **environ):
    settings = rank_variables.rank_settings({"HOME": str(site), **environ})
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
def test_parameters_in_a_file_of_open_mpi_stay(site, file, line, variable):
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
def test_variables_that_the_user_has_set_stay(site, variable, chosen):
    assert variable in found(site)
    assert variable not in found(site, **{chosen: "1"})


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_an_allocator_that_the_user_has_set_up_stays_as_it_is(site, name):
    settings = found(site, **{name: "glibc.malloc.trim_threshold=131072"})
    assert not [each for each in settings if each.startswith("MALLOC_")]


@pytest.mark.parametrize(("limit", "kept"), [(1 << 30, 1 << 26), (1 << 50, (1 << 31) - 1)])
def test_a_rank_keeps_a_part_of_the_memory_that_it_may_use(site, monkeypatch, limit, kept):
    pages = {"SC_PHYS_PAGES": 1 << 50, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(rank_variables.os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(rank_variables, "cgroup_limits", lambda: CgroupLimits(None, limit))
    assert found(site)["MALLOC_TRIM_THRESHOLD_"] == str(kept)
