"""Patches fit exactly or stop the build; hvkit's own fit the official source in the cache."""

import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from scripts import write_program

from hvkit.build import builder
from hvkit.build.frameworks import InstalledFramework
from hvkit.build.horovod_patches import (
    CONDITIONS,
    PATCHES,
    VERSION,
    XLA_OPS,
    apply_patches,
    find_patches,
    patches_digest,
    read_hunks,
    split_reasons,
    tensorflow_lacks_xla_headers,
)
from hvkit.build.toolchain import Compiler, Toolchain
from hvkit.errors import BuildError
from hvkit.host.system import cache_dir

# Read before the tests' own cache replaces the user's.
ARCHIVE = cache_dir() / "source" / builder.ARCHIVE
needs_source = pytest.mark.skipif(not ARCHIVE.is_file(), reason=f"no {ARCHIVE}")
NO_COMPILER = Compiler(("false",), "")
NAMES = [patch.name for patch in find_patches(PATCHES)]
FILES = {hunk.file for patch in find_patches(PATCHES) for hunk in read_hunks(patch)}


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """The files that the patches and their conditions read, as upstream made them."""
    folder = tmp_path_factory.mktemp("official")
    with tarfile.open(ARCHIVE) as package:
        package.extraction_filter = getattr(tarfile, "data_filter", None)
        root = f"horovod-{VERSION}"
        package.extractall(folder, [package.getmember(f"{root}/{f}") for f in {XLA_OPS, *FILES}])
    return folder / root


@pytest.fixture
def original(official, tmp_path):
    return shutil.copytree(official, tmp_path / "horovod")


@pytest.fixture(scope="module")
def patched(official, tmp_path_factory):
    """Not to be changed. This TensorFlow has no headers at all, so every patch applies."""
    folder = tmp_path_factory.mktemp("patched") / "horovod"
    without_headers = Toolchain(
        (InstalledFramework("tensorflow", "2.21.0", folder),), None, NO_COMPILER
    )
    assert apply_patches(PATCHES, shutil.copytree(official, folder), without_headers) == NAMES
    return folder


def test_every_patch_has_its_reasons_and_every_condition_its_patch():
    for name in NAMES:
        reasons, _ = split_reasons(PATCHES / name)
        assert re.fullmatch(r"What: .+\n\nWhy: .+\n\nUpstream: .+", reasons, re.DOTALL), name
    assert set(CONDITIONS) <= set(NAMES)


@needs_source
def test_patches_fit_where_tensorflow_has_xla_headers(original, toolchain, monkeypatch):
    monkeypatch.setitem(CONDITIONS, "02-no-xla-ops.patch", lambda toolchain, source: False)
    applied = apply_patches(PATCHES, original, toolchain)
    assert applied == [name for name in NAMES if name not in CONDITIONS]
    assert "xla_mpi_ops.cc" in (original / "horovod/tensorflow/CMakeLists.txt").read_text()


@needs_source
def test_mpirun_gets_long_options_with_two_dashes(patched):
    for launcher in ("horovod/runner/mpi_run.py", "horovod/spark/mpi_run.py"):
        text = (patched / launcher).read_text()
        assert "--mca " in text
        assert not re.search(r"(?<!-)-(?:mca|bind-to|map-by|rank-by) ", text)


@needs_source
def test_patched_python_still_compiles(patched):
    for file in {file for file in FILES if file.endswith(".py")}:
        compile((patched / file).read_text(), file, "exec")


@needs_source
@pytest.mark.parametrize(
    ("held", "built"),
    [
        (None, [None, None, None]),
        (b"_ZN4gloo9allreduce MPI_ALLREDUCE", [False, True, False]),
        (b"MPI_Allreduce ncclAllReduce", [True, False, True]),
    ],
)
def test_horovodrun_reads_in_the_libraries_what_they_were_built_with(
    patched, tmp_path, held, built
):
    util = tmp_path / "horovod/common/util.py"
    for file in (util, tmp_path / "horovod/torch/mpi_lib_v2.cpython-311.so"):
        file.parent.mkdir(parents=True)
    if held:
        file.write_bytes(held)
    # Of its package, only what the patches change is here.
    text = (patched / "horovod/common/util.py").read_text()
    scope = {"__file__": str(util)}
    exec(re.sub(r"^from horovod.*$", "", text, flags=re.MULTILINE), scope)
    assert [scope[f"{name}_built"]() for name in ("mpi", "gloo", "nccl")] == built


@pytest.fixture
def hosts_of(patched, tmp_path):
    """What horovodrun reads in a hostfile of this text."""
    scope = {}
    exec((patched / "horovod/runner/common/util/hosts.py").read_text(), scope)

    def parse(text):
        (tmp_path / "hosts").write_text(text)
        return scope["parse_host_files"](str(tmp_path / "hosts"))

    return parse


