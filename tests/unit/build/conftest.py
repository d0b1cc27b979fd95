"""An empty cache, stand-in programs on PATH, and a toolchain."""

import sys
import sysconfig
from pathlib import Path

import pytest

from hvkit.build.abi import Abi
from hvkit.build.frameworks import Framework
from hvkit.build.horovod_patches import PATCHES, VERSION, patches_digest
from hvkit.build.toolchain import Compiler, Mpi, Toolchain


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
            Framework("pytorch", "2.13.0+cpu", tmp_path),
            Framework("tensorflow", "2.21.0", tmp_path),
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

    def write(name, body=""):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write
