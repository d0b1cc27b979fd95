"""Horovod's libraries, loaded in a process of their own, and differences between builds."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from hvkit.doctor.facts import LOAD_LIBRARY, changes, library_from
from hvkit.host.commands import Output

BUILT = "".join(
    f"int horovod_{name}_built() {{ return {int(name in ('mpi', 'nccl'))}; }}\n"
    for name in ("mpi", "gloo", "nccl", "ddl", "ccl")
)
MPI = """
int MPI_Get_library_version(char *text, int *length) {
    *length = __builtin_sprintf(text, "Open MPI v5.0.11, package: x");
    return 0;
}
"""
MISSING = "int not_anywhere(); int horovod_init() { return not_anywhere(); }\n"


@pytest.fixture
def load(tmp_path):
    """Compile C++ into a library, which may lack symbols, and load it."""

    def run(source):
        file = tmp_path / "mpi_lib.so"
        compiler = shutil.which("c++") or shutil.which("g++")
        command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(file)]
        text = f'extern "C" {{\n{source}}}\n'
        subprocess.run(command, input=text, text=True, check=True, timeout=120)
        command = [sys.executable, "-I", "-c", LOAD_LIBRARY, str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


def test_features_and_the_mpi_that_is_loaded(load):
    done = load(BUILT + MPI)
    assert done.returncode == 0
    found = {"features": ["nccl", "mpi"], "mpi": "Open MPI v5.0.11, package: x"}
    assert json.loads(done.stdout.removeprefix("hvkit:")) == found


def test_a_symbol_that_is_missing_is_named_before_it_is_used(load):
    done = load(BUILT + MPI + MISSING)
    assert (done.returncode, done.stdout) == (1, "")
    assert "undefined symbol: not_anywhere" in done.stderr


def test_a_library_that_crashes_ends_its_own_process_only(load):
    crash = "__attribute__((constructor)) void crash() { __builtin_trap(); }\n"
    assert load(BUILT + MPI + crash).returncode < 0


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (Output(1, "", "noise\nlibmpi.so.40: cannot open\n"), "libmpi.so.40: cannot open"),
        (Output(-signal.SIGILL), "loading it ends with SIGILL"),
        (Output(None), "it does not load within 60 s"),
        (Output(1), "it does not load"),
    ],
)
def test_the_error_of_a_library_that_does_not_load(output, why):
    assert library_from("torch", "2.13.0", output) == {
        "framework": "torch",
        "built_for": "2.13.0",
        "error": why,
        "controllers": [],
        "operations": [],
        "mpi": None,
    }


def test_changes_between_builds_hide_the_users_values():
    before = {"mpi": "MPICH 4.2.0", "CXXFLAGS": "-DKEY=secret", "gpu": "none"}
    now = {"mpi": "Open MPI 5.0.11", "gpu": "none"}
    assert changes(before, now) == ["mpi: MPICH 4.2.0 -> Open MPI 5.0.11", "CXXFLAGS"]
