"""Excerpts of real build output: causes of failure, and progress."""

from pathlib import Path

import pytest

from hvkit.build.build_output import BuildProgress, explain, percent_in

EXCERPTS = {
    "disk": (
        "/usr/bin/ld: final link failed: No space left on device\n"
        "collect2: error: ld returned 1 exit status",
        "the disk is full",
        "TMPDIR",
    ),
    "memory": (
        "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n"
        "gmake[2]: *** [horovod/tensorflow/CMakeFiles/tensorflow.dir/mpi_ops.cc.o] Error 1",
        "a compiler process ran out of memory",
        "--jobs 1",
    ),
    "compiler": (
        "CMake Error at CMakeLists.txt:19 (project):\n  No CMAKE_CXX_COMPILER could be found.",
        "the C++ compiler does not work",
        "apt install g++",
    ),
    "mpi": (
        "-- Could NOT find MPI_CXX (missing: MPI_CXX_WORKS)\nCMake Error at FindPackageHandle"
        "StandardArgs.cmake:230 (message):\n  Could NOT find MPI (missing: MPI_CXX_FOUND)",
        "the MPI compiler wrapper exists, but cannot compile a program",
        "openmpi",
    ),
    "nccl": (
        "-- Linking against static NCCL library\n"
        "  Could NOT find NCCL (missing: NCCL_INCLUDE_DIR NCCL_LIBRARY)",
        "NCCL was not found",
        "HOROVOD_NCCL_HOME",
    ),
    "compiler too new for nvcc": (
        "#error -- unsupported GNU version! gcc versions later than 12 are not supported!",
        "the C++ compiler is too new for this CUDA toolkit",
        "CXX",
    ),
    "toolkit that nvcc cannot link with": (
        "CMake Error at /usr/share/cmake-3.25/Modules/CMakeDetermineCompilerId.cmake:739 (message):"
        "\n  Compiling the CUDA compiler identification source file\n"
        '  "CMakeCUDACompilerId.cu" failed.\n\n  The output was:\n\n  1\n\n'
        "  #$ LIBRARIES= -L/opt/cuda/lib64\n\n  /usr/bin/ld: cannot find -lcudart_static: No such\n"
        "  file or directory\n\n",
        "the CUDA toolkit is incomplete",
        "--gpu none",
    ),
    "toolkit without libraries": (
        "CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 "
        '(message):\n  Could NOT find CUDAToolkit (missing: CUDA_CUDART) (found version "13.0")\n'
        "Call Stack (most recent call first):\n  cmake/upstream/FindCUDAToolkit.cmake:700 (x)\n",
        "the CUDA toolkit is incomplete",
        "--gpu none",
    ),
    "cpu-only PyTorch": (
        "CMake Error at horovod/torch/CMakeLists.txt:21 (message):\n  Horovod build with GPU "
        "support was requested but this PyTorch installation does not support CUDA.",
        "the installed PyTorch is the CPU version",
        "--without pytorch",
    ),
    "framework": (
        "  Could NOT find Pytorch (missing: Pytorch_VERSION) (Required is at least",
        "a framework is installed but cannot be imported",
        "import torch",
    ),
    "pip": ("/venv/bin/python: No module named pip", "this Python has no pip", "ensurepip"),
    "hashes": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
        "a file that is not the official one",
        "pip config list",
    ),
    "network": (
        "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError("
        "Failed to establish a new connection: [Errno 111] Connection refused')': /simple/\n"
        "ERROR: Could not find a version that satisfies the requirement horovod==0.28.1\n"
        "ERROR: No matching distribution found for horovod==0.28.1",
        "pip cannot reach the package index",
        "proxy",
    ),
    "index": (
        "ERROR: Could not find a version that satisfies the requirement horovod==0.28.1 (from "
        "versions: none)\nERROR: No matching distribution found for horovod==0.28.1",
        "the package index does not have the package",
        "PIP_NO_INDEX",
    ),
}


