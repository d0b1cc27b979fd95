"""Facts of a machine without problems, and of others."""

import copy

GIB = 1024**3
OPEN_MPI = {"flavour": "Open MPI", "version": "5.0.11"}
LAUNCHER = {**OPEN_MPI, "program": "/opt/venv/bin/mpirun", "on_path": True, "_first_line": None}
NO_SSH = {"client": None, "server": None, "running": False}


def library(framework="torch", **values):
    """A library of Horovod's."""
    version = {"torch": "2.13.0", "tensorflow": "2.21.0"}[framework]
    both = ["mpi", "gloo"]
    loaded = {"error": None, "controllers": both, "operations": both, "mpi": OPEN_MPI}
    return {"framework": framework, "built_for": version, **loaded, **values}


_HEALTHY = {
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
        "libraries": [library("torch"), library("tensorflow")],
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


def machine(**changes):
    """A machine without problems but for these; what is nested changes in part."""
    facts = copy.deepcopy(_HEALTHY)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(facts[name], dict)
        facts[name] = {**facts[name], **value} if nested else value
    return facts
