"""A Horovod built for NCCL contains NCCL's operations; checking that takes no GPU.

``make gpu-build`` builds it in an environment of its own and runs these tests.
"""

import subprocess
import sys
from pathlib import Path

import horovod
import pytest

LIBRARIES = sorted(Path(horovod.__file__).parent.glob("*/mpi_lib*.so"))

# Horovod's operations, and a function of NCCL that each calls.
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
def test_it_contains_every_operation_and_calls_nccl(library: Path) -> None:
    called = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], text=True, capture_output=True, check=True
    ).stdout.split()
    code = library.read_bytes()
    for operation, function in OPERATIONS.items():
        # The type information of a class with virtual functions contains its name.
        assert f"{len(operation)}{operation}E".encode() in code, operation
        assert function in called


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.parent.name)
def test_it_contains_cuda_kernels_and_finds_nccl_in_its_wheel(library: Path) -> None:
    sections = _readelf("--sections", library)
    assert ".nv_fatbin" in sections
    dynamic = _readelf("--dynamic", library)
    assert "[libnccl.so.2]" in dynamic
    assert "nvidia/nccl/lib" in dynamic


def test_it_also_works_without_a_gpu() -> None:
    subprocess.run(
        ["mpirun", "-np", "2", sys.executable, "-c", REDUCED_ON_THE_CPU], check=True, timeout=300
    )


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout
