"""A Horovod built for NCCL holds its operations; it needs no GPU to be looked at.

For ``make gpu-build``, which builds it in an environment of its own.
"""

import subprocess
import sys
from pathlib import Path

import horovod
import pytest

LIBRARIES = sorted(Path(horovod.__file__).parent.glob("*/mpi_lib*.so"))

# One operation of Horovod's, and a function of NCCL's that it calls.
OPERATIONS = {
    "NCCLAllreduce": "ncclAllReduce",
    "NCCLAllgather": "ncclAllGather",
    "NCCLBroadcast": "ncclBroadcast",
    "NCCLReducescatter": "ncclReduceScatter",
    "NCCLAlltoall": "ncclSend",
}
REDUCED_ON_THE_CPU = """
import torch, horovod.torch as hvd
hvd.init()
assert hvd.nccl_built() and hvd.cuda_built()
assert hvd.allreduce(torch.full([3], hvd.rank() + 1.0), op=hvd.Sum).tolist() == [3.0] * 3
"""


def test_there_is_a_library() -> None:
    assert LIBRARIES


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.parent.name)
def test_it_holds_and_calls_every_operation(library: Path) -> None:
    called = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], text=True, capture_output=True, check=True
    ).stdout.split()
    code = library.read_bytes()
    for operation, function in OPERATIONS.items():
        # The name of a class with virtual functions is in its type information.
        assert f"{len(operation)}{operation}E".encode() in code, operation
        assert function in called


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.parent.name)
def test_it_holds_cuda_kernels_and_finds_nccl_beside_it(library: Path) -> None:
    sections = _readelf("--sections", library)
    assert ".nv_fatbin" in sections
    dynamic = _readelf("--dynamic", library)
    assert "[libnccl.so.2]" in dynamic
    assert "nvidia/nccl/lib" in dynamic


def test_it_also_works_where_there_is_no_gpu() -> None:
    subprocess.run(
        ["mpirun", "-np", "2", sys.executable, "-c", REDUCED_ON_THE_CPU], check=True, timeout=300
    )


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout
