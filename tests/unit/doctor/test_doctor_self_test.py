"""The self-test on two ranks: the sum is right, wrong, or never arrives."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cases import cases

from hvkit.communication.engines import built_for
from hvkit.doctor.horovod import horovod
from hvkit.doctor.self_test import BYTES, contribution, launcher_for, require_sum, self_test
from hvkit.doctor.software import mpi_launchers_here

Program = Callable[[str, str], Path]
Facts = dict[str, Any]

OPEN_MPI = """case "$1" in
--version) echo "mpirun (Open MPI) 5.0.11"; exit;;
esac"""


@pytest.fixture
def torch_only(healthy):
    return with_libraries(healthy, healthy["horovod"]["libraries"][:1])


def with_libraries(facts, libraries):
    return facts | {"horovod": facts["horovod"] | {"libraries": libraries}}


@pytest.fixture
def started_by(program, monkeypatch, torch_only):
    """Run the self-test with an mpirun that runs a script."""

    def run(script, seconds=60):
        mpirun = program("mpirun", f"{OPEN_MPI}\n{script}")
        monkeypatch.setenv("PATH", f"{mpirun.parent}:/bin:/usr/bin")
        test = self_test(torch_only, seconds)
        assert test is not None
        return test

    return run


@pytest.mark.parametrize("framework", cases(built_for()))
def test_each_framework_sums_over_two_real_ranks(framework):
    installed, _ = horovod()
    assert installed is not None
    libraries = [one for one in installed["libraries"] if one["framework"] == framework]
    facts = {
        "horovod": installed | {"libraries": libraries},
        "launchers": mpi_launchers_here(),
        "cores": {"usable": len(os.sched_getaffinity(0))},
    }
    test = self_test(facts)
    assert test is not None
    assert test["error"] is None
    assert [one["framework"] for one in test["results"]] == [framework]
    for result in test["results"]:
        assert result["error"] is None, result["output"]
        assert result["seconds"] is not None
        assert result["bandwidth"] == BYTES / result["seconds"] > 0


def test_an_element_that_is_wrong_is_named():
    total = contribution(0, BYTES) + contribution(1, BYTES)
    require_sum(total, 2)
    total[1000] = 7
    with pytest.raises(ArithmeticError, match=r"wrong in 1 of 16777216 elements: element 1000 is"):
        require_sum(total, 2)


def test_one_ranks_own_contribution_is_not_the_sum():
    of_0, of_1 = (contribution(rank, BYTES) for rank in range(2))
    for alone in (of_0, of_1, np.zeros_like(of_0)):
        with pytest.raises(ArithmeticError):
            require_sum(alone, 2)


def test_a_contribution_has_the_reported_bytes():
    assert contribution(1, BYTES).nbytes == BYTES
    assert contribution(1, BYTES).dtype == np.float32


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


def test_the_time_of_rank_0_is_the_result(started_by):
    test = started_by("""echo noise; echo '[0]<stdout>:hvkit:{"seconds": 0.5}'""")
    (result,) = test["results"]
    assert (result["error"], result["seconds"], result["bandwidth"]) == (None, 0.5, BYTES / 0.5)
    assert test["launcher"] == "Open MPI 5.0.11"


def test_ranks_see_no_gpus(started_by, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (result,) = started_by('echo "gpus:$CUDA_VISIBLE_DEVICES:"; echo "$@"')["results"]
    assert result["output"][0] == "gpus::"
    assert result["output"][1].endswith("-m hvkit.doctor.self_test torch 9 67108864")
    assert result["command"] == "mpirun -np 2 python -m hvkit.doctor.self_test torch 9 67108864"


def test_a_failure_is_shown_with_its_last_lines(started_by):
    (result,) = started_by("for i in 1 2 3 4 5 6 7 8 9 10; do echo line $i; done; exit 3")[
        "results"
    ]
    assert result["error"] == "it ended with status 3"
    assert result["output"] == [f"line {i}" for i in range(3, 11)]


def test_the_reason_that_a_rank_prints_is_the_error(started_by):
    (result,) = started_by("echo start; echo 'hvkit: an allreduce is wrong'; exit 1")["results"]
    assert result["error"] == "an allreduce is wrong"


def test_no_result_is_an_error(started_by):
    assert started_by("exit 0")["results"][0]["error"] == "it printed no result"


def test_a_rank_that_fails_after_the_result_is_an_error(started_by):
    (result,) = started_by("""echo 'hvkit:{"seconds": 0.5}'; exit 139""")["results"]
    assert (result["error"], result["seconds"]) == ("it ended with status 139", None)


def test_ranks_that_hang_are_ended(started_by, tmp_path):
    file = tmp_path / "pids"
    # The child ignores SIGTERM.
    hang = f"(trap '' TERM; echo $$ > {file}; echo waiting; sleep 600 & wait; sleep 600) & wait"
    (result,) = started_by(hang, seconds=2)["results"]
    assert result["error"] == "it did not end within 2 s"
    assert result["output"] == ["waiting"]
    pid = int(file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    _, left = psutil.wait_procs(ours, timeout=5)
    # One that has ended is a zombie until the machine's first process reaps it.
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in left)


def test_without_a_launcher_the_error_is_its_reason(torch_only, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    test = self_test(torch_only | {"launchers": []})
    assert test is not None
    assert test["results"] == []
    assert "no horovodrun on PATH" in test["error"]


def test_no_ranks_without_a_library_that_loads(torch_only):
    broken = torch_only["horovod"]["libraries"][0] | {"error": "undefined symbol"}
    assert self_test(with_libraries(torch_only, [broken])) is None


def test_no_ranks_without_horovod(healthy):
    assert self_test(healthy | {"horovod": None}) is None


@pytest.mark.parametrize(
    ("controllers", "mpi_is_there", "launcher"),
    [
        (("mpi", "gloo"), True, "mpirun"),
        (("mpi", "gloo"), False, "gloo"),
        (("mpi",), True, "mpirun"),
        (("mpi",), False, "mpirun"),
        (("gloo",), True, "gloo"),
        (("gloo",), False, "gloo"),
    ],
)
def test_gloo_starts_ranks_where_mpi_cannot(torch_only, controllers, mpi_is_there, launcher):
    library = torch_only["horovod"]["libraries"][0] | {"controllers": controllers}
    facts = with_libraries(torch_only, [library])
    assert launcher_for(facts if mpi_is_there else facts | {"launchers": []}) == launcher
