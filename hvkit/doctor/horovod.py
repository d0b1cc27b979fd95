"""The Horovod that is installed: what it was built for, and whether it loads."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hvkit.build.cuda import toolkit_for
from hvkit.build.frameworks import NAMES
from hvkit.build.installed import installed_version
from hvkit.build.key import key_of
from hvkit.build.toolchain import Toolchain, find_toolchain
from hvkit.doctor import library
from hvkit.doctor.packages import folder_of
from hvkit.engines import built_for
from hvkit.errors import BuildError
from hvkit.host.cache import cache_dir
from hvkit.host.commands import Said, ask
from hvkit.launch.launchers import MpiVersion, identify

_CONTROLLERS = ("mpi", "gloo")
_OPERATIONS = ("nccl", "ddl", "ccl", "mpi", "gloo")
# Import names, by the names that Horovod's build has for frameworks.
_MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
# Where a framework keeps its libraries, below its package.
_LIBRARIES = {"torch": "lib", "tensorflow": ""}
# A cold disk gives a gigabyte of libraries slowly.
_SECONDS_TO_LOAD = 60
_TITLES = {"edits": "hvkit's edits of its source"}
# Ingredients of a build whose values are shown: they hold no path and nothing of a user's.
_SHOWN = {*NAMES, "horovod", "python", "libc", "cpu", "mpi", "compiler", "gpu"}


@dataclass(frozen=True)
class Library:
    """Horovod's library for one framework.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        built_for: the version of the framework; ``None`` if Horovod does not tell.
        error: why it does not load; ``None`` if it does.
        controllers: what can agree on the order of operations, of ``mpi`` and ``gloo``.
        operations: what can carry them out: these two and ``nccl``, ``ddl``, ``ccl``.
        mpi: the MPI that it loads; ``None`` if it needs none.
    """

    framework: str
    built_for: str | None
    error: str | None
    controllers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    mpi: MpiVersion | None = None


@dataclass(frozen=True)
class Horovod:
    """The installed Horovod.

    Attributes:
        version: its version; ``None`` if none is installed.
        libraries: those for the frameworks that it was built for.
        fits: whether it is the build that hvkit would make here and now; ``None`` if that cannot
            be told.
        differences: what has changed since it was built, as far as that is known.
        cannot_build: why hvkit could not build one here; ``None`` if it could.
    """

    version: str | None
    libraries: tuple[Library, ...]
    fits: bool | None
    differences: tuple[str, ...]
    cannot_build: str | None

    def library(self, framework: str) -> Library | None:
        """The library for a framework."""
        return next((one for one in self.libraries if one.framework == framework), None)


def horovod() -> Horovod:
    """What there is of Horovod in this Python."""
    version = installed_version()
    with ThreadPoolExecutor() as pool:
        libraries = tuple(pool.map(_library, built_for() if version else ()))
    nccl = any("nccl" in one.operations for one in libraries)
    left_out = [
        name
        for name in NAMES
        if libraries and all(one.framework != _MODULES[name] for one in libraries)
    ]
    try:
        toolchain = find_toolchain(left_out)
        if nccl:
            toolchain = replace(toolchain, cuda=toolkit_for("nccl", toolchain.frameworks))
    except BuildError as error:
        return Horovod(version, libraries, None, (), str(error))
    if version is None:
        return Horovod(None, (), None, (), None)
    fits, differences = _compare(version, toolchain)
    return Horovod(version, libraries, fits, differences, None)


def changes(before: dict[str, str], now: dict[str, str]) -> tuple[str, ...]:
    """The ingredients that differ between two builds; values only where they are no secret."""
    names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    return tuple(
        f"{name}: {before.get(name, 'none')} -> {now.get(name, 'none')}"
        if name in _SHOWN
        else _TITLES.get(name, name)
        for name in names
    )


def _compare(version: str, toolchain: Toolchain) -> tuple[bool, tuple[str, ...]]:
    key = key_of(toolchain)
    if key.version == version:
        return True, ()
    file = next((cache_dir() / "wheels").glob(f"horovod-{version}-*.json"), None)
    return False, changes(json.loads(file.read_text()), dict(key.ingredients)) if file else ()


def _library(framework: str) -> Library:
    place = folder_of("horovod")
    assert place is not None
    file = next(Path(place, framework).glob("mpi_lib*"))
    versions = _versions_built_for(place)
    needed = folder_of(framework)
    if needed is None:
        return Library(framework, versions.get(framework), f"{framework} is not installed")
    folders = [str(needed / _LIBRARIES[framework]), os.environ.get("LD_LIBRARY_PATH", "")]
    environ = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-I", str(Path(library.__file__)), str(file)]
    return answer(framework, versions.get(framework), ask(command, _SECONDS_TO_LOAD, environ))


def answer(framework: str, version: str | None, said: Said | None) -> Library:
    """The library, from what :mod:`hvkit.doctor.library` said of it.

    Args:
        framework: whose library it is.
        version: the framework's version that it was built for.
        said: ``None`` if Python could not be started.
    """
    lines = said.stdout.splitlines() if said else []
    found = next((line for line in lines if line.startswith("hvkit:")), None)
    if found is None:
        return Library(framework, version, _why(said))
    told = json.loads(found.removeprefix("hvkit:"))
    return Library(
        framework,
        version,
        None,
        tuple(name for name in _CONTROLLERS if name in told["features"]),
        tuple(name for name in _OPERATIONS if name in told["features"]),
        identify(told["mpi"] or ""),
    )


def _why(said: Said | None) -> str:
    if said is None or said.status is None:
        return f"it does not load within {_SECONDS_TO_LOAD} s"
    if said.status < 0:
        return f"loading it ends with {signal.Signals(-said.status).name}"
    return next(reversed(said.stderr.strip().splitlines()), "it does not load")


def _versions_built_for(place: Path) -> dict[str, str]:
    try:
        told = json.loads((place / "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    return {_MODULES[name]: told[name] for name in NAMES if name in told}