@needs_source
def test_horovodrun_reads_comments_blank_lines_and_max_slots(hosts_of):
    hosts = hosts_of("# two\n\nnode1 max_slots=8 slots=2  # big\nnode2\tslots = 1 max-slots=3\n")
    assert hosts == "node1:2,node2:1"
    for line in ("node1", "node1 max_slots=4", "node1 slots=four"):
        with pytest.raises(ValueError, match=f"'{line}' names no slots: write `node1 slots=N`"):
            hosts_of(f"{line}\n")


@needs_source
def test_horovod_without_gpus_refuses_a_tensor_on_one(patched):
    text = (patched / "horovod/torch/mpi_ops.py").read_text()
    function = re.search(r"def _check_function.*?(?=\n\n\n)", text, re.DOTALL)
    assert function is not None
    library = SimpleNamespace(allreduce=None)
    scope = {"mpi_lib": library, "rocm_built": lambda: False}
    exec(function[0], scope)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0", is_contiguous=lambda: True)
    on_cpu = SimpleNamespace(is_cuda=False, device="cpu", is_contiguous=lambda: True)

    scope["cuda_built"] = lambda: False
    assert scope["_check_function"](lambda tensor: "allreduce", on_cpu) == "allreduce"
    with pytest.raises(ValueError, match=r"on cuda:0.*hvkit install-horovod --gpu nccl"):
        scope["_check_function"](lambda tensor: "allreduce", on_gpu)
    scope["cuda_built"] = lambda: True
    assert scope["_check_function"](lambda tensor: "allreduce", on_gpu) == "allreduce"


needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on PATH")


@needs_source
@needs_cmake
@pytest.mark.parametrize(("operations", "called"), [("", False), ("NCCL", True)])
def test_cmake_calls_nvcc_for_gpu_operations_only(patched, tmp_path, operations, called):
    calls = tmp_path / "calls"
    nvcc = write_program(tmp_path / "bin" / "nvcc", f'echo "$*" >> {calls}; exit 1')
    text = (patched / "CMakeLists.txt").read_text()
    start, end = text.index("if(DEFINED ENV{HOROVOD_CUDA_HOME})"), text.index("macro(ADD_CUDA)")
    _configure(
        tmp_path / "project",
        f"set(HOROVOD_GPU_OPERATIONS {operations})\n{text[start:end]}",
        PATH=f"{nvcc.parent}:{os.environ['PATH']}",
    )
    assert calls.exists() is called


@needs_source
@needs_cmake
@pytest.mark.parametrize(
    ("operations", "built_for"), [("", "FALSE, CppExtension"), ("NCCL", "TRUE, CUDAExtension")]
)
def test_pytorch_for_cuda_makes_no_build_for_gpus(patched, tmp_path, operations, built_for):
    # PyTorch's answers beside a CUDA toolkit.
    answers = 'case "$2" in *CUDA_HOME*) echo "2.13.0;True;False;True";; *) echo x;; esac'
    python = write_program(tmp_path / "bin" / "python", answers)
    output = _configure(
        tmp_path / "project",
        f"set(HOROVOD_GPU_OPERATIONS {operations})\nset(PY_EXE {python})\n"
        f"include({patched / 'cmake/Modules/FindPytorch.cmake'})\n"
        'message(STATUS "built for CUDA: ${Pytorch_CUDA}, ${Pytorch_EXT}")\n',
    )
    assert f"built for CUDA: {built_for}" in output


def _configure(folder, commands, **environ):
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


@pytest.mark.parametrize(
    ("header", "frameworks", "lacking"),
    [
        ("", 2, False),
        (None, 2, True),
        ('#include "highwayhash/arch_specific.h"\n', 2, True),  # one behind another
        (None, 1, False),  # no TensorFlow
    ],
)
def test_tensorflows_headers_decide_on_the_xla_ops(
    toolchain, tmp_path, header, frameworks, lacking
):
    (tmp_path / XLA_OPS).parent.mkdir(parents=True)
    (tmp_path / XLA_OPS).write_text(
        '#include <cuda.h>\n#include "tensorflow/xla.h"\n#include "../common/common.h"\n'
    )
    path = tmp_path / "tensorflow" / "include" / "tensorflow" / "xla.h"
    path.parent.mkdir(parents=True)
    if header is not None:
        path.write_text(header)
    found = replace(toolchain, frameworks=toolchain.frameworks[:frameworks])
    assert tensorflow_lacks_xla_headers(found, tmp_path) is lacking


