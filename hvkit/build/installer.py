"""``hvkit install-horovod``: does nothing, installs a wheel that is there, or builds one first."""

import contextlib
import errno
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from hvkit.build import ready_wheels
from hvkit.build.build_output import announce, explain, run_pip
from hvkit.build.builder import build, default_jobs
from hvkit.build.cuda import cuda_for, toolkit_for
from hvkit.build.frameworks import distribution, find_frameworks
from hvkit.build.horovod_patches import VERSION
from hvkit.build.ready_wheels import ReadyWheel, shown
from hvkit.build.toolchain import Toolchain, find_launching_mpi, find_toolchain
from hvkit.build.wheels import (
    FILE,
    Abi,
    Machine,
    find_wheel,
    key_of,
    lock,
    minors_between,
    misfits,
)
from hvkit.errors import BuildError, is_of_full_disk
from hvkit.host.system import cache_dir, claim, run

# Two wheels may fit: one for the version of PyTorch, one for a neighbour of it.
_TRIES = 2
# Seconds between two looks at whether another process has ended.
_TICK = 0.2
_CHECK = """
import importlib, json, sys
built = {}
for name in sys.argv[1:]:
    hvd = importlib.import_module("horovod." + name)
    built[name] = [engine for engine in ("mpi", "nccl") if getattr(hvd, engine + "_built")()]
print("hvkit:" + json.dumps(built))
"""


@dataclass(frozen=True)
class BuildOptions:
    """The options of ``hvkit install-horovod``."""

    force: bool = False  # build and install again what is already installed
    jobs: int | None = None  # files compiled at once; None for as many as cores and memory allow
    without: Collection[str] = ()  # frameworks to leave out, ``pytorch`` or ``tensorflow``
    gpu: str = "auto"  # ``nccl``, ``none`` or ``auto``: ``nccl`` where there is a GPU
    wheel_dir: Path | None = None  # a folder to copy the wheel to, with its index
    wheels: str | None = None  # a folder or URL of wheels to take one from, if one fits
    install: bool = True  # False leaves what is installed as it is: for ``wheel_dir``


def install_horovod(options: BuildOptions) -> None:
    """Install the Horovod that fits this Python's frameworks and the MPI found."""
    try:
        _install_horovod(options)
    except OSError as error:
        if is_of_full_disk(error):
            raise BuildError(
                f"the disk is full: {error}. Free about 1 GiB, or set TMPDIR and HVKIT_CACHE_DIR "
                "to folders on another disk"
            ) from error
        folders = [cache_dir(), *filter(None, [options.wheel_dir])]
        # The error of a file system without locks names no file.
        if error.errno != errno.ENOLCK and not any(_is_of(error, each) for each in folders):
            raise
        raise BuildError(
            f"{error}: set HVKIT_CACHE_DIR (now {cache_dir()}), or --wheel-dir, to a folder that "
            "hvkit can write to"
        ) from error


def _is_of(error: OSError, folder: Path) -> bool:
    """Whether an error is of a file in a folder, or of one of the folders that this lies in."""
    if not isinstance(error.filename, str):
        return False
    at, folder = Path(error.filename).absolute(), folder.absolute()
    return at.is_relative_to(folder) or folder.is_relative_to(at)


def installed_version() -> str | None:
    """The version of the installed Horovod, with its local part."""
    found = distribution("horovod")
    return found.version if found else None


def installed_abi() -> Abi | None:
    """The facts of the installed Horovod; ``None`` if hvkit has not built it."""
    try:
        file = metadata.distribution("horovod").locate_file(f"horovod/{FILE}")
        return Abi.of(json.loads(Path(str(file)).read_text()))
    except (metadata.PackageNotFoundError, OSError, ValueError, BuildError):
        return None


def _install_horovod(options: BuildOptions) -> None:
    if options.wheel_dir:
        with ready_wheels.lock(options.wheel_dir):  # or fail, before the build
            ready_wheels.entries_in(options.wheel_dir)
    if options.install and not claim(claim_of_environment()):
        announce("another process is installing Horovod into this Python; waiting")
        while not claim(claim_of_environment()):
            time.sleep(_TICK)
    if options.wheels and not options.force and _install_ready(options.wheels, options):
        return
    toolchain = find_toolchain(options.without)
    toolchain = replace(toolchain, cuda=toolkit_for(options.gpu, toolchain.frameworks))
    key = key_of(toolchain)
    with lock(key, lambda: announce("another process is building the same Horovod; waiting")):
        current = installed_version() == key.version and not options.force
        if not current or options.wheel_dir:
            wheel = None if options.force else find_wheel(key)
            if wheel:
                announce(f"using the cached wheel: {wheel}")
            else:
                wheel = build(toolchain, key, options.jobs or default_jobs())
            if options.wheel_dir:
                announce(f"wheel: {ready_wheels.add(wheel, options.wheel_dir)}")
            if options.install and not current:
                install(wheel)
                check(toolchain)
    if options.install:
        already = " already" if current else ""
        announce(f"Horovod {VERSION} for {toolchain} is installed{already}")


