"""``hvkit install-horovod``: does nothing, installs the cached wheel, or builds one first."""

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from hvkit.build.build_output import announce, explain, run_pip
from hvkit.build.builder import build, default_jobs
from hvkit.build.cuda import toolkit_for
from hvkit.build.horovod_patches import VERSION
from hvkit.build.toolchain import Toolchain, find_toolchain
from hvkit.build.wheel_cache import Key, find_wheel, key_of, lock
from hvkit.errors import BuildError

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
    """The options of ``hvkit install-horovod``.

    Attributes:
        force: build and install again what is already installed.
        jobs: files compiled at once; ``None`` for as many as cores and memory allow.
        without: frameworks to leave out, ``pytorch`` or ``tensorflow``.
        gpu: ``nccl`` for collectives on GPUs, ``none`` for a build without CUDA, ``auto`` for
            NCCL where there is a GPU.
        wheel_dir: a folder to copy the wheel to.
    """

    force: bool = False
    jobs: int | None = None
    without: Collection[str] = ()
    gpu: str = "auto"
    wheel_dir: Path | None = None


def install_horovod(options: BuildOptions) -> None:
    """Install the Horovod that fits this Python's frameworks and the MPI found.

    Raises:
        BuildError: something is missing or fails; the message names the remedy.
    """
    try:
        _install_horovod(options)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildError(
            f"the disk is full: {error}. Free about 1 GiB, or set TMPDIR and HVKIT_CACHE_DIR to "
            "folders on another disk"
        ) from error


def installed_version() -> str | None:
    """The version of the installed Horovod, with its local part."""
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None


def _install_horovod(options: BuildOptions) -> None:
    toolchain = find_toolchain(options.without)
    toolchain = replace(toolchain, cuda=toolkit_for(options.gpu, toolchain.frameworks))
    key = key_of(toolchain)
    with lock(key, lambda: announce("another process is building the same Horovod; waiting")):
        current = installed_version() == key.version and not options.force
        if not current or options.wheel_dir:
            wheel = _wheel(toolchain, key, options)
            if options.wheel_dir:
                options.wheel_dir.mkdir(parents=True, exist_ok=True)
                announce(f"wheel: {shutil.copy(wheel, options.wheel_dir)}")
        if current:
            announce(f"Horovod {VERSION} for {toolchain} is installed already")
            return
        install(wheel)
        check(toolchain)
    announce(f"Horovod {VERSION} is installed for {toolchain}")


def _wheel(toolchain: Toolchain, key: Key, options: BuildOptions) -> Path:
    cached = find_wheel(key)
    if cached and not options.force:
        announce(f"using the cached wheel: {cached}")
        return cached
    return build(toolchain, key, options.jobs or default_jobs())


def install(wheel: Path) -> None:
    """Install a wheel in place of any other Horovod, then its run-time requirements."""
    summary = f"installing {wheel.name} failed"
    run_pip(["install", "--no-deps", "--force-reinstall", str(wheel)], summary)
    run_pip(["install", str(wheel)], summary)


def check(toolchain: Toolchain) -> None:
    """Import Horovod in a process of its own, for each framework that it was built for.

    Raises:
        BuildError: an import fails, or Horovod lacks MPI, or lacks NCCL in a build for it.
    """
    modules = [framework.module for framework in toolchain.frameworks]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHECK, *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise explain(done.stdout, "Horovod is installed, but importing it failed")
    report = next(line for line in done.stdout.splitlines() if line.startswith("hvkit:"))
    for module, engines in json.loads(report.removeprefix("hvkit:")).items():
        missing = {"mpi", *(["nccl"] if toolchain.cuda else [])} - set(engines)
        if missing:
            raise BuildError(
                f"horovod.{module} was built without {', '.join(sorted(missing))}. "
                "Rebuild it with `hvkit install-horovod --force` and read the log"
            )
