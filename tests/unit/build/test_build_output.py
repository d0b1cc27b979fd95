"""Excerpts of real build output: causes of failure, and progress."""

from pathlib import Path

import pytest

from hvkit.build.build_output import BuildProgress, explain

MODULES = "CMake Error at /usr/share/cmake-3.25/Modules"
NVCC_CANNOT_LINK = (
    f"{MODULES}/CMakeDetermineCompilerId.cmake:739 (message):\n"
    '  Compiling the CUDA compiler identification source file\n  "CMakeCUDACompilerId.cu" failed.\n'
    "\n  The output was:\n\n  1\n\n  #$ LIBRARIES= -L/opt/cuda/lib64\n\n"
    "  /usr/bin/ld: cannot find -lcudart_static: No such\n  file or directory\n\n"
)
NO_HOROVOD = "ERROR: No matching distribution found for horovod==0.28.1"


@pytest.mark.parametrize(
    ("output", "meaning"),
    [
        ("/usr/bin/ld: final link failed: No space left on device", "the disk is full"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("No CMAKE_CXX_COMPILER could be found.", "the C++ compiler does not work"),
        (
            "-- Could NOT find MPI_CXX (missing: MPI_CXX_WORKS)\n"
            f"{MODULES}/FindPackageHandleStandardArgs.cmake:230 (message):\n"
            "  Could NOT find MPI (missing: MPI_CXX_FOUND)",
            "the MPI compiler wrapper exists, but cannot compile a program",
        ),
        ("  Could NOT find NCCL (missing: NCCL_INCLUDE_DIR NCCL_LIBRARY)", "NCCL was not found"),
        ("#error -- unsupported GNU version! gcc versions later", "too new for this CUDA toolkit"),
        (NVCC_CANNOT_LINK, "the CUDA toolkit is incomplete"),
        (
            f"{MODULES}/FindPackageHandleStandardArgs.cmake:230 (message):\n"
            '  Could NOT find CUDAToolkit (missing: CUDA_CUDART) (found version "13.0")\n'
            "Call Stack (most recent call first):\n  cmake/upstream/FindCUDAToolkit.cmake:700 (x)",
            "the CUDA toolkit is incomplete",
        ),
        (
            "CMake Error at horovod/torch/CMakeLists.txt:21 (message):\n  Horovod build with GPU "
            "support was requested but this PyTorch installation does not support CUDA.",
            "the installed PyTorch is the CPU version",
        ),
        ("  Could NOT find Pytorch (missing: Pytorch_VERSION)", "installed but cannot be imported"),
        ("/venv/bin/python: No module named pip", "this Python has no pip"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "is not the official one"),
        (
            "WARNING: Retrying (Retry(total=4)): Failed to establish a new connection\n"
            f"ERROR: Could not find a version that satisfies the requirement\n{NO_HOROVOD}",
            "pip cannot reach the package index",
        ),
        (NO_HOROVOD, "the package index does not have the package"),
    ],
)
def test_known_failure(output, meaning):
    first, *_, last = str(explain(output, "compiling Horovod failed")).splitlines()
    assert first.startswith("compiling Horovod failed: ")
    assert meaning in first
    assert last.startswith("What to do: ")


CMAKE = """\
-- Detecting CXX compile features - done
-- Could NOT find CUDAToolkit (missing: CUDAToolkit_INCLUDE_DIRS)
CMake Error at /usr/share/cmake-3.25/Modules/FindPackage.cmake:230 (message):
  Could NOT find Boson (missing: BOSON_MASS) (found version
  "1.2")
Call Stack (most recent call first):
  cmake/FindBoson.cmake:7 (find_package)

CMake Error at CMakeLists.txt:9 (message):

  No light.

  Not a
  photon.


-- Configuring incomplete, errors occurred!
"""


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        # Each matching line once, and at most five.
        (
            "noise\n" + "\n".join(f"{n % 7}: No space left on device" for n in range(99)),
            [f"{n}: No space left on device" for n in range(5)],
        ),
        (
            "[ 10%] Building\nops.cc:7:1: error: 'x' was not declared\nnote: here\nmake: done",
            ["ops.cc:7:1: error: 'x' was not declared"],
        ),
        (NVCC_CANNOT_LINK, ["/usr/bin/ld: cannot find -lcudart_static: No such file or directory"]),
        # CMake's message, not the place before it; its notes on good machines are no causes.
        (
            CMAKE,
            [
                'Could NOT find Boson (missing: BOSON_MASS) (found version "1.2")',
                "No light.",
                "Not a photon.",
            ],
        ),
        (
            "-- Could NOT find CUDAToolkit (missing: x)\nops.cc:7:1: error: y",
            ["ops.cc:7:1: error: y"],
        ),
        ("\n".join(f"line {n}" for n in range(20)), [f"line {n}" for n in range(15, 20)]),
    ],
)
def test_the_lines_that_matter_are_shown_and_the_log_is_named(output, shown):
    lines = str(explain(output, "failed", Path("/logs/a.log"))).splitlines()
    assert [line for line in lines if line.startswith("    ")] == [f"    {one}" for one in shown]
    assert lines[-1] == "Full log: /logs/a.log"


def test_progress_is_a_line_every_ten_per_cent_and_never_goes_backwards(capsys):
    progress = BuildProgress()
    with progress.bar:
        for percent in (1, 9, 10, 12, 5, 11, 31, 39, 100, 100):
            progress.read(f"[{percent:3}%] Building")
        progress.read("creating build/lib")
        progress.read("note: [ 50%] in the middle")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown] == ["10%", "31%", "100%"]
