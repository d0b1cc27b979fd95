"""Whatever changes the binary changes its key, and nothing else does."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvkit.build import key as key_module
from hvkit.build.cuda import Toolkit
from hvkit.build.key import Key, cpu_features, key_of
from hvkit.build.toolchain import Compiler, Toolchain

NOTHING: dict[str, str] = {}


def without_tensorflow(found: Toolchain) -> Toolchain:
    return replace(found, frameworks=found.frameworks[:1])


def newer_pytorch(found: Toolchain) -> Toolchain:
    pytorch, tensorflow = found.frameworks
    return replace(found, frameworks=(replace(pytorch, version="2.14.0+cpu"), tensorflow))


def newer_mpi(found: Toolchain) -> Toolchain:
    return replace(found, mpi=replace(found.mpi, version="5.0.11"))


def mpich(found: Toolchain) -> Toolchain:
    return replace(found, mpi=replace(found.mpi, flavour="MPICH"))


def mpi_elsewhere(found: Toolchain) -> Toolchain:
    return replace(found, mpi=replace(found.mpi, library_dir=Path("/usr/local/lib")))


def newer_compiler(found: Toolchain) -> Toolchain:
    return replace(found, compiler=Compiler(("/usr/bin/c++",), "c++ 13.1.0"))


def compiler_flags(found: Toolchain) -> Toolchain:
    return replace(found, compiler=Compiler(("/usr/bin/c++", "-m64"), found.compiler.version))


def for_nccl(found: Toolchain) -> Toolchain:
    return replace(found, cuda=Toolkit(Path("/usr/local/cuda"), "13.0"))


@pytest.mark.parametrize(
    "change",
    [
        without_tensorflow,
        newer_pytorch,
        newer_mpi,
        mpich,
        mpi_elsewhere,
        newer_compiler,
        compiler_flags,
        for_nccl,
    ],
)
def test_each_part_of_the_toolchain_changes_the_key(
    toolchain: Toolchain, change: Callable[[Toolchain], Toolchain]
) -> None:
    before = key_of(toolchain, NOTHING)
    assert key_of(change(toolchain), NOTHING).digest != before.digest


def test_cuda_version_changes_the_key_and_where_its_toolkit_lies_does_not(
    toolchain: Toolchain,
) -> None:
    def key(home: str, version: str) -> Key:
        return key_of(replace(toolchain, cuda=Toolkit(Path(home), version)), NOTHING)

    assert key("/usr/local/cuda", "13.0") == key("/home/me/.cache/hvkit/cuda/13.0", "13.0")
    assert key("/usr/local/cuda", "13.0").digest != key("/usr/local/cuda", "13.1").digest


def test_the_machines_toolkit_does_not_count_in_a_build_without_gpus(toolchain: Toolchain) -> None:
    environ = {"CUDA_HOME": "/opt/cuda", "HOROVOD_CUDA_HOME": "/opt/cuda"}
    assert key_of(toolchain, environ) == key_of(toolchain, NOTHING)


@pytest.mark.parametrize(
    "variable", ["HOROVOD_DEBUG", "HOROVOD_BUILD_ARCH_FLAGS", "CXXFLAGS", "HOROVOD_NCCL_HOME"]
)
def test_build_options_in_the_environment_change_the_key(
    toolchain: Toolchain, variable: str
) -> None:
    before = key_of(toolchain, NOTHING)
    assert key_of(toolchain, {variable: "1"}).digest != before.digest


def test_run_time_options_in_the_environment_do_not(toolchain: Toolchain) -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_RANK": "0", "HOME": "/"}
    assert key_of(toolchain, environ) == key_of(toolchain, NOTHING)


@pytest.mark.parametrize(
    ("name", "value"), [("VERSION", "0.29.0"), ("EDITS", ()), ("cpu_features", lambda: ["sse"])]
)
def test_source_edits_and_cpu_change_the_key(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = key_of(toolchain, NOTHING)
    monkeypatch.setattr(key_module, name, value)
    assert key_of(toolchain, NOTHING).digest != before.digest


def test_where_the_compiler_lies_does_not_matter(toolchain: Toolchain) -> None:
    moved = replace(toolchain, compiler=Compiler(("/opt/c++",), toolchain.compiler.version))
    assert key_of(moved, NOTHING) == key_of(toolchain, NOTHING)


def test_version_is_horovods_with_the_digest_as_local_part(toolchain: Toolchain) -> None:
    key = key_of(toolchain, NOTHING)
    assert re.fullmatch(r"0\.28\.1\+hvkit[0-9a-f]{12}", key.version)


def test_cpu_features_are_those_that_the_build_picks(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 fma avx avx2\n")
    assert cpu_features(cpuinfo) == ["avx", "fma"]
    assert cpu_features(tmp_path / "nowhere") == []
