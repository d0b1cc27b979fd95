"""Installed Python packages, compilers and MPI launchers. Nothing imports a framework here."""

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from hvkit.build.cuda import DEFAULT_HOME
from hvkit.build.frameworks import DISTRIBUTIONS, cuda_version
from hvkit.host.commands import run
from hvkit.launching.launchers import identify

# Packages whose requirements are checked. TensorFlow comes as one of several packages.
_CHECKED = ("hvkit", "torch", "keras", "horovod", *DISTRIBUTIONS["tensorflow"])


def versions() -> dict[str, str | None]:
    """Versions of Python and of packages; ``None`` for a package that is not installed."""
    names = ("hvkit", "torch", "tensorflow", "keras", "numpy", "horovod", "mpi4py")
    found = {name: _version(name) for name in names}
    found["tensorflow"] = next((one.split()[1] for one in tensorflows()), None)
    return {"python": platform.python_version(), **found}


def tensorflows() -> list[str]:
    """Every package that contains TensorFlow, with its version."""
    found = {name: _version(name) for name in DISTRIBUTIONS["tensorflow"]}
    return [f"{name} {version}" for name, version in found.items() if version is not None]


def torch_cuda() -> str | None:
    """The CUDA version that PyTorch was built for; ``None`` for its CPU version."""
    torch = folder_of("torch")
    return cuda_version("pytorch", torch.parent) if torch else None


def unmet_requirements() -> list[dict[str, str | None]]:
    """The requirements that are not met.

    Each has the ``package`` that requires it, with its version; the ``requirement``,
    ``keras>=3.12``; and the version ``installed``, ``None`` for none.
    """
    return [unmet for name in _CHECKED if _version(name) for unmet in _unmet(name)]


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


def mpi_launchers_here() -> list[dict[str, Any]]:
    """The launchers on this process's PATH and in the folder of its Python."""
    return mpi_launchers(os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable))


def mpi_launchers(path: str, last: str) -> list[dict[str, Any]]:
    """The launchers of each MPI, in the order of PATH; one for each MPI in a folder.

    Args:
        path: PATH.
        last: the folder to search after those of PATH.
    """
    folders = [folder for folder in path.split(os.pathsep) if folder]
    found: dict[object, dict[str, Any]] = {}
    for folder in [*folders, last]:
        for program in _launchers_in(folder):
            text = output.text if (output := run([program, "--version"])) else ""
            mpi = identify(text)
            launcher = {
                "flavour": mpi.flavour if mpi else None,
                "version": mpi.version if mpi else None,
                "program": program,
                "on_path": folder in folders,
                "_first_line": None if mpi else next(iter(text.splitlines()), "nothing"),
            }
            found.setdefault((os.path.realpath(folder), mpi), launcher)
    return list(found.values())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(name: str) -> Iterable[dict[str, str | None]]:
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
            yield {
                "package": f"{name} {_version(name)}",
                "requirement": f"{requirement.name}{requirement.specifier}",
                "installed": installed,
            }


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
