"""Edits fit exactly or stop the build; hvkit's own fit the official source in the user's cache."""

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvkit.build import builder
from hvkit.build.edits.horovod_edits import EDITS, XLA_OPS, tensorflow_lacks_xla_headers
from hvkit.build.edits.source_edits import VERSION, Edit, apply_edits, edits_digest
from hvkit.build.toolchain import Compiler, Toolchain
from hvkit.errors import BuildError
from hvkit.host.cache import cache_dir

# Read before the tests' own cache replaces the user's.
ARCHIVE = cache_dir() / "source" / builder.ARCHIVE
needs_source = pytest.mark.skipif(not ARCHIVE.is_file(), reason=f"no {ARCHIVE}")


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """The files that the edits read and change, as upstream made them."""
    root = tmp_path / f"horovod-{VERSION}"
    files = {f"{root.name}/{file}" for file in [XLA_OPS, *(edit.file for edit in EDITS)]}
    with tarfile.open(ARCHIVE) as package:
        package.extraction_filter = getattr(tarfile, "data_filter", None)
        package.extractall(tmp_path, map(package.getmember, files))
    return root


@pytest.fixture
def edited(original: Path, toolchain: Toolchain) -> Path:
    apply_edits(EDITS, original, toolchain)
    return original


def test_every_edit_has_a_unique_name_and_a_reason() -> None:
    assert len({edit.name for edit in EDITS}) == len(EDITS)
    assert all(edit.what and edit.why and edit.upstream for edit in EDITS)


@needs_source
def test_all_edits_fit_the_official_source(original: Path, toolchain: Toolchain) -> None:
    # The toolchain's TensorFlow has no headers at all, so every edit applies.
    assert apply_edits(EDITS, original, toolchain) == list(EDITS)


@needs_source
def test_a_second_application_is_refused(edited: Path, toolchain: Toolchain) -> None:
    with pytest.raises(BuildError, match=r"edit 'C\+\+17'"):
        apply_edits(EDITS, edited, toolchain)


@needs_source
def test_mpirun_gets_long_options_with_two_dashes(edited: Path) -> None:
    for launcher in ("horovod/runner/mpi_run.py", "horovod/spark/mpi_run.py"):
        text = (edited / launcher).read_text()
        assert "--mca " in text
        assert not re.search(r"(?<!-)-(?:mca|bind-to|map-by|rank-by) ", text)


@needs_source
def test_edited_python_still_compiles(edited: Path) -> None:
    for file in {edit.file for edit in EDITS if edit.file.endswith(".py")}:
        compile((edited / file).read_text(), file, "exec")


@needs_source
def test_optimizer_without_gradient_methods_is_refused(edited: Path) -> None:
    text = (edited / "horovod/_keras/__init__.py").read_text()
    function = re.search(r"def _require_gradient_methods.*?(?=\n\n\n)", text, re.DOTALL)
    assert function is not None
    scope: dict[str, object] = {}
    exec(function[0], scope)
    require = scope["_require_gradient_methods"]
    assert callable(require)
    keras_2 = type("SGD", (), {"compute_gradients": None})
    keras_3 = type("SGD", (), {"apply": None})
    require(keras_2)
    with pytest.raises(NotImplementedError, match=r"hvkit\.distribute"):
        require(keras_3)


@needs_source
def test_horovodrun_reads_comments_blank_lines_and_max_slots(edited: Path, tmp_path: Path) -> None:
    parse = _parse_host_files(edited)
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        "# two hosts\n\nnode1 max_slots=8 slots=2  # big\nnode2\tslots = 1 max-slots=3\n"
    )
    assert parse(str(hostfile)) == "node1:2,node2:1"


@needs_source
@pytest.mark.parametrize("line", ["node1", "node1 max_slots=4", "node1 slots=four"])
def test_horovodrun_names_a_host_without_slots(edited: Path, tmp_path: Path, line: str) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=f"'{line}' names no slots: write `node1 slots=N`"):
        _parse_host_files(edited)(str(hostfile))


