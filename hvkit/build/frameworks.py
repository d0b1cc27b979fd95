"""Finds the installed frameworks without importing them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvkit.errors import BuildError

# Packages that contain the framework; a user has one of them.
DISTRIBUTIONS = {
    "pytorch": ("torch",),
    "tensorflow": (
        *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm"),
        *("tensorflow-cpu-aws", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
    ),
}
NAMES = tuple(DISTRIBUTIONS)
_TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
# The file of each framework that records its CUDA version, and the record's pattern.
_CUDA_RECORDS = {
    "pytorch": ("torch/version.py", r"^cuda\b[^=\n]*=\s*['\"](\d+\.\d+)"),
    "tensorflow": ("tensorflow/python/platform/build_info.py", r"'cuda_version', '(\d+\.\d+)"),
}


@dataclass(frozen=True)
class InstalledFramework:
    name: str  # ``pytorch`` or ``tensorflow``
    version: str  # in full, for instance ``2.13.0+cpu``
    location: Path  # the folder that contains its package

    @property
    def module(self) -> str:
        return MODULES[self.name]

    @property
    def cuda(self) -> str | None:
        return cuda_version(self.name, self.location)

    def __str__(self) -> str:
        return f"{title(self.name)} {self.version}"


def title(name: str) -> str:
    return _TITLES[name]


def distribution(name: str) -> metadata.Distribution | None:
    """The installed package of this name; ``None`` if there is none."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def find_frameworks(without: Collection[str] = ()) -> tuple[InstalledFramework, ...]:
    """The installed frameworks, except those named in ``without``."""
    installed = [found for name in NAMES if (found := _find(name)) is not None]
    if wanted := tuple(each for each in installed if each.name not in without):
        return wanted
    if installed:
        raise BuildError(
            f"no framework to build Horovod for: {' and '.join(map(str, installed))} left out by "
            "--without. Leave out at most one of them"
        )
    raise BuildError(
        "no framework installed: hvkit builds Horovod for the installed PyTorch and TensorFlow. "
        "Install one first: `pip install torch` or `pip install tensorflow-cpu`"
    )


def cuda_version(name: str, location: Path) -> str | None:
    """The CUDA version that a framework was built for, ``13.0``; ``None`` for a build for CPUs.

    The framework's files record it. Its version does not: PyPI's plain ``2.13.0`` of PyTorch is a
    build for CUDA on some platforms and one for CPUs on others.
    """
    file, pattern = _CUDA_RECORDS[name]
    path = location / file
    found = re.search(pattern, path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1] if found else None


def _find(name: str) -> InstalledFramework | None:
    for found in filter(None, map(distribution, DISTRIBUTIONS[name])):
        return InstalledFramework(name, found.version, Path(str(found.locate_file(""))))
    return None