@pytest.mark.parametrize(("output", "meaning", "remedy"), EXCERPTS.values(), ids=EXCERPTS)
def test_known_failure(output, meaning, remedy):
    message = str(explain(output, "compiling Horovod failed"))
    assert message.startswith("compiling Horovod failed: ")
    assert meaning in message.splitlines()[0]
    assert remedy in message.splitlines()[-1]


def test_matching_lines_are_shown_once_and_at_most_five():
    output = "\n".join(["noise"] * 9 + [f"{n % 7}: No space left on device" for n in range(99)])
    lines = str(explain(output, "x")).splitlines()
    shown = [line for line in lines if line.startswith("    ")]
    assert shown == [f"    {n}: No space left on device" for n in range(5)]


def test_unknown_failure_shows_the_first_errors_and_the_log():
    output = "[ 10%] Building\nops.cc:7:1: error: 'x' was not declared\nnote: here\nmake: done"
    assert str(explain(output, "compiling Horovod failed", Path("/logs/a.log"))).splitlines() == [
        "compiling Horovod failed",
        "    ops.cc:7:1: error: 'x' was not declared",
        "Full log: /logs/a.log",
    ]


def test_the_library_that_nvcc_cannot_link_is_the_line_shown():
    output, _, _ = EXCERPTS["toolkit that nvcc cannot link with"]
    assert str(explain(output, "x")).splitlines()[1:-1] == [
        "    /usr/bin/ld: cannot find -lcudart_static: No such file or directory"
    ]


def test_cmakes_message_is_shown_rather_than_the_place():
    output = (
        "-- Detecting CXX compile features - done\n"
        "CMake Error at /usr/share/cmake-3.25/Modules/FindPackage.cmake:230 (message):\n"
        "  Could NOT find Boson (missing: BOSON_MASS) (found version\n"
        '  "1.2")\n'
        "Call Stack (most recent call first):\n"
        "  cmake/FindBoson.cmake:7 (find_package)\n"
        "\n"
        "CMake Error at CMakeLists.txt:9 (message):\n"
        "\n"
        "  No light.\n"
        "\n"
        "  Not a\n  photon.\n"
        "\n\n"
        "-- Configuring incomplete, errors occurred!\n"
    )
    assert str(explain(output, "compiling Horovod failed")).splitlines() == [
        "compiling Horovod failed",
        '    Could NOT find Boson (missing: BOSON_MASS) (found version "1.2")',
        "    No light.",
        "    Not a photon.",
    ]


def test_output_without_any_error_line_is_shown_from_its_end():
    output = "\n".join(f"line {n}" for n in range(20))
    assert "    line 19" in str(explain(output, "failed")).splitlines()


def test_cmakes_notes_on_good_machines_are_not_causes():
    output = (
        "-- Could not find CCache. Consider installing CCache to speed up compilation.\n"
        "-- Could NOT find CUDAToolkit (missing: CUDAToolkit_INCLUDE_DIRS)\n"
        "-- Could NOT find NVTX (missing: NVTX_INCLUDE_DIR)\n"
        "ops.cc:7:1: error: 'x' was not declared"
    )
    assert str(explain(output, "failed")).splitlines() == [
        "failed",
        "    ops.cc:7:1: error: 'x' was not declared",
    ]


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[  3%] Building CXX object gloo/allreduce.cc.o", 3),
        ("[100%] Built target pytorch", 100),
        ("creating build/lib", None),
        ("note: [ 50%] in the middle", None),
    ],
)
def test_percent(line, percent):
    assert percent_in(line) == percent


def test_a_line_every_ten_per_cent_and_never_backwards(capsys):
    progress = BuildProgress()
    with progress.bar:
        for percent in (1, 9, 10, 12, 5, 11, 31, 39, 100, 100):
            progress.read(f"[{percent:3}%] Building")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown] == ["10%", "31%", "100%"]