def claim_of_environment() -> str:
    """The name of the claim on this Python's packages, which a process holds until it ends.

    Each process would take away the files that another is trying.
    """
    return f"install-horovod {sys.prefix}"


def _install_ready(source: str, options: BuildOptions) -> bool:
    """Install a wheel from a folder or URL; False, with the reason printed, if none will do."""
    mpi, frameworks = find_launching_mpi(), find_frameworks(options.without)
    machine = Machine(frameworks, mpi, cuda_for(options.gpu, frameworks), os.environ)
    installed = installed_abi()
    try:
        found, refused = ready_wheels.fitting(source, machine)
    except BuildError as error:
        announce(f"{error}; so Horovod is built here")
        return False
    if serves(installed, machine) or (found and installed == found[0].abi):
        announce(f"a Horovod {VERSION} that fits is installed already")
        return True
    for wheel in found[:_TRIES]:
        try:
            _install_tried(wheel, source)
            announce(f"Horovod {VERSION} is installed from {wheel.name}")
            return True
        except BuildError as error:
            refused.append(f"{wheel.name}: {error}")
    announce(f"no wheel in {shown(source)} fits; so Horovod is built here")
    for reason in refused or ["there are no wheels"]:
        announce(f"    {reason}")
    return False


def serves(abi: Abi | None, machine: Machine) -> bool:
    """Whether a Horovod is for just these frameworks, in the same minor versions, and fits."""
    if abi is None or misfits(abi, machine):
        return False
    installed = {framework.name: framework.version for framework in machine.frameworks}
    return abi.frameworks.keys() == installed.keys() and not any(
        minors_between(built, installed[name]) for name, built in abi.frameworks.items()
    )


def _install_tried(wheel: ReadyWheel, source: str) -> None:
    """Install a wheel once two ranks have tried it."""
    with tempfile.TemporaryDirectory() as folder:
        path = ready_wheels.fetch(wheel, source, Path(folder))
        _try(path, Path(folder, "tried"))
        install(path)


def _try(wheel: Path, folder: Path) -> None:
    """Test a wheel that is not installed, but unpacked in a folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (tried,) = metadata.distributions(path=[str(folder)])
    if missing := unmet(tried.requires):
        run_pip(["install", *map(str, missing)], f"installing what {wheel.name} needs failed")
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = run([sys.executable, "-m", "hvkit.doctor.self_test"], None, environ)
    assert done is not None
    if done.status != 0:
        raise BuildError(f"its self-test fails: {(done.stderr or done.stdout).strip()}")


def install(wheel: Path) -> None:
    """Install a wheel in place of any other Horovod, then its run-time requirements."""
    summary = f"installing {wheel.name} failed"
    run_pip(["install", "--no-deps", "--force-reinstall", str(wheel)], summary)
    # Each start of pip takes a second or more.
    if unmet(metadata.requires("horovod")):
        run_pip(["install", str(wheel)], summary)


def unmet(requirements: Iterable[str] | None) -> list[Requirement]:
    """Those of a distribution's requirements that this Python lacks."""
    lacking = []
    for text in requirements or ():
        # Metadata of old packages has requirements in forms that were valid once.
        with contextlib.suppress(InvalidRequirement):
            each = Requirement(text)
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                found = distribution(each.name)
                if found is None or not each.specifier.contains(found.version, prereleases=True):
                    lacking.append(each)
    return lacking


def check(toolchain: Toolchain) -> None:
    """Import Horovod in a process of its own, for each framework that it was built for."""
    modules = (each.module for each in toolchain.frameworks)
    done = run([sys.executable, "-P", "-c", _CHECK, *modules], None)
    assert done is not None
    if done.status != 0:
        raise explain(done.text, "Horovod is installed, but importing it failed")
    report = next(line for line in done.stdout.splitlines() if line.startswith("hvkit:"))
    for module, engines in json.loads(report.removeprefix("hvkit:")).items():
        missing = {"mpi", *(["nccl"] if toolchain.cuda else [])} - set(engines)
        if missing:
            raise BuildError(
                f"horovod.{module} was built without {', '.join(sorted(missing))}. "
                "Rebuild it with `hvkit install-horovod --force` and read the log"
            )
