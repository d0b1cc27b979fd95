"""The environment variables that Horovod's build reads."""

import os
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hvkit.build.cuda import Toolkit
from hvkit.build.frameworks import NAMES
from hvkit.build.toolchain import Toolchain, rpath_of

# The user's own variables that change the binary; the build inherits them.
_BUILD_VARIABLES = {
    *("CXXFLAGS", "CFLAGS", "LDFLAGS", "CUDAFLAGS", "HOROVOD_DEBUG"),
    *("CCL_ROOT", "CCL_CONFIGURATION", "HOROVOD_CPU_OPERATIONS", "HOROVOD_SKIP_COMPILE"),
    *("HOROVOD_WITHOUT_GLOO", "HOROVOD_WITH_NVTX", "HOROVOD_WITHOUT_NVTX"),
}
_BUILD_PREFIXES = tuple(f"HOROVOD_{part}" for part in ("BUILD_", "NCCL_"))
_NCCL_PLACES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")


def user_build_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's own variables that change the binary."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _BUILD_VARIABLES or name.startswith(_BUILD_PREFIXES)
    }


def run_time_paths(toolchain: Toolchain, environ: Mapping[str, str]) -> list[str]:
    """The folders where Horovod's libraries look for MPI and NCCL at run time."""
    paths = [rpath_of(toolchain.mpi)]
    if home := environ.get("HOROVOD_NCCL_HOME"):
        paths.append(f"{home}/lib")
    paths.append(environ.get("HOROVOD_NCCL_LIB"))
    if wheel := _nccl_wheel(toolchain.cuda, environ):
        origin = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
        paths.append(f"$ORIGIN/{os.path.relpath(wheel / 'lib', origin)}")
    return [path for path in paths if path]


def build_environment(toolchain: Toolchain, jobs: int, cmake: str, scratch: Path) -> dict[str, str]:
    """The whole environment of ``setup.py bdist_wheel``.

    Args:
        toolchain: the compiler, MPI and frameworks to build with.
        jobs: files compiled at once.
        cmake: the CMake command.
        scratch: an empty folder that outlives the build.
    """
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
    if toolchain.cuda:
        environ.update(_cuda_environment(toolchain.cuda, environ["PATH"]))
    elif "HOROVOD_WITH_NVTX" not in environ:
        # Horovod would use it wherever a toolkit's headers are.
        environ["HOROVOD_WITHOUT_NVTX"] = "1"
    if wheel := _nccl_wheel(toolchain.cuda, environ):
        environ.update(_linkable_nccl(wheel, scratch))
    return environ


def _cuda_environment(cuda: Toolkit, path: str) -> dict[str, str]:
    """Variables that make CMake, PyTorch and Horovod's own scripts use this toolkit."""
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        # For Horovod's CMake files, PyTorch, and CMake's own search.
        **dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"), str(cuda.home)),
        # Horovod builds for the architectures of the first nvcc on PATH.
        "PATH": os.pathsep.join([str(cuda.home / "bin"), path]),
    }


def _nccl_wheel(cuda: Toolkit | None, environ: Mapping[str, str]) -> Path | None:
    """The folder of NCCL in NVIDIA's wheel, which PyTorch's builds for CUDA require.

    ``None`` if the build needs no NCCL, the user's variables name another one, or the wheel is not
    installed.
    """
    if cuda is None or any(name in environ for name in _NCCL_PLACES):
        return None
    try:
        found = metadata.distribution(f"nvidia-nccl-cu{cuda.version.partition('.')[0]}")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file("nvidia/nccl")))


def _linkable_nccl(wheel: Path, scratch: Path) -> dict[str, str]:
    """Variables for linking with NCCL's wheel, which has libnccl.so.2 but not libnccl.so."""
    library = scratch / "libnccl.so"
    library.symlink_to(wheel / "lib" / "libnccl.so.2")
    return {
        "HOROVOD_NCCL_INCLUDE": str(wheel / "include"),
        "HOROVOD_NCCL_LIB": str(scratch),
        "HOROVOD_NCCL_LINK": "SHARED",
    }
