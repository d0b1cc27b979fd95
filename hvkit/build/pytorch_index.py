"""Chooses the index from which ``make`` installs PyTorch.

The default build on PyPI contains CUDA, about 6 GB. On a machine without a GPU,
``python -m hvkit.build.pytorch_index constraints.txt auto`` prints the pip options that select the
smaller build for CPUs of the same version. If there is no such build, it prints the reason on
stderr and no options.
"""

import re
import sys
from pathlib import Path

from hvkit.build.cuda import has_nvidia_gpu
from hvkit.host.system import Output, run

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Without these limits, a network that drops packets delays the installation by minutes.
_SECONDS = 60
_IMPATIENT = ("--timeout", "5", "--retries", "0", "-vv")


def pip_options(version: str, gpu: str) -> list[str]:
    """The options for ``pip install torch`` on this machine; empty for pip's default."""
    for_gpus = has_nvidia_gpu() if gpu == "auto" else gpu != "none"
    if for_gpus or _offers(version, _versions()):
        return []
    found = _versions("--extra-index-url", CPU_INDEX, *_IMPATIENT)
    if _offers(version, found):
        return ["--extra-index-url", CPU_INDEX]
    print(
        "make: cannot use PyTorch's own index of builds for CPUs "
        f"({_reason(version, found)}): installing pip's default PyTorch, which may include 6 GB of "
        "CUDA",
        file=sys.stderr,
    )
    return []


def _versions(*options: str) -> Output | None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions"]
    return run([*pip, *options, "torch"], timeout=_SECONDS)


def _offers(version: str, output: Output | None) -> bool:
    return output is not None and f"{version}+cpu" in re.findall(r"[^\s,]+", output.stdout)


def _reason(version: str, output: Output | None) -> str:
    if output is None or output.status is None:
        return f"no answer in {_SECONDS} s"
    failed = re.search(rf"Could not fetch URL {re.escape(CPU_INDEX)}.*", output.text)
    return failed[0] if failed else f"{CPU_INDEX} has no {version} for this Python"


if __name__ == "__main__":
    constraints, gpu = sys.argv[1:]
    pinned = re.search(r"^torch==(\S+)", Path(constraints).read_text(), re.MULTILINE)
    assert pinned is not None, f"{constraints} pins no torch"
    print(*pip_options(pinned[1], gpu))