PATCH = """\
What: the second standard, and the end.

--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,3 +1,4 @@
 project(x)
+# with sums
-set(STANDARD 14)
+set(STANDARD 17)
 set(EXTENSIONS OFF)
@@ -5 +6 @@
--- end
+++ the end
diff --git a/setup.py b/setup.py
index 83b2e7a..c2e5f1d 100644
--- a/setup.py
+++ b/setup.py
@@ -1,2 +1 @@
-setup()
 # end
"""
BEFORE = "project(x)\nset(STANDARD 14)\nset(EXTENSIONS OFF)\n\n-- end\n"
AFTER = "project(x)\n# with sums\nset(STANDARD 17)\nset(EXTENSIONS OFF)\n\n++ the end\n"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(BEFORE)
    (folder / "setup.py").write_text("setup()\n# end")
    return folder


@pytest.fixture
def patches(tmp_path):
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "1-standard.patch").write_text(PATCH)
    return folder


def test_replaces_the_lines_of_every_hunk(patches, source, toolchain):
    assert apply_patches(patches, source, toolchain) == ["1-standard.patch"]
    assert (source / "CMakeLists.txt").read_text() == AFTER
    assert (source / "setup.py").read_text() == "# end"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"hunk 1 expects 'project\(x\)' in line 1, found ''"),
        (AFTER, r"hunk 1 expects 'set\(STANDARD 14\)' in line 2, found '# with sums'"),
        (f"# new\n{BEFORE}", r"hunk 1 expects 'project\(x\)' in line 1, found '# new'"),
        (BEFORE.replace("\n\n", "\n"), "hunk 2 expects '-- end' in line 6, found ''"),
        (BEFORE.replace("\n", "\r\n"), r"hunk 1 expects 'project\(x\)' in line 1, found .*\\r"),
    ],
)
def test_changed_source_names_the_patch_the_file_and_the_hunk(
    patches, source, toolchain, text, problem
):
    (source / "CMakeLists.txt").write_bytes(text.encode())
    with pytest.raises(BuildError, match=f"patch 1-standard.patch, CMakeLists.txt: {problem}"):
        apply_patches(patches, source, toolchain)


def test_missing_file_names_the_patch(patches, source, toolchain):
    (source / "setup.py").unlink()
    message = r"patch 1-standard.patch, setup.py: hunk 1 is for a file that is not in the source"
    with pytest.raises(BuildError, match=message):
        apply_patches(patches, source, toolchain)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("\n # end\n", "\n", r"setup.py: hunk 1 does not have as many lines as @@ -1,2 \+1 @@"),
        ("-1,3", "-1,2", r"CMakeLists.txt: hunk 1 does not have as many lines as @@ -1,2 "),
        ("-1,2 +1 @@\n-setup()\n # end", "-0,0 +1 @@\n+setup()", "hunk 1 has no line that stays"),
        ("\n # end\n", "\n # end\n+\n", r"setup.py: hunk 1 is followed by '\+', which is no diff"),
        ("--- a/setup.py", "new file mode 100644", r"is followed by 'new file mode 100644'"),
        (PATCH[PATCH.index("--- a/") :], "", "1-standard.patch: not a text with reasons and"),
        (PATCH[: PATCH.index("--- a/")], "", "1-standard.patch: not a text with reasons and"),
    ],
)
def test_damaged_patch_is_refused(patches, source, toolchain, old, new, problem):
    file = patches / "1-standard.patch"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(BuildError, match=problem):
        apply_patches(patches, source, toolchain)


def test_patches_apply_in_order_and_as_their_conditions_say(
    patches, source, toolchain, monkeypatch
):
    second = "What: back.\n\n--- a/setup.py\n+++ b/setup.py\n@@ -1 +1,2 @@\n+setup()\n # end\n"
    (patches / "2-setup.patch").write_text(second)
    monkeypatch.setitem(CONDITIONS, "2-setup.patch", lambda toolchain, source: False)
    assert apply_patches(patches, source, toolchain) == ["1-standard.patch"]
    for file, text in (("CMakeLists.txt", BEFORE), ("setup.py", "setup()\n# end")):
        (source / file).write_text(text)
    monkeypatch.setitem(CONDITIONS, "2-setup.patch", lambda toolchain, source: True)
    assert apply_patches(patches, source, toolchain) == ["1-standard.patch", "2-setup.patch"]
    assert (source / "setup.py").read_text() == "setup()\n# end"


def test_no_patches_at_all_is_an_error(tmp_path):
    with pytest.raises(BuildError, match=f"no patches of Horovod in {tmp_path}"):
        patches_digest(tmp_path)


def test_digest_follows_the_diff_and_not_the_reasons(patches):
    file = patches / "1-standard.patch"
    before, text = patches_digest(patches), file.read_text()
    file.write_text(text.replace("the second standard", "another"))
    assert patches_digest(patches) == before
    file.write_text(text.replace("STANDARD 17", "STANDARD 20"))
    assert patches_digest(patches) != before
