"""What Horovod is built with and for on this machine."""

import os
import shlex
import shutil
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hvkit.build.cuda import Toolkit
from hvkit.build.frameworks import Framework, find_frameworks
from hvkit.build.mpi import Mpi, find_mpi
from hvkit.build.process import output_of
from hvkit.errors import BuildError


@dataclass(frozen=True)
class Compiler:
    """A compiler: the command that runs it, and what its ``--version`` says."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Toolchain:
    """Everything found on this machine that goes into the binary.

    Attributes:
        frameworks: what Horovod is built for.
        mpi: what it is linked with.
        compiler: the C++ compiler.
        cuda: the CUDA toolkit for a build for NCCL; ``None`` for one without GPUs.
    """

    frameworks: tuple[Framework, ...]
    mpi: Mpi
    compiler: Compiler
    cuda: Toolkit | None = None

    def framework(self, name: str) -> Framework | None:
        """The framework of that name, if Horovod is built for it."""
        return next((found for found in self.frameworks if found.name == name), None)

    def __str__(self) -> str:
        nccl = [f"NCCL with {self.cuda}"] if self.cuda else []
        return ", ".join([*map(str, self.frameworks), str(self.mpi), *nccl])


def find_toolchain(without: Collection[str] = ()) -> Toolchain:
    """Look for the frameworks, MPI and the C++ compiler; ``cuda`` is left for the caller.

    Raises:
        BuildError: one of them is missing; the message says how to get it.
    """
    frameworks = find_frameworks(without)
    compiler = _find_compiler()
    if shutil.which("make") is None:
        raise BuildError(
            "no make on PATH. Install it (Debian and Ubuntu: `apt install make`; Fedora: "
            "`dnf install make`)"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise BuildError(
            f"the C headers of this Python are missing: no Python.h in {headers}. Install them "
            "(Debian and Ubuntu: `apt install python3-dev`; Fedora: `dnf install python3-devel`)"
        )
    return Toolchain(frameworks, find_mpi(), compiler)


def _find_compiler() -> Compiler:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if compiler := _compiler(command):
            return compiler
    what = f"CXX names {shlex.join(chosen)!r}, which does not run" if chosen else "none on PATH"
    raise BuildError(
        f"no C++ compiler: {what}. Install g++ 9 or newer (Debian and Ubuntu: "
        "`apt install g++`; Fedora: `dnf install gcc-c++`), or name one in CXX"
    )


def _compiler(command: list[str]) -> Compiler | None:
    path = shutil.which(command[0])
    version = output_of([path, *command[1:], "--version"]) if path else None
    if path is None or version is None:
        return None
    return Compiler((path, *command[1:]), version)
