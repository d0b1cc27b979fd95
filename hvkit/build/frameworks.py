"""The frameworks that are installed beside hvkit, found without importing them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvkit.errors import BuildError

# Every package below brings the same import name; a user has one of them.
DISTRIBUTIONS = {
    "pytorch": ("torch",),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-rocm",
        "tensorflow-cpu-aws",
        "intel-tensorflow",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
}
NAMES = tuple(DISTRIBUTIONS)
_TITLES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
_MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
# Where a framework writes down what it was built for, and how.
_CUDA_WRITTEN = {
    "pytorch": ("torch/version.py", r"^cuda\b.*= '(\d+\.\d+)"),
    "tensorflow": ("tensorflow/python/platform/build_info.py", r"'cuda_version', '(\d+\.\d+)"),
}


@dataclass(frozen=True)
class Framework:
    """An installed framework.

    Attributes:
        name: ``pytorch`` or ``tensorflow``.
        version: its full version, for instance ``2.13.0+cpu``.
        location: the folder that holds its package.
    """

    name: str
    version: str
    location: Path

    @property
    def module(self) -> str:
        """What it is imported as."""
        return _MODULES[self.name]

    @property
    def cuda(self) -> str | None:
        """The CUDA version that it was built for, ``13.0``; ``None`` for a build for CPUs.

        Read from the files, as the version does not say: the index's plain ``2.13.0`` of PyTorch
        is a build for CUDA on some platforms and one for CPUs on others.
        """
        file, pattern = _CUDA_WRITTEN[self.name]
        path = self.location / file
        found = re.search(pattern, path.read_text(), re.MULTILINE) if path.is_file() else None
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{_TITLES[self.name]} {self.version}"


def find_frameworks(without: Collection[str] = ()) -> tuple[Framework, ...]:
    """The installed frameworks, less those named in ``without``.

    Raises:
        BuildError: there is none to build for.
    """
    installed = [found for name in NAMES if (found := _find(name)) is not None]
    wanted = tuple(framework for framework in installed if framework.name not in without)
    if not wanted:
        if installed:
            names = " and ".join(map(str, installed))
            raise BuildError(
                f"nothing to build Horovod for: {names} left out by --without. "
                "Leave out at most one of them"
            )
        raise BuildError(
            "no framework installed: Horovod is built for the PyTorch and the TensorFlow that "
            "are there. Install one first: `pip install torch` or `pip install tensorflow-cpu`"
        )
    return wanted


def _find(name: str) -> Framework | None:
    for distribution in DISTRIBUTIONS[name]:
        try:
            found = metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        return Framework(name, found.version, Path(str(found.locate_file(""))))
    return None
