"""Facts of a machine without problems; environments and programs with problems."""

import pytest
from prepared import make_environment

GIB = 1024**3
OPEN_MPI = {"flavour": "Open MPI", "version": "5.0.11"}
LAUNCHER = {**OPEN_MPI, "program": "/opt/venv/bin/mpirun", "on_path": True, "_first_line": None}


def library(framework, built_for):
    return {
        "framework": framework,
        "built_for": built_for,
        "error": None,
        "controllers": ["mpi", "gloo"],
        "operations": ["mpi", "gloo"],
        "mpi": OPEN_MPI,
    }


@pytest.fixture
def healthy():
    """Facts of a machine without problems."""
    return {
        "format": 1,
        "hostname": "node1",
        "versions": {
            "python": "3.11.2",
            "hvkit": "0.1.0",
            "torch": "2.13.0",
            "tensorflow": "2.21.0",
            "keras": "3.15.1",
            "numpy": "2.4.6",
            "horovod": "0.28.1+hvkit0",
            "mpi4py": "4.1.2",
        },
        "python": "/opt/venv/bin/python",
        "platform": {
            "system": "Debian GNU/Linux 12",
            "kernel": "Linux 6.1.0",
            "machine": "x86_64",
            "libc": "glibc 2.36",
        },
        "horovod": {
            "version": "0.28.1+hvkit0",
            "libraries": [library("torch", "2.13.0"), library("tensorflow", "2.21.0")],
            "fits": True,
            "differences": [],
        },
        "mpi": LAUNCHER,
        "launchers": [LAUNCHER],
        "compilers": {"c++": "12.2.0", "cmake": "3.31.6", "nvcc": None},
        "cores": {"usable": 8, "host": 8, "limit": None},
        "memory": {"total": 32 * GIB, "available": 30 * GIB},
        "shared_memory": {"size": 16 * GIB, "free": 16 * GIB},
        "gpus": [],
        "driver_cuda": None,
        "torch_cuda": "13.0",
        "ssh": {"client": "OpenSSH_9.2p1", "server": "/usr/sbin/sshd", "running": True},
        "addresses": ["10.0.0.1"],
        "interfaces": [
            {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"},
            {"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24"},
        ],
        "threads": {},
        "environment": [],
        "set_by_ranks": [],
        "limits": {"open_files": 4096, "locked_memory": None},
        "infiniband": False,
        "_tensorflows": ["tensorflow 2.21.0"],
        "_unmet": [],
        "_cannot_build": None,
        "_gpu_failure": None,
        "_launched": None,
        "self_test": None,
    }


@pytest.fixture
def environment(tmp_path):
    """An environment like this one, from which a test may remove parts."""
    return make_environment(tmp_path / "environment")


@pytest.fixture
def program(tmp_path):
    """Write a shell script into the folder ``bin`` of the test; returns its path."""

    def write(name, body):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write
