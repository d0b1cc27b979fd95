"""NVIDIA's GPUs and CUDA toolkits: whether Horovod is built for NCCL, and with which toolkit.

Horovod's CUDA kernels are compiled with the toolkit of the framework's own CUDA version: the
system's, or one put together in hvkit's cache from the wheels that NVIDIA publishes.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvkit.build.frameworks import Framework
from hvkit.build.process import run_pip
from hvkit.build.progress import say
from hvkit.errors import BuildError
from hvkit.host.cache import cache_dir
from hvkit.host.commands import ask

CHOICES = ("auto", "none", "nccl")
DEFAULT_HOME = "/usr/local/cuda"

# What compiling CUDA code takes. NVIDIA's wheels for CUDA 12 and older have no nvcc.
_WHEELS = (
    *("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"),
    *("nvidia-cuda-runtime", "nvidia-cuda-cccl"),
)
_FIRST_WITH_NVCC = 13
_HOMES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
# In a process of its own: the driver, once started, stays in the process that started it.
_COUNT_GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print("GPUs:", count.value)
"""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Attributes:
        home: the folder that holds ``bin/nvcc``.
        version: its major and minor version, ``13.0``.
    """

    home: Path
    version: str

    @property
    def nvcc(self) -> Path:
        """The compiler itself, not a script that calls it."""
        return self.home / "bin" / "nvcc"

    @property
    def missing(self) -> list[str]:
        """Those of the files that Horovod is compiled and linked with that are not there."""
        targets = sorted(self.home.glob("targets/*"))
        roots = (self.home, *targets)
        # Where nvcc has the linker look.
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
        place = "NVIDIA's wheels" if _is_ours(self) else str(self.home)
        return f"CUDA {self.version} ({place})"


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether programs here can use a GPU of NVIDIA's.

    ``/proc/driver/nvidia`` is not looked at: containers that may not use the GPUs see it too.
    """
    listed = ask(["nvidia-smi", "-L"], timeout=60)
    if listed and re.search(r"^GPU \d+:", listed.stdout, re.MULTILINE):
        return True
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in devices.glob("nvidia*")):
        return True
    counted = ask([sys.executable, "-I", "-c", _COUNT_GPUS], timeout=60)
    return counted is not None and re.search(r"^GPUs: [1-9]", counted.stdout, re.M) is not None


def toolkit_for(
    choice: str, frameworks: Sequence[Framework], environ: Mapping[str, str] = os.environ
) -> Toolkit | None:
    """The toolkit to build for NCCL with; ``None`` for a build without GPUs.

    The toolkit may have to be fetched first: see :func:`ensure`.

    Args:
        choice: ``auto`` builds for NCCL where there is a GPU and it can be done, and says why where
            it cannot; ``nccl`` insists; ``none`` does without.
        frameworks: what Horovod is built for.
        environ: the environment; ``HOROVOD_GPU_OPERATIONS=NCCL`` makes ``nccl`` of ``auto``.

    Raises:
        BuildError: NCCL was insisted on and cannot be had, or the environment demands another
            build for GPUs.
    """
    if choice == "none" or (choice == "auto" and not _demanded(environ) and not has_nvidia_gpu()):
        return None
    try:
        return toolkit_of(_cuda_version(frameworks), environ)
    except BuildError as error:
        if choice == "nccl" or _demanded(environ):
            raise BuildError(f"a build for NCCL is not possible: {error}") from None
        say(
            f"there is a GPU, but Horovod is built without NCCL: {error}. Until then, what GPUs "
            "reduce goes through the host's memory"
        )
        return None


def toolkit_of(version: str, environ: Mapping[str, str] = os.environ) -> Toolkit:
    """The toolkit for a CUDA version: the system's, one of wheels, or a near one of the system.

    Args:
        version: major and minor version, ``13.0``.
        environ: the environment, of which the folders of toolkits and PATH are read.

    Raises:
        BuildError: there is none, and NVIDIA has no wheels of that version.
    """
    found = list(system_toolkits(environ))
    whole = [toolkit for toolkit in found if not toolkit.missing]
    for toolkit in whole:
        if toolkit.version == version:
            return toolkit
    if _major(version) >= _FIRST_WITH_NVCC:
        return Toolkit(_cached(version), version)
    for toolkit in whole:
        if _major(toolkit.version) == _major(version):
            return toolkit
    faults = {
        toolkit: f"has no {', '.join(toolkit.missing)}" if toolkit.missing else "is another version"
        for toolkit in found
    }
    seen = "; ".join(f"CUDA {one.version} in {one.home} {fault}" for one, fault in faults.items())
    raise BuildError(
        f"there is no toolkit for CUDA {version} ({seen or 'no nvcc at all'}). Install CUDA "
        f"{version} and set CUDA_HOME to its folder, or install a PyTorch for CUDA "
        f"{_FIRST_WITH_NVCC} or newer, for which hvkit fetches the toolkit itself"
    )


