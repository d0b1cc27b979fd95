"""Whatever changes the binary changes its key, and nothing else does."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvkit.build import key as key_module
from hvkit.build.key import cpu_features, key_of
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


def with_nvcc(found: Toolchain) -> Toolchain:
    return replace(found, nvcc=Compiler(("/usr/local/cuda/bin/nvcc",), "release 13.0"))


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
    ],
)
def test_each_part_of_the_toolchain_changes_the_key(
    toolchain: Toolchain, change: Callable[[Toolchain], Toolchain]
) -> None:
    before = key_of(toolchain, None, NOTHING)
    assert key_of(change(toolchain), None, NOTHING).digest != before.digest


def test_gpu_operations_change_the_key(toolchain: Toolchain) -> None:
    assert key_of(toolchain, "nccl", NOTHING).digest != key_of(toolchain, None, NOTHING).digest


def test_nvcc_counts_where_the_build_uses_it(toolchain: Toolchain) -> None:
    def digests(version: str, gpu: str | None) -> set[str]:
        pytorch = replace(toolchain.frameworks[0], version=version)
        found = replace(toolchain, frameworks=(pytorch,))
        return {key_of(each, gpu, NOTHING).digest for each in (found, with_nvcc(found))}

    assert len(digests("2.13.0+cpu", None)) == 1
    assert len(digests("2.13.0+cpu", "nccl")) == 2
    assert len(digests("2.13.0+cu130", None)) == 2


@pytest.mark.parametrize(
    "variable", ["HOROVOD_DEBUG", "HOROVOD_BUILD_ARCH_FLAGS", "CXXFLAGS", "HOROVOD_NCCL_HOME"]
)
def test_build_options_in_the_environment_change_the_key(
    toolchain: Toolchain, variable: str
) -> None:
    before = key_of(toolchain, None, NOTHING)
    assert key_of(toolchain, None, {variable: "1"}).digest != before.digest


def test_run_time_options_in_the_environment_do_not(toolchain: Toolchain) -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_RANK": "0", "HOME": "/"}
    assert key_of(toolchain, None, environ) == key_of(toolchain, None, NOTHING)


@pytest.mark.parametrize(
    ("name", "value"), [("VERSION", "0.29.0"), ("EDITS", ()), ("cpu_features", lambda: ["sse"])]
)
def test_source_edits_and_cpu_change_the_key(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    before = key_of(toolchain, None, NOTHING)
    monkeypatch.setattr(key_module, name, value)
    assert key_of(toolchain, None, NOTHING).digest != before.digest


def test_where_the_compiler_lies_does_not_matter(toolchain: Toolchain) -> None:
    moved = replace(toolchain, compiler=Compiler(("/opt/c++",), toolchain.compiler.version))
    assert key_of(moved, None, NOTHING) == key_of(toolchain, None, NOTHING)


def test_version_is_horovods_with_the_digest_as_local_part(toolchain: Toolchain) -> None:
    key = key_of(toolchain, None, NOTHING)
    assert re.fullmatch(r"0\.28\.1\+hvkit[0-9a-f]{12}", key.version)


def test_cpu_features_are_those_that_the_build_picks(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 fma avx avx2\n")
    assert cpu_features(cpuinfo) == ["avx", "fma"]
    assert cpu_features(tmp_path / "nowhere") == []
