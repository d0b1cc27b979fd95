"""An empty cache, stand-in programs on PATH, a toolchain, and a machine that wheels may fit."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from scripts import write_program

from hvkit.build import installer
from hvkit.build.frameworks import InstalledFramework
from hvkit.build.horovod_patches import PATCHES, VERSION, patches_digest
from hvkit.build.toolchain import Compiler, Mpi, Toolchain
from hvkit.build.wheels import Abi, Machine
from hvkit.errors import BuildError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """hvkit's cache, empty, and a claim on packages that no other test has."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("hvkit.build.installer.claim_of_environment", lambda: str(tmp_path))
    monkeypatch.setenv("HVKIT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def toolchain(tmp_path):
    """Both frameworks, and an Open MPI of the system."""
    return Toolchain(
        frameworks=(
            InstalledFramework("pytorch", "2.13.0+cpu", tmp_path),
            InstalledFramework("tensorflow", "2.21.0", tmp_path),
        ),
        mpi=Mpi(Path("/opt/mpi/bin/mpicxx"), "Open MPI", "4.1.4", Path("/opt/mpi/lib")),
        compiler=Compiler(("/usr/bin/c++",), "c++ 12.2.0\nCopyright"),
    )


@pytest.fixture
def abi(tmp_path):
    """The facts of a wheel that fits ``toolchain`` and this Python."""
    return Abi(
        horovod=VERSION,
        patches=patches_digest(PATCHES),
        python=str(sysconfig.get_config_var("SOABI")),
        platform="linux_x86_64",
        cpu=(),
        frameworks={"pytorch": "2.13.0", "tensorflow": "2.21.0"},
        mpi="libmpi.so.40",
        search=("/opt/mpi/lib",),
    )


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write shell scripts into the only folder on PATH; returns each one's path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    # The search for mpicxx goes on in the folder of this Python.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python"))
    return lambda name, body="": write_program(folder / name, body)


@pytest.fixture
def machine(toolchain, tmp_path):
    """The machine that ``abi`` fits, with a system's Open MPI."""
    folder = tmp_path / "mpi" / "lib"
    folder.mkdir(parents=True)
    (folder / "libmpi.so.40").touch()
    mpi = Mpi(folder.parent / "bin" / "mpirun", "Open MPI", "5.0.11", folder)
    return Machine(toolchain.frameworks, mpi, None, {"LD_LIBRARY_PATH": str(folder)})


@pytest.fixture
def steps(machine, monkeypatch):
    """What the installer does on ``machine``, where self-tests fail and there is no compiler."""
    taken = []

    def run(command, **options):
        taken.append("self-test")
        return subprocess.CompletedProcess(command, 1, "", "hvkit: undefined symbol")

    def no_compiler(without):
        taken.append("build")
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(installer, "find_launching_mpi", lambda: machine.mpi)
    monkeypatch.setattr(installer, "find_frameworks", lambda _: machine.frameworks)
    monkeypatch.setattr(installer, "cuda_for", lambda *_: None)
    monkeypatch.setattr(installer, "Machine", lambda *_: machine)
    monkeypatch.setattr(installer, "installed_abi", lambda: None)
    monkeypatch.setattr(installer, "install", lambda wheel: taken.append("install"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(installer, "find_toolchain", no_compiler)
    return taken