def system_toolkits(environ: Mapping[str, str] = os.environ) -> Iterator[Toolkit]:
    """The toolkits of this machine, whole or not, those that the user names first."""
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
    """The toolkit of an nvcc; ``None`` if that is not one.

    The command may be a script or a link anywhere: where the folder above its own is no toolkit,
    nvcc itself says where it is.
    """
    version = ask([nvcc, "--version"], timeout=60)
    release = re.search(r"release (\d+\.\d+)", version.stdout) if version else None
    if release is None:
        return None
    above = Toolkit(Path(nvcc).parent.parent.resolve(), release[1])
    if not above.missing:
        return above
    tried = ask([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], timeout=60)
    top = re.search(r"^#\$ TOP=(.+)$", tried.text, re.MULTILINE) if tried else None
    return Toolkit(Path(top[1].strip()).resolve(), release[1]) if top else above


def ensure(toolkit: Toolkit) -> None:
    """Fetch a toolkit of NVIDIA's wheels into the cache, if it is not there yet.

    Raises:
        BuildError: pip cannot fetch it.
    """
    if not _is_ours(toolkit) or not toolkit.missing:
        return
    say(f"fetching NVIDIA's compiler for CUDA {toolkit.version}, about 100 MB")
    toolkit.home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=toolkit.home.parent) as folder:
        requirements = [f"{wheel}=={toolkit.version}.*" for wheel in _WHEELS]
        run_pip(
            ["install", "--target", folder, "--no-deps", "--only-binary", ":all:", *requirements],
            doing=f"fetching NVIDIA's compiler for CUDA {toolkit.version} failed",
        )
        fresh = put_together(Path(folder))
        # Another build may have brought it meanwhile, and be using it.
        if toolkit.missing:
            shutil.rmtree(toolkit.home, ignore_errors=True)
            os.replace(fresh, toolkit.home)
    if toolkit.missing:
        raise BuildError(
            f"NVIDIA's wheels for CUDA {toolkit.version} have no {', '.join(toolkit.missing)}. "
            f"Install CUDA {toolkit.version} and set CUDA_HOME to its folder"
        )


def put_together(unpacked: Path) -> Path:
    """Complete the toolkit that NVIDIA's wheels unpack to, and return its folder.

    The wheels hold what programs run with. Linking needs the libraries under their plain names,
    and looks in ``lib64``.
    """
    home = next(unpacked.glob("nvidia/cu[0-9]*"), None)
    if home is None:
        raise BuildError("NVIDIA's wheels have an unknown form: no folder nvidia/cu[0-9]*")
    for library in (home / "lib").glob("*.so.*"):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    return home


def _cuda_version(frameworks: Sequence[Framework]) -> str:
    """The CUDA version to build for: PyTorch's, as only PyTorch's headers include CUDA's."""
    versions = {framework: framework.cuda for framework in frameworks}
    for framework, version in versions.items():
        if version is None and framework.name == "pytorch":
            raise BuildError(
                f"{framework} is a build for CPUs. Install PyTorch's build for CUDA, or leave it "
                "out with `--without pytorch`"
            )
    known = [version for version in versions.values() if version]
    if not known:
        raise BuildError(
            f"{' and '.join(map(str, frameworks))} cannot use GPUs. Install a build for CUDA: "
            "`pip install torch` or `pip install 'tensorflow[and-cuda]'`"
        )
    return known[0]


def _demanded(environ: Mapping[str, str]) -> bool:
    """Whether Horovod's own variables demand a build for NCCL.

    Raises:
        BuildError: they demand another one.
    """
    demands = {
        name: value
        for name, value in environ.items()
        if name.startswith("HOROVOD_GPU") and value and value not in ("NCCL", "CUDA")
    }
    for name, value in demands.items():
        raise BuildError(
            f"{name}={value} in the environment: hvkit builds Horovod for NCCL or without GPUs. "
            "Unset it, or choose with `--gpu nccl` or `--gpu none`"
        )
    return any(environ.get(name) == "NCCL" for name in environ if name.startswith("HOROVOD_GPU"))


def _cached(version: str) -> Path:
    return cache_dir() / "cuda" / version


def _is_ours(toolkit: Toolkit) -> bool:
    return toolkit.home == _cached(toolkit.version)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
