"""The self-test on two ranks: the sum is right, wrong, or never arrives."""

import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from cases import cases
from machine_facts import library, machine

from hvkit.doctor.facts import horovod, mpi_launchers
from hvkit.doctor.self_test import BYTES, contribution, launcher_for, require_sum, self_test
from hvkit.transport.engines import built_for

OPEN_MPI = """case "$1" in
--version) echo "mpirun (Open MPI) 5.0.11"; exit;;
esac"""
SIZE = 64 * 1024


def of_torch(**values):
    return machine(horovod={"libraries": [library("torch", **values)]})


@pytest.fixture
def started_by(program, monkeypatch):
    """Run the self-test with an mpirun that runs a script; returns the one result."""

    def run(script, seconds=60):
        mpirun = program("mpirun", f"{OPEN_MPI}\n{script}")
        monkeypatch.setenv("PATH", f"{mpirun.parent}:/bin:/usr/bin")
        test = self_test(of_torch(), seconds)
        assert test["launcher"] == "Open MPI 5.0.11"
        (result,) = test["results"]
        return result

    return run


@pytest.mark.parametrize("framework", cases(built_for()))
def test_each_framework_sums_over_two_real_ranks(framework):
    installed, _ = horovod()
    assert installed is not None
    libraries = [one for one in installed["libraries"] if one["framework"] == framework]
    facts = {
        "horovod": installed | {"libraries": libraries},
        "launchers": mpi_launchers(),
        "cores": {"usable": len(os.sched_getaffinity(0))},
    }
    test = self_test(facts, rounds=2, size=SIZE)
    assert test["error"] is None
    (result,) = test["results"]
    assert result["framework"] == framework
    assert result["error"] is None, result["output"]
    assert result["bandwidth"] == SIZE / result["seconds"] > 0


def test_only_the_sum_of_all_ranks_is_right():
    ranks = [contribution(rank, SIZE) for rank in range(2)]
    assert [(each.nbytes, each.dtype) for each in ranks] == [(SIZE, np.float32)] * 2
    require_sum(sum(ranks), 2)
    for alone in (*ranks, np.zeros_like(ranks[0])):
        with pytest.raises(ArithmeticError):
            require_sum(alone, 2)
    wrong = sum(ranks)
    wrong[1000] = 7
    with pytest.raises(ArithmeticError, match=r"wrong in 1 of 16384 elements: element 1000 is"):
        require_sum(wrong, 2)


def test_ranks_that_do_not_see_each_other_name_the_cause():
    done = subprocess.run(
        [sys.executable, "-m", "hvkit.doctor.self_test", built_for()[0], "1", "64"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert (
        "hvkit: the launcher started 2 ranks, but Horovod sees 1: it uses another MPI"
        in done.stderr
    )


def test_ranks_see_no_gpus(started_by, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = started_by('echo "gpus:$CUDA_VISIBLE_DEVICES:"; echo "$@"')
    assert result["output"][0] == "gpus::"
    assert result["output"][1].endswith("-m hvkit.doctor.self_test torch 9 67108864")
    assert result["command"] == "mpirun -np 2 python -m hvkit.doctor.self_test torch 9 67108864"


@pytest.mark.parametrize(
    ("script", "seconds", "error", "output"),
    [
        ("""echo noise; echo '[0]<stdout>:hvkit:{"seconds": 0.5}'""", 0.5, None, []),
        (
            "for i in 1 2 3 4 5 6 7 8 9 10; do echo line $i; done; exit 3",
            None,
            "it ended with status 3",
            [f"line {i}" for i in range(3, 11)],
        ),
        (
            "echo 'hvkit: an allreduce is wrong'; exit 1",
            None,
            "an allreduce is wrong",
            ["hvkit: an allreduce is wrong"],
        ),
        ("exit 0", None, "it printed no result", []),
        (
            """echo 'hvkit:{"seconds": 0.5}'; exit 139""",
            None,
            "it ended with status 139",
            ['hvkit:{"seconds": 0.5}'],
        ),
    ],
)
def test_the_result_of_ranks(started_by, script, seconds, error, output):
    result = started_by(script)
    assert (result["seconds"], result["error"], result["output"]) == (seconds, error, output)
    assert result["bandwidth"] == (BYTES / seconds if seconds else None)


def test_ranks_that_hang_are_ended(started_by, tmp_path, monkeypatch):
    monkeypatch.setattr("hvkit.doctor.self_test._SECONDS_TO_END", 0.2)
    file = tmp_path / "pids"
    # The child ignores SIGTERM.
    hang = f"(trap '' TERM; echo $$ > {file}; echo waiting; sleep 600 & wait; sleep 600) & wait"
    result = started_by(hang, seconds=2)
    assert result["error"] == "it did not end within 2 s"
    assert result["output"] == ["waiting"]
    pid = int(file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    _, left = psutil.wait_procs(ours, timeout=5)
    # One that has ended is a zombie until the machine's first process reaps it.
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in left)


def test_without_a_launcher_the_error_is_its_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    test = self_test({**of_torch(), "launchers": []})
    assert test["results"] == []
    assert "no horovodrun on PATH" in test["error"]


def test_no_ranks_without_horovod_or_a_library_that_loads():
    assert self_test(of_torch(error="undefined symbol")) is None
    assert self_test(machine(horovod=None)) is None


@pytest.mark.parametrize(
    ("controllers", "with_mpi", "without_mpi"),
    [("mpi gloo", "mpirun", "gloo"), ("mpi", "mpirun", "mpirun"), ("gloo", "gloo", "gloo")],
)
def test_gloo_starts_ranks_where_mpi_cannot(controllers, with_mpi, without_mpi):
    facts = of_torch(controllers=controllers.split())
    assert launcher_for(facts) == with_mpi
    assert launcher_for({**facts, "launchers": []}) == without_mpi
