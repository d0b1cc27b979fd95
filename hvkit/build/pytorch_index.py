"""Where ``make`` takes PyTorch from: on a machine without a GPU, its own index of builds for CPUs.

The default build on PyPI brings CUDA, about 6 GB. ``python -m hvkit.build.pytorch_index
constraints.txt auto`` prints the options with which pip finds the smaller one of the same version,
if it takes any, and says on stderr why it cannot be had.
"""

import re
import sys
from pathlib import Path

from hvkit.build.cuda import has_nvidia_gpu
from hvkit.host.commands import Said, ask

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# A network that swallows packets would otherwise hold up the installation for minutes.
_SECONDS = 60
_IMPATIENT = ("--timeout", "5", "--retries", "0", "-vv")


def pip_options(version: str, gpu: str) -> list[str]:
    """The options for ``pip install torch`` that fit this machine; none for pip's default.

    Args:
        version: the version of PyTorch that is to be installed, ``2.13.0``.
        gpu: what Horovod is to be built for, as in ``hvkit install-horovod --gpu``.
    """
    for_gpus = has_nvidia_gpu() if gpu == "auto" else gpu != "none"
    if for_gpus or _offers(version, _versions()):
        return []
    found = _versions("--extra-index-url", CPU_INDEX, *_IMPATIENT)
    if _offers(version, found):
        return ["--extra-index-url", CPU_INDEX]
    print(
        "make: PyTorch's own index of builds for CPUs cannot be used "
        f"({_reason(version, found)}): taking pip's default PyTorch, which may bring 6 GB of CUDA",
        file=sys.stderr,
    )
    return []


def _versions(*options: str) -> Said | None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions"]
    return ask([*pip, *options, "torch"], timeout=_SECONDS)


def _offers(version: str, said: Said | None) -> bool:
    return said is not None and f"{version}+cpu" in re.findall(r"[^\s,]+", said.stdout)


def _reason(version: str, said: Said | None) -> str:
    if said is None or said.status is None:
        return f"no answer in {_SECONDS} s"
    failed = re.search(rf"Could not fetch URL {re.escape(CPU_INDEX)}\S*: (.*)", said.text)
    if failed is None:
        return f"{CPU_INDEX} has no {version} for this Python"
    # pip wraps the cause in two other errors.
    cause = re.search(r"object at \w+>[:,] '?(.*?)'?\)\)", failed[1])
    return f"{CPU_INDEX}: {cause[1] if cause else failed[1].removesuffix(' - skipping')}"


if __name__ == "__main__":
    constraints, gpu = sys.argv[1:]
    pinned = re.search(r"^torch==(\S+)", Path(constraints).read_text(), re.MULTILINE)
    assert pinned is not None, f"{constraints} pins no torch"
    print(*pip_options(pinned[1], gpu))
