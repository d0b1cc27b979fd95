"""The GPUs of this host, as NVIDIA's driver reports them, and which of them a rank takes."""

import csv
import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from hvkit.errors import LaunchError
from hvkit.host.commands import run

_MIB = 1024**2
_QUERY = "index,name,memory.total,driver_version"


@dataclass(frozen=True)
class Gpu:
    """A GPU: its number, name, memory in bytes (``None`` if unknown) and driver version."""

    index: int
    name: str
    memory: int | None
    driver: str


@dataclass(frozen=True)
class Gpus:
    """The report of ``nvidia-smi`` and the driver.

    Attributes:
        found: the GPUs.
        failure: the error of an nvidia-smi that fails; ``None`` if it works or is not installed.
        driver_cuda: the newest CUDA version that the driver runs; ``None`` without a driver.
    """

    found: tuple[Gpu, ...]
    failure: str | None
    driver_cuda: str | None


def gpus() -> Gpus:
    """The GPUs of this host; none without nvidia-smi."""
    output = run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
    if output is None:
        return Gpus((), None, None)
    if output.status != 0:
        text = "it gave no answer" if output.status is None else output.text
        return Gpus((), next(iter(text.splitlines()), "nothing"), None)
    return Gpus(read_query(output.stdout), None, _driver_cuda())


def read_query(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's output."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4]
    return tuple(
        # nvidia-smi prints [N/A] for GPUs that share the host's memory.
        Gpu(int(index), name, int(memory) * _MIB if memory.isdecimal() else None, driver)
        for index, name, memory, driver in rows
        if index.isdecimal()
    )


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs of this host ranks with this environment may use.

    Args:
        environ: with ``CUDA_VISIBLE_DEVICES``, CUDA's list: numbers, or names of GPUs and of parts
            of them; it ends before the first that does not exist.
    """
    found = len(gpus().found)
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not found:
        return found
    visible = 0
    for word in map(str.strip, listed.split(",")):
        exists = int(word) < found if word.isdecimal() else word.startswith(("GPU-", "MIG-"))
        if not exists:
            break
        visible += 1
    return visible


def _driver_cuda() -> str | None:
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    # 12080 is 12.8.
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else None


def gpu_of_rank(local_rank: int, local_size: int, visible_gpus: int) -> int | None:
    """Index of the GPU for this rank, or None on a host without GPUs.

    If the launcher shows each rank a single GPU (``CUDA_VISIBLE_DEVICES``, Slurm's
    ``--gpus-per-task``), the rank takes that one.

    Raises:
        LaunchError: the host has several GPUs, but fewer than ranks.
    """
    if visible_gpus == 0:
        return None
    if visible_gpus == 1:
        return 0
    if local_size > visible_gpus:
        raise LaunchError(
            f"{local_size} ranks on a host with {visible_gpus} GPUs: start at most {visible_gpus} "
            "ranks there (slots in the hostfile), or hide the GPUs: CUDA_VISIBLE_DEVICES= "
            "(`hvkit run -x CUDA_VISIBLE_DEVICES=`)"
        )
    return local_rank
