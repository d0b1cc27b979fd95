"""The environment of Horovod's build."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvkit.build import build_variables
from hvkit.build.build_variables import build_environment
from hvkit.build.cuda import Toolkit


def with_cuda(found):
    return replace(found, cuda=Toolkit(Path("/opt/cuda"), "13.0"))


@pytest.fixture(autouse=True)
def no_build_options(monkeypatch):
    for name in build_variables.user_build_options(os.environ):
        monkeypatch.delenv(name)


def test_frameworks_and_mpi_are_required(toolchain, tmp_path):
    environ = build_environment(toolchain, 2, "/opt/cmake", tmp_path)
    assert environ["HOROVOD_WITH_PYTORCH"] == environ["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert environ["HOROVOD_WITH_MPI"] == "1"
    assert environ["HOROVOD_CMAKE"] == "/opt/cmake"
    assert environ["MAKEFLAGS"] == "-j2"
    assert environ["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert environ["HVKIT_RPATH"] == "/opt/mpi/lib"
    assert "HOROVOD_GPU_OPERATIONS" not in environ


def test_framework_left_out(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
    alone = replace(toolchain, frameworks=toolchain.frameworks[:1])
    environ = build_environment(alone, 2, "cmake", tmp_path)
    assert environ["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in environ


def test_cmake_finds_the_same_mpi(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin")
    monkeypatch.setenv("MPI_HOME", "/opt/another-mpi")
    environ = build_environment(toolchain, 2, "cmake", tmp_path)
    assert environ["PATH"] == "/usr/local/bin:/usr/bin:/opt/mpi/bin"
    assert "MPI_HOME" not in environ


def test_a_build_without_gpus_has_no_cuda_variables(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("HOROVOD_GPU_ALLREDUCE", "NCCL")
    environ = build_environment(toolchain, 2, "cmake", tmp_path)
    assert not [name for name in environ if name.startswith("HOROVOD_GPU")]
    assert environ["HOROVOD_WITHOUT_NVTX"] == "1"


def test_every_part_of_the_build_finds_the_same_toolkit(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin")
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-12.4")
    environ = build_environment(with_cuda(toolchain), 2, "cmake", tmp_path)
    assert environ["CUDA_HOME"] == environ["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert environ["CUDAToolkit_ROOT"] == "/opt/cuda"
    assert environ["PATH"].startswith("/opt/cuda/bin:/usr/local/bin:")


class TestNccl:
    """GPU builds."""

    @pytest.fixture
    def wheel(self, tmp_path, monkeypatch):
        """NVIDIA's wheel, whose library has a name that the linker does not look for."""
        folder = tmp_path / "nvidia" / "nccl"
        packages = {"nvidia-nccl-cu13": SimpleNamespace(locate_file=tmp_path.joinpath)}
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "libnccl.so.2").write_text("nccl")
        monkeypatch.setattr("importlib.metadata.distribution", packages.__getitem__)
        return folder

    def test_wheel_is_made_linkable_and_found_at_run_time(self, toolchain, tmp_path, wheel):
        environ = build_environment(with_cuda(toolchain), 2, "cmake", tmp_path)
        assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert Path(environ["HOROVOD_NCCL_LIB"], "libnccl.so").read_text() == "nccl"
        assert environ["HOROVOD_NCCL_INCLUDE"] == str(wheel / "include")
        mpi, nccl = environ["HVKIT_RPATH"].split(";")
        assert mpi == "/opt/mpi/lib"
        assert nccl.startswith("$ORIGIN/")
        assert nccl.endswith("/nvidia/nccl/lib")

    def test_build_without_gpu_operations_leaves_it_alone(self, toolchain, tmp_path, wheel):
        environ = build_environment(toolchain, 2, "cmake", tmp_path)
        assert "HOROVOD_NCCL_LIB" not in environ
        assert environ["HVKIT_RPATH"] == "/opt/mpi/lib"

    def test_users_nccl_wins_over_the_wheel(self, toolchain, tmp_path, wheel, monkeypatch):
        monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
        environ = build_environment(with_cuda(toolchain), 2, "cmake", tmp_path)
        assert "HOROVOD_NCCL_LIB" not in environ
        assert environ["HVKIT_RPATH"] == "/opt/mpi/lib;/opt/nccl/lib"
