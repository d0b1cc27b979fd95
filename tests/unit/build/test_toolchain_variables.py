"""The environment of Horovod's build."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvkit.build.cuda import Toolkit
from hvkit.build.toolchain import build_environment, user_build_options


@pytest.fixture
def environ_of(toolchain, tmp_path, monkeypatch):
    """The environment of a build, for changes of the toolchain, where the user's is as given."""
    for name in user_build_options(os.environ):
        monkeypatch.delenv(name)

    def build(variables=(), **changes):
        for name, value in dict(variables).items():
            monkeypatch.setenv(name, value)
        return build_environment(replace(toolchain, **changes), 2, "/opt/cmake", tmp_path)

    return build


CUDA = Toolkit(Path("/opt/cuda"), "13.0")
PATH = {"PATH": "/usr/local/bin:/usr/bin"}


def test_frameworks_and_mpi_are_required_and_no_gpus(environ_of):
    gpus = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_ALLREDUCE": "NCCL"}
    environ = environ_of({**PATH, **gpus, "MPI_HOME": "/opt/another-mpi"})
    expected = {
        **dict.fromkeys(("HOROVOD_WITH_PYTORCH", "HOROVOD_WITH_TENSORFLOW"), "1"),
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_CMAKE": "/opt/cmake",
        "MAKEFLAGS": "-j2",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HVKIT_RPATH": "/opt/mpi/lib",
        # CMake finds the same MPI.
        "PATH": "/usr/local/bin:/usr/bin:/opt/mpi/bin",
    }
    assert {name: environ.get(name) for name in expected} == expected
    assert "MPI_HOME" not in environ
    assert not [name for name in environ if name.startswith("HOROVOD_GPU")]


def test_framework_left_out(environ_of, toolchain):
    environ = environ_of({"HOROVOD_WITH_TENSORFLOW": "1"}, frameworks=toolchain.frameworks[:1])
    assert environ["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in environ


def test_every_part_of_the_build_finds_the_same_toolkit(environ_of):
    environ = environ_of({**PATH, "CUDA_HOME": "/usr/local/cuda-12.4"}, cuda=CUDA)
    assert environ["CUDA_HOME"] == environ["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert environ["CUDAToolkit_ROOT"] == "/opt/cuda"
    assert environ["PATH"].startswith("/opt/cuda/bin:/usr/local/bin:")


@pytest.fixture
def nccl(tmp_path, monkeypatch):
    """NVIDIA's wheel, whose library has a name that the linker does not look for."""
    folder = tmp_path / "nvidia" / "nccl"
    packages = {"nvidia-nccl-cu13": SimpleNamespace(locate_file=tmp_path.joinpath)}
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libnccl.so.2").write_text("nccl")
    monkeypatch.setattr("importlib.metadata.distribution", packages.__getitem__)
    return folder


def test_nccls_wheel_is_made_linkable_and_found_at_run_time(environ_of, nccl):
    environ = environ_of(cuda=CUDA)
    assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert Path(environ["HOROVOD_NCCL_LIB"], "libnccl.so").read_text() == "nccl"
    assert environ["HOROVOD_NCCL_INCLUDE"] == str(nccl / "include")
    mpi, rpath = environ["HVKIT_RPATH"].split(";")
    assert mpi == "/opt/mpi/lib"
    assert rpath.startswith("$ORIGIN/")
    assert rpath.endswith("/nvidia/nccl/lib")


@pytest.mark.parametrize(
    ("cuda", "variables", "rpath"),
    [
        (None, {}, "/opt/mpi/lib"),
        (CUDA, {"HOROVOD_NCCL_HOME": "/opt/nccl"}, "/opt/mpi/lib;/opt/nccl/lib"),
    ],
)
def test_nccls_wheel_is_left_alone(environ_of, nccl, cuda, variables, rpath):
    environ = environ_of(variables, cuda=cuda)
    assert "HOROVOD_NCCL_LIB" not in environ
    assert environ["HVKIT_RPATH"] == rpath