def _parse_host_files(source: Path) -> Callable[[str], str]:
    scope: dict[str, Any] = {}
    exec((source / "horovod/runner/common/util/hosts.py").read_text(), scope)
    function: Callable[[str], str] = scope["parse_host_files"]
    return function


@needs_source
def test_horovod_without_gpus_refuses_a_tensor_on_one(edited: Path) -> None:
    text = (edited / "horovod/torch/mpi_ops.py").read_text()
    function = re.search(r"def _check_function.*?(?=\n\n\n)", text, re.DOTALL)
    assert function is not None
    library = SimpleNamespace(allreduce=None)
    scope: dict[str, Any] = {"mpi_lib": library, "rocm_built": lambda: False}
    exec(function[0], scope)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0", is_contiguous=lambda: True)
    on_cpu = SimpleNamespace(is_cuda=False, device="cpu", is_contiguous=lambda: True)

    scope["cuda_built"] = lambda: False
    assert scope["_check_function"](lambda tensor: "allreduce", on_cpu) == "allreduce"
    with pytest.raises(ValueError, match=r"on cuda:0.*hvkit install-horovod --gpu nccl"):
        scope["_check_function"](lambda tensor: "allreduce", on_gpu)
    scope["cuda_built"] = lambda: True
    assert scope["_check_function"](lambda tensor: "allreduce", on_gpu) == "allreduce"


@needs_source
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on PATH")
class TestCuda:
    """CMake looks for CUDA in builds for GPUs only."""

    @pytest.mark.parametrize(("operations", "called"), [("", False), ("NCCL", True)])
    def test_nvcc_is_called_for_gpu_operations_only(
        self, edited: Path, tmp_path: Path, operations: str, called: bool
    ) -> None:
        calls = tmp_path / "calls"
        nvcc = _program(tmp_path / "bin" / "nvcc", f'echo "$*" >> {calls}; exit 1')
        text = (edited / "CMakeLists.txt").read_text()
        start, end = text.index("if(DEFINED ENV{HOROVOD_CUDA_HOME})"), text.index("macro(ADD_CUDA)")
        _configure(
            tmp_path / "project",
            f"set(HOROVOD_GPU_OPERATIONS {operations})\n{text[start:end]}",
            PATH=f"{nvcc.parent}:{os.environ['PATH']}",
        )
        assert calls.exists() is called

    @pytest.mark.parametrize(("operations", "expected"), [("", "FALSE"), ("NCCL", "TRUE")])
    def test_pytorch_for_cuda_makes_no_build_for_gpus(
        self, edited: Path, tmp_path: Path, operations: str, expected: str
    ) -> None:
        # PyTorch's answers beside a CUDA toolkit.
        answers = (
            'case "$2" in *__version__*) echo 2.13.0;; *CUDA_HOME*) echo True;; *) echo x;; esac'
        )
        python = _program(tmp_path / "bin" / "python", answers)
        output = _configure(
            tmp_path / "project",
            f"set(HOROVOD_GPU_OPERATIONS {operations})\nset(PY_EXE {python})\n"
            f"include({edited / 'cmake/Modules/FindPytorch.cmake'})\n"
            'message(STATUS "built for CUDA: ${Pytorch_CUDA}, ${Pytorch_EXT}")\n',
        )
        kind = {"FALSE": "CppExtension", "TRUE": "CUDAExtension"}[expected]
        assert f"built for CUDA: {expected}, {kind}" in output


