"""Facts of a machine without problems; environments and programs with problems."""

from collections.abc import Callable
from pathlib import Path

import pytest
from prepared import Environment, make_environment

from hvkit.doctor.facts import Cores, Facts, Limits, Memory, SharedMemory, Ssh, System
from hvkit.doctor.horovod import Horovod, Library
from hvkit.doctor.software import MpiLauncher, Packages
from hvkit.host.gpus import Gpus
from hvkit.host.network import Interface
from hvkit.launch.launchers import MpiVersion

GIB = 1024**3
OPEN_MPI = MpiVersion("Open MPI", "5.0.11")


@pytest.fixture
def healthy() -> Facts:
    """Facts of a machine without problems."""
    return Facts(
        hostname="node1",
        python="/opt/venv/bin/python",
        system=System("Debian GNU/Linux 12", "Linux 6.1.0", "x86_64", "glibc 2.36"),
        packages=Packages(
            versions={
                "python": "3.11.2",
                "hvkit": "0.1.0",
                "torch": "2.13.0",
                "tensorflow": "2.21.0",
                "keras": "3.15.1",
                "numpy": "2.4.6",
                "horovod": "0.28.1+hvkit0",
                "mpi4py": "4.1.2",
            },
            tensorflows=("tensorflow 2.21.0",),
            torch_cuda="13.0",
            unmet=(),
        ),
        horovod=Horovod(
            version="0.28.1+hvkit0",
            libraries=(
                Library("torch", "2.13.0", None, ("mpi", "gloo"), ("mpi", "gloo"), OPEN_MPI),
                Library("tensorflow", "2.21.0", None, ("mpi", "gloo"), ("mpi", "gloo"), OPEN_MPI),
            ),
            fits=True,
            differences=(),
            cannot_build=None,
        ),
        launchers=(MpiLauncher(OPEN_MPI, "/opt/venv/bin/mpirun", True),),
        compilers={"c++": "12.2.0", "cmake": "3.31.6", "nvcc": None},
        cores=Cores(8, 8, None),
        memory=Memory(32 * GIB, 30 * GIB),
        shared_memory=SharedMemory(16 * GIB, 16 * GIB),
        limits=Limits(4096, None, False),
        gpus=Gpus((), None, None),
        addresses=("10.0.0.1",),
        interfaces=(
            Interface("lo", "127.0.0.1", "127.0.0.0/8"),
            Interface("eth0", "10.0.0.1", "10.0.0.0/24"),
        ),
        ssh=Ssh("OpenSSH_9.2p1", "/usr/sbin/sshd", True),
        threads={},
        environment=(),
        set_by_ranks=(),
        launched=None,
    )


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment like this one, from which a test may remove parts."""
    return make_environment(tmp_path / "environment")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a shell script into the folder ``bin`` of the test; returns its path."""

    def write(name: str, body: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write
