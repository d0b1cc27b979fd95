"""What launchers leave in the environment of their processes."""

import os

import pytest

from hvkit.errors import LaunchError
from hvkit.host.launcher_variables import Launched, launch_id, launched, rank_id


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
def test_what_launchers_leave_in_the_environment(environ, expected):
    assert launched(environ) == expected


def test_what_is_typed_in_the_shell_of_srun_is_one_process_whatever_the_number_of_tasks():
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