def _program(path: Path, body: str) -> Path:
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _configure(folder: Path, commands: str, **environ: str) -> str:
    """Run CMake on a project of these commands, and return its output."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        # The tests include FindPytorch directly; without these two lines CMake warns about that.
        "cmake_minimum_required(VERSION 3.13)\nproject(tried NONE)\n"
        f"set(FPHSA_NAME_MISMATCHED TRUE)\nset(CMAKE_FIND_PACKAGE_NAME Pytorch)\n{commands}"
    )
    done = subprocess.run(
        ["cmake", "-S", str(folder), "-B", str(folder / "build")],
        env={**os.environ, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    return done.stdout


class TestXlaHeaders:
    """TensorFlow's headers decide whether the XLA ops are compiled."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / XLA_OPS).parent.mkdir(parents=True)
        (tmp_path / XLA_OPS).write_text(
            '#include <cuda.h>\n#include "tensorflow/xla.h"\n#include "../common/common.h"\n'
        )
        return tmp_path

    @pytest.fixture
    def header(self, tmp_path: Path) -> Path:
        path = tmp_path / "tensorflow" / "include" / "tensorflow" / "xla.h"
        path.parent.mkdir(parents=True)
        return path

    def test_all_there(self, root: Path, header: Path, toolchain: Toolchain) -> None:
        header.write_text("")
        assert not tensorflow_lacks_xla_headers(toolchain, root)

    def test_one_missing(self, root: Path, toolchain: Toolchain) -> None:
        assert tensorflow_lacks_xla_headers(toolchain, root)

    def test_one_missing_behind_another(
        self, root: Path, header: Path, toolchain: Toolchain
    ) -> None:
        header.write_text('#include "highwayhash/arch_specific.h"\n')
        assert tensorflow_lacks_xla_headers(toolchain, root)

    def test_no_tensorflow(self, root: Path, toolchain: Toolchain) -> None:
        alone = Toolchain(toolchain.frameworks[:1], toolchain.mpi, Compiler(("false",), ""))
        assert not tensorflow_lacks_xla_headers(alone, root)


def edit(**changes: object) -> Edit:
    fields: dict[str, object] = {
        "name": "standard",
        "file": "CMakeLists.txt",
        "what": "",
        "why": "",
        "upstream": "",
        "old": "STANDARD 14",
        "new": "STANDARD 17",
    }
    return Edit(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def cmakelists(tmp_path: Path) -> Path:
    path = tmp_path / "CMakeLists.txt"
    path.write_text("project(x)\nset(STANDARD 14)\n")
    return path


def test_replaces_the_text(cmakelists: Path, toolchain: Toolchain) -> None:
    apply_edits([edit()], cmakelists.parent, toolchain)
    assert cmakelists.read_text() == "project(x)\nset(STANDARD 17)\n"


def test_replaces_every_expected_occurrence(cmakelists: Path, toolchain: Toolchain) -> None:
    cmakelists.write_text("STANDARD 14 STANDARD 14")
    apply_edits([edit(count=2)], cmakelists.parent, toolchain)
    assert cmakelists.read_text() == "STANDARD 17 STANDARD 17"


@pytest.mark.parametrize("text", ["", "STANDARD 14 STANDARD 14"])
def test_text_found_too_rarely_or_too_often_names_the_edit(
    cmakelists: Path, toolchain: Toolchain, text: str
) -> None:
    cmakelists.write_text(text)
    found = text.count("STANDARD 14")
    message = rf"'standard': CMakeLists.txt: expected .* 1 times, found it {found} times"
    with pytest.raises(BuildError, match=message):
        apply_edits([edit()], cmakelists.parent, toolchain)
    assert cmakelists.read_text() == text


def test_missing_file_names_the_edit(tmp_path: Path, toolchain: Toolchain) -> None:
    with pytest.raises(BuildError, match=r"'standard': CMakeLists.txt is not in the source"):
        apply_edits([edit()], tmp_path, toolchain)


def test_edit_that_does_not_apply_is_left_out(cmakelists: Path, toolchain: Toolchain) -> None:
    before = cmakelists.read_text()
    unneeded = edit(applies=lambda toolchain, source: False)
    assert apply_edits([unneeded], cmakelists.parent, toolchain) == []
    assert cmakelists.read_text() == before


def test_digest_follows_the_text_and_not_the_explanation() -> None:
    assert edits_digest([edit()]) != edits_digest([edit(new="STANDARD 20")])
    assert edits_digest([edit()]) == edits_digest([edit(why="because")])
