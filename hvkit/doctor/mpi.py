"""The MPIs whose launchers are found."""

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from hvkit.host.commands import ask
from hvkit.launch.launchers import MpiVersion, identify


@dataclass(frozen=True)
class MpiLauncher:
    """An ``mpirun`` or ``mpiexec``.

    Attributes:
        mpi: whose it is; ``None`` if it does not say.
        program: where it is.
        on_path: whether PATH leads to it; otherwise it is beside this Python.
        complaint: the first line of what it says instead of whose it is.
    """

    mpi: MpiVersion | None
    program: str
    on_path: bool
    complaint: str | None = None

    @property
    def folder(self) -> str:
        """Where it is."""
        return os.path.dirname(self.program)


def mpi_launchers(path: str, beside: str) -> tuple[MpiLauncher, ...]:
    """The launchers of each MPI, in the order in which they are found; one of each folder.

    Args:
        path: PATH.
        beside: the folder to look in after those of PATH.
    """
    folders = [folder for folder in path.split(os.pathsep) if folder]
    found: dict[tuple[str, MpiVersion | None], MpiLauncher] = {}
    for folder in [*folders, beside]:
        for program in _programs(folder):
            text = said.text if (said := ask([program, "--version"])) else ""
            mpi = identify(text)
            complaint = None if mpi else next(iter(text.splitlines()), "nothing")
            launcher = MpiLauncher(mpi, program, folder in folders, complaint)
            found.setdefault((os.path.realpath(folder), mpi), launcher)
    return tuple(found.values())


def launchers_here() -> tuple[MpiLauncher, ...]:
    """The launchers on this process's PATH and beside its Python."""
    return mpi_launchers(os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable))


def _programs(folder: str) -> Iterable[str]:
    for name in ("mpirun", "mpiexec"):
        if program := shutil.which(name, path=folder):
            yield program
