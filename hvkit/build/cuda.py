"""Chooses whether to build Horovod for NCCL, and with which CUDA toolkit.

The toolkit must have the CUDA version of the framework. It is the system's, or one that hvkit
assembles in its cache from the wheels that NVIDIA publishes.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hvkit.build.build_output import announce, run_pip
from hvkit.build.frameworks import InstalledFramework
from hvkit.errors import BuildError
from hvkit.host.system import cache_dir, run

T = TypeVar("T")

CHOICES = ("auto", "none", "nccl")
DEFAULT_HOME = "/usr/local/cuda"

# The parts of a toolkit that compiling takes. NVIDIA's wheels for CUDA 12 and older have no nvcc.
_WHEELS = (
    *("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"),
    *("nvidia-cuda-runtime", "nvidia-cuda-cccl"),
)
_FIRST_WITH_NVCC = 13
_HOMES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
# Runs in a process of its own, because a started driver stays in its process.
_COUNT_GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print("GPUs:", count.value)
"""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit."""

    home: Path  # the folder that contains ``bin/nvcc``
    version: str  # its major and minor version, ``13.0``

    @property
    def missing(self) -> list[str]:
        """The files that Horovod's build needs and this toolkit lacks."""
        targets = sorted(self.home.glob("targets/*"))
        roots = (self.home, *targets)
        # The linker's search path, as nvcc sets it.
        libraries = [self.home / "lib64", *(target / "lib" for target in targets)]
        wanted = {
            "nvcc": [self.home / "bin"],
            "cuda_runtime.h": [root / "include" for root in roots],
            "libcudart.so": libraries,
            "libcudart_static.a": libraries,
        }
        return [
            name
            for name, folders in wanted.items()
            if not any((folder / name).exists() for folder in folders)
        ]

    def __str__(self) -> str:
        origin = "NVIDIA's wheels" if _is_assembled(self) else str(self.home)
        return f"CUDA {self.version} ({origin})"


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this process can use an NVIDIA GPU.

    ``/proc/driver/nvidia`` is no evidence: containers without access to the GPUs see it too.
    """
    listed = run(["nvidia-smi", "-L"], timeout=60)
    if listed and re.search(r"^GPU \d+:", listed.stdout, re.MULTILINE):
        return True
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in devices.glob("nvidia*")):
        return True
    counted = run([sys.executable, "-I", "-c", _COUNT_GPUS], timeout=60)
    return counted is not None and re.search(r"^GPUs: [1-9]", counted.stdout, re.M) is not None


def toolkit_for(
    choice: str, frameworks: Sequence[InstalledFramework], environ: Mapping[str, str] = os.environ
) -> Toolkit | None:
    """The toolkit for a build for NCCL; ``None`` for a build without GPUs. See ``cuda_for``.

    Call ``fetch_toolkit`` before using it.
    """
    version = cuda_for(choice, frameworks, environ)
    if version is None:
        return None
    return _if_possible(choice, environ, lambda: toolkit_of(version, environ))


def cuda_for(
    choice: str, frameworks: Sequence[InstalledFramework], environ: Mapping[str, str] = os.environ
) -> str | None:
    """The CUDA version that Horovod should support here; ``None`` for none.

    ``choice`` is one of ``CHOICES``: ``auto`` prints why a GPU cannot be used, ``nccl`` raises it,
    and ``HOROVOD_GPU_OPERATIONS=NCCL`` turns ``auto`` into ``nccl``.
    """
    if choice == "none":
        return None
    if choice == "auto" and not _requires_nccl(environ) and not has_nvidia_gpu():
        return None
    return _if_possible(choice, environ, lambda: _cuda_version(frameworks))


def _if_possible(choice: str, environ: Mapping[str, str], find: Callable[[], T]) -> T | None:
    try:
        return find()
    except BuildError as error:
        if choice == "nccl" or _requires_nccl(environ):
            raise BuildError(f"a build for NCCL is not possible: {error}") from None
        announce(
            f"there is a GPU, but this build is without NCCL: {error}. Until then, reductions of "
            "GPU tensors go through the host's memory"
        )
        return None


def toolkit_of(version: str, environ: Mapping[str, str] = os.environ) -> Toolkit:
    """The toolkit for a CUDA version.

    In order: the system's of this version, one from NVIDIA's wheels, the system's of this major
    version.
    """
    found = list(system_toolkits(environ))
    complete = [toolkit for toolkit in found if not toolkit.missing]
    of_major = [each for each in complete if _major(each.version) == _major(version)]
    if exact := [each for each in of_major if each.version == version]:
        return exact[0]
    if _major(version) >= _FIRST_WITH_NVCC:
        return Toolkit(_cached(version), version)
    if of_major:
        return of_major[0]
    seen = "; ".join(
        f"CUDA {each.version} in {each.home} "
        + (f"has no {', '.join(each.missing)}" if each.missing else "is another version")
        for each in found
    )
    raise BuildError(
        f"there is no toolkit for CUDA {version} ({seen or 'no nvcc at all'}). Install CUDA "
        f"{version} and set CUDA_HOME to its folder, or install a PyTorch for CUDA "
        f"{_FIRST_WITH_NVCC} or newer, for which hvkit downloads the toolkit itself"
    )


def system_toolkits(environ: Mapping[str, str] = os.environ) -> Iterator[Toolkit]:
    """This machine's toolkits, complete or not; first the ones that the user's variables name."""
    named = [f"{environ[name]}/bin/nvcc" for name in _HOMES if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    versions = sorted(map(str, Path(DEFAULT_HOME).parent.glob("cuda-*/bin/nvcc")), reverse=True)
    homes = set()
    for command in [*named, on_path, f"{DEFAULT_HOME}/bin/nvcc", *versions]:
        toolkit = read_toolkit(command) if command else None
        if toolkit and toolkit.home not in homes:
            homes.add(toolkit.home)
            yield toolkit


def read_toolkit(nvcc: str) -> Toolkit | None:
    """The toolkit that an nvcc belongs to; ``None`` if the command is not nvcc.

    The command may be a script or a link in any folder. If the folder above is not a toolkit, the
    output of ``nvcc --dryrun`` names the right one.
    """
    version = run([nvcc, "--version"], timeout=60)
    release = re.search(r"release (\d+\.\d+)", version.stdout) if version else None
    if release is None:
        return None
    above = Toolkit(Path(nvcc).parent.parent.resolve(), release[1])
    if not above.missing:
        return above
    tried = run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], timeout=60)
    top = re.search(r"^#\$ TOP=(.+)$", tried.text, re.MULTILINE) if tried else None
    return Toolkit(Path(top[1].strip()).resolve(), release[1]) if top else above


def fetch_toolkit(toolkit: Toolkit) -> None:
    """Assemble a toolkit from NVIDIA's wheels in the cache, unless it is a system's or exists."""
    if not _is_assembled(toolkit) or not toolkit.missing:
        return
    announce(f"downloading NVIDIA's compiler for CUDA {toolkit.version}, about 100 MB")
    toolkit.home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=toolkit.home.parent) as folder:
        requirements = [f"{wheel}=={toolkit.version}.*" for wheel in _WHEELS]
        run_pip(
            ["install", "--target", folder, "--no-deps", "--only-binary", ":all:", *requirements],
            summary=f"fetching NVIDIA's compiler for CUDA {toolkit.version} failed",
        )
        fresh = complete_wheels(Path(folder))
        # Another build may have assembled it meanwhile, and be using it.
        if toolkit.missing:
            shutil.rmtree(toolkit.home, ignore_errors=True)
            os.replace(fresh, toolkit.home)
    if toolkit.missing:
        raise BuildError(
            f"NVIDIA's wheels for CUDA {toolkit.version} have no {', '.join(toolkit.missing)}. "
            f"Install CUDA {toolkit.version} and set CUDA_HOME to its folder"
        )


def complete_wheels(unpacked: Path) -> Path:
    """Make a toolkit of NVIDIA's unpacked wheels, and return its folder.

    The wheels contain libraries for running programs. The linker needs them under their plain
    names, in ``lib64``.
    """
    home = next(unpacked.glob("nvidia/cu[0-9]*"), None)
    if home is None:
        raise BuildError("NVIDIA's wheels have an unknown layout: no folder nvidia/cu[0-9]*")
    for library in (home / "lib").glob("*.so.*"):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    return home


def _cuda_version(frameworks: Sequence[InstalledFramework]) -> str:
    """The CUDA version to build for: PyTorch's if installed, whose headers include CUDA's."""
    for framework in frameworks:
        if framework.name == "pytorch" and framework.cuda is None:
            raise BuildError(
                f"{framework} is a build for CPUs. Install PyTorch's build for CUDA, or leave "
                "PyTorch out with `--without pytorch`"
            )
    known = [version for each in frameworks if (version := each.cuda)]
    if not known:
        raise BuildError(
            f"{' and '.join(map(str, frameworks))} cannot use GPUs. Install a build for CUDA: "
            "`pip install torch` or `pip install 'tensorflow[and-cuda]'`"
        )
    return known[0]


def _requires_nccl(environ: Mapping[str, str]) -> bool:
    """Whether Horovod's own variables require a build for NCCL."""
    given = {n: value for n, value in environ.items() if n.startswith("HOROVOD_GPU") and value}
    for name, value in given.items():
        if value not in ("NCCL", "CUDA"):
            raise BuildError(
                f"{name}={value} in the environment: hvkit builds Horovod for NCCL or without "
                "GPUs. Unset the variable, or choose with `--gpu nccl` or `--gpu none`"
            )
    return "NCCL" in given.values()


def _cached(version: str) -> Path:
    return cache_dir() / "cuda" / version


def _is_assembled(toolkit: Toolkit) -> bool:
    return toolkit.home == _cached(toolkit.version)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
