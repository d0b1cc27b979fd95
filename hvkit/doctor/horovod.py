"""The installed Horovod: the frameworks, MPI and options of its build, and whether it loads."""

import json
import os
import signal
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvkit.build.abi import Machine
from hvkit.build.cuda import toolkit_for
from hvkit.build.frameworks import NAMES
from hvkit.build.installer import installed_abi, installed_version, serves
from hvkit.build.toolchain import Toolchain, find_toolchain
from hvkit.build.wheel_cache import key_of, stored_ingredients
from hvkit.doctor import load_library
from hvkit.doctor.software import folder_of
from hvkit.errors import BuildError
from hvkit.host.commands import Output, run
from hvkit.launching.launchers import MpiVersion, identify
from hvkit.transport.engines import built_for

_CONTROLLERS = ("mpi", "gloo")
_OPERATIONS = ("nccl", "ddl", "ccl", "mpi", "gloo")
# Import names, by the names that Horovod's build has for frameworks.
_MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
# The folder of a framework's libraries, inside its package.
_LIBRARIES = {"torch": "lib", "tensorflow": ""}
# Reading a gigabyte of libraries takes long if they are not in the disk cache.
_SECONDS_TO_LOAD = 60
_TITLES = {"patches": "hvkit's patches to its source"}
# Ingredients whose values may be shown: no paths, and no variables of the user's.
_SHOWN = {*NAMES, "horovod", "python", "libc", "cpu", "mpi", "compiler", "gpu"}


def horovod() -> tuple[dict[str, Any] | None, str | None]:
    """The Horovod of this Python, and why hvkit cannot build one here.

    Returns:
        ``horovod`` of ``hvkit.doctor.report.json_report``, ``None`` if none is installed; and the
        reason, ``None`` if hvkit can build one.
    """
    version = installed_version()
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(_library, built_for() if version else ()))
    found = {"version": version, "libraries": libraries, "fits": None, "differences": []}
    built = {one["framework"] for one in libraries}
    left_out = [name for name in NAMES if libraries and _MODULES[name] not in built]
    try:
        toolchain = find_toolchain(left_out)
        if any("nccl" in one["operations"] for one in libraries):
            toolchain = replace(toolchain, cuda=toolkit_for("nccl", toolchain.frameworks))
    except BuildError as error:
        return (found if version else None), str(error)
    if version is None:
        return None, None
    fits, differences = _compare(version, toolchain)
    return found | {"fits": fits, "differences": differences}, None


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The ingredients that differ between two builds, with their values where these are safe."""
    names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    return [
        f"{name}: {before.get(name, 'none')} -> {now.get(name, 'none')}"
        if name in _SHOWN
        else _TITLES.get(name, name)
        for name in names
    ]


def library_from(framework: str, version: str | None, output: Output | None) -> dict[str, Any]:
    """The library that ``hvkit.doctor.load_library`` has tried to load.

    Args:
        framework: the framework of the library.
        version: the version of the framework that the library was built for.
        output: the program's output; ``None`` if Python did not start.
    """
    lines = output.stdout.splitlines() if output else []
    line = next((line for line in lines if line.startswith("hvkit:")), None)
    if line is None:
        return _library_keys(framework, version, _load_error(output))
    found = json.loads(line.removeprefix("hvkit:"))
    return _library_keys(framework, version, None, found["features"], identify(found["mpi"] or ""))


def _library_keys(
    framework: str,
    built_for: str | None,
    error: str | None,
    features: Collection[str] = (),
    mpi: MpiVersion | None = None,
) -> dict[str, Any]:
    return {
        "framework": framework,
        "built_for": built_for,
        "error": error,
        "controllers": [name for name in _CONTROLLERS if name in features],
        "operations": [name for name in _OPERATIONS if name in features],
        "mpi": asdict(mpi) if mpi else None,
    }


def _compare(version: str, toolchain: Toolchain) -> tuple[bool, list[str]]:
    key = key_of(toolchain)
    cuda = toolchain.cuda.version if toolchain.cuda else None
    machine = Machine(toolchain.frameworks, toolchain.mpi, cuda, os.environ)
    if key.version == version or serves(installed_abi(), machine):
        return True, []
    before = stored_ingredients(version)
    return False, changes(before, dict(key.ingredients)) if before else []


def _library(framework: str) -> dict[str, Any]:
    place = folder_of("horovod")
    assert place is not None
    file = next(Path(place, framework).glob("mpi_lib*"))
    version = _versions_built_for(place).get(framework)
    package = folder_of(framework)
    if package is None:
        return _library_keys(framework, version, f"{framework} is not installed")
    folders = [str(package / _LIBRARIES[framework]), os.environ.get("LD_LIBRARY_PATH", "")]
    environ = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-I", str(Path(load_library.__file__)), str(file)]
    output = run(command, _SECONDS_TO_LOAD, environ)
    return library_from(framework, version, output)


def _load_error(output: Output | None) -> str:
    if output is None or output.status is None:
        return f"it does not load within {_SECONDS_TO_LOAD} s"
    if output.status < 0:
        return f"loading it ends with {signal.Signals(-output.status).name}"
    return next(reversed(output.stderr.strip().splitlines()), "it does not load")


def _versions_built_for(place: Path) -> dict[str, str]:
    try:
        metadata = json.loads((place / "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    return {_MODULES[name]: metadata[name] for name in NAMES if name in metadata}
