"""Versions of the packages that have to fit together, from their metadata: nothing is imported."""

import importlib.util
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from hvkit.build.frameworks import DISTRIBUTIONS

# Whose requirements are looked at. TensorFlow comes in one of several.
_ROOTS = ("hvkit", "torch", "keras", "horovod", *DISTRIBUTIONS["tensorflow"])


@dataclass(frozen=True)
class Unmet:
    """A requirement that is not met.

    Attributes:
        package: who has it, with its version.
        requirement: what it needs: ``keras>=3.12``.
        installed: the version that is there; ``None`` for none.
    """

    package: str
    requirement: str
    installed: str | None


@dataclass(frozen=True)
class Packages:
    """What is installed.

    Attributes:
        versions: by name; ``None`` for what is not installed.
        tensorflows: every package that brings a TensorFlow, with its version.
        torch_cuda: the CUDA version that PyTorch was built for; ``None`` for its CPU version.
        unmet: requirements of these packages that are not met.
    """

    versions: dict[str, str | None]
    tensorflows: tuple[str, ...]
    torch_cuda: str | None
    unmet: tuple[Unmet, ...]


def packages() -> Packages:
    """What is installed beside this Python."""
    found = {name: _version(name) for name in _ROOTS}
    tensorflows = {n: v for n in DISTRIBUTIONS["tensorflow"] if (v := found[n]) is not None}
    return Packages(
        versions={
            "python": platform.python_version(),
            "hvkit": found["hvkit"],
            "torch": found["torch"],
            "tensorflow": next(iter(tensorflows.values()), None),
            "keras": found["keras"],
            "numpy": _version("numpy"),
            "horovod": found["horovod"],
            "mpi4py": _version("mpi4py"),
        },
        tensorflows=tuple(f"{name} {version}" for name, version in tensorflows.items()),
        torch_cuda=_torch_cuda(),
        unmet=tuple(lack for name in _ROOTS if found[name] for lack in _unmet(name)),
    )


def folder_of(module: str) -> Path | None:
    """The folder of a top-level package, without importing it."""
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(name: str) -> list[Unmet]:
    lacks = []
    for text in metadata.requires(name) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            # Metadata of old packages has requirements in forms that were valid once.
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            lacks.append(Unmet(f"{name} {_version(name)}", needed, installed))
    return lacks


def _torch_cuda() -> str | None:
    folder = folder_of("torch")
    file = folder / "version.py" if folder else None
    if file is None or not file.is_file():
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", file.read_text(), re.MULTILINE)
    return match[1] if match else None
