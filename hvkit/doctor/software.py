"""Installed Python packages, compilers and MPI launchers. Nothing imports a framework here."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from hvkit.build.cuda import DEFAULT_HOME
from hvkit.build.frameworks import DISTRIBUTIONS, cuda_version
from hvkit.host.commands import run
from hvkit.launch.launchers import MpiVersion, identify

# Packages whose requirements are checked. TensorFlow comes as one of several packages.
_CHECKED = ("hvkit", "torch", "keras", "horovod", *DISTRIBUTIONS["tensorflow"])


@dataclass(frozen=True)
class Packages:
    """The installed packages.

    Attributes:
        versions: by name; ``None`` for a package that is not installed.
        tensorflows: every package that contains TensorFlow, with its version.
        torch_cuda: the CUDA version that PyTorch was built for; ``None`` for its CPU version.
        unmet: requirements that are not met.
    """

    versions: dict[str, str | None]
    tensorflows: tuple[str, ...]
    torch_cuda: str | None
    unmet: tuple[Unmet, ...]


@dataclass(frozen=True)
class Unmet:
    """A requirement that is not met.

    Attributes:
        package: the package that requires it, with its version.
        requirement: ``keras>=3.12``.
        installed: the installed version; ``None`` for none.
    """

    package: str
    requirement: str
    installed: str | None


@dataclass(frozen=True)
class MpiLauncher:
    """An ``mpirun`` or ``mpiexec``.

    Attributes:
        mpi: the MPI that it belongs to; ``None`` if its ``--version`` does not show that.
        program: its path.
        on_path: whether it is on PATH; otherwise it is beside this Python.
        first_line: the first line of its ``--version``, if that does not show the MPI.
    """

    mpi: MpiVersion | None
    program: str
    on_path: bool
    first_line: str | None = None

    @property
    def folder(self) -> str:
        """The folder of the program."""
        return os.path.dirname(self.program)


def packages() -> Packages:
    """The packages of this Python, from their metadata."""
    found = {name: _version(name) for name in _CHECKED}
    tensorflows = {n: v for n in DISTRIBUTIONS["tensorflow"] if (v := found[n]) is not None}
    torch = folder_of("torch")
    return Packages(
        versions={
            "python": platform.python_version(),
            "hvkit": found["hvkit"],
            "torch": found["torch"],
            "tensorflow": next(iter(tensorflows.values()), None),
            "keras": found["keras"],
            "numpy": _version("numpy"),
            "horovod": found["horovod"],
            "mpi4py": _version("mpi4py"),
        },
        tensorflows=tuple(f"{name} {version}" for name, version in tensorflows.items()),
        torch_cuda=cuda_version("pytorch", torch.parent) if torch else None,
        unmet=tuple(unmet for name in _CHECKED if found[name] for unmet in _unmet(name)),
    )


def folder_of(module: str) -> Path | None:
    """The folder of a top-level package, without importing it."""
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def compilers() -> dict[str, str | None]:
    """Versions of the C++ compiler, CMake and NVIDIA's compiler; ``None`` for a missing one."""
    return {
        "c++": _first_version(["c++"], ["g++"], ["clang++"]),
        "cmake": _first_version(["cmake"]),
        "nvcc": _first_version(["nvcc"], [f"{DEFAULT_HOME}/bin/nvcc"]),
    }


def mpi_launchers_here() -> tuple[MpiLauncher, ...]:
    """The launchers on this process's PATH and beside its Python."""
    return mpi_launchers(os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable))


def mpi_launchers(path: str, beside: str) -> tuple[MpiLauncher, ...]:
    """The launchers of each MPI, in the order of PATH; one for each MPI in a folder.

    Args:
        path: PATH.
        beside: the folder to search after those of PATH.
    """
    folders = [folder for folder in path.split(os.pathsep) if folder]
    found: dict[tuple[str, MpiVersion | None], MpiLauncher] = {}
    for folder in [*folders, beside]:
        for program in _launchers_in(folder):
            text = output.text if (output := run([program, "--version"])) else ""
            mpi = identify(text)
            first_line = None if mpi else next(iter(text.splitlines()), "nothing")
            launcher = MpiLauncher(mpi, program, folder in folders, first_line)
            found.setdefault((os.path.realpath(folder), mpi), launcher)
    return tuple(found.values())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(name: str) -> list[Unmet]:
    unmet = []
    for text in metadata.requires(name) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            # Metadata of old packages has requirements in forms that were valid once.
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            unmet.append(Unmet(f"{name} {_version(name)}", needed, installed))
    return unmet


def _first_version(*commands: Sequence[str]) -> str | None:
    for command in commands:
        output = run([*command, "--version"])
        if output and output.status == 0:
            # Distributions put their own version in brackets before the compiler's.
            text = re.sub(r"\(.*?\)", "", output.text)
            match = re.search(r"(?:release|version) (\d[\d.]*)|\b(\d+\.\d+[\d.]*)", text)
            return match[1] or match[2] if match else "?"
    return None


def _launchers_in(folder: str) -> Iterable[str]:
    for name in ("mpirun", "mpiexec"):
        if program := shutil.which(name, path=folder):
            yield program
