"""``hvkit install-horovod``: one Horovod for what is installed, built at most once per user."""

import errno
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from hvkit.build import builder, installed, wheels
from hvkit.build.cuda import toolkit_for
from hvkit.build.key import Key, key_of
from hvkit.build.progress import say
from hvkit.build.resources import default_jobs
from hvkit.build.source import VERSION
from hvkit.build.toolchain import Toolchain, find_toolchain
from hvkit.errors import BuildError


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        force: build and install even if that has been done already.
        jobs: files compiled at once; ``None`` for as many as cores and memory allow.
        without: frameworks to leave out, ``pytorch`` or ``tensorflow``.
        gpu: ``nccl`` for collectives on GPUs, ``none`` for a build without CUDA, ``auto`` for
            NCCL where there is a GPU.
        wheel_dir: a folder that gets a copy of the wheel.
    """

    force: bool = False
    jobs: int | None = None
    without: Collection[str] = ()
    gpu: str = "auto"
    wheel_dir: Path | None = None


def install_horovod(options: Options) -> None:
    """Make this Python's Horovod the one built for its frameworks and for the MPI found.

    Raises:
        BuildError: something is missing or fails; the message says what to do.
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


def _install_horovod(options: Options) -> None:
    toolchain = find_toolchain(options.without)
    toolchain = replace(toolchain, cuda=toolkit_for(options.gpu, toolchain.frameworks))
    key = key_of(toolchain)
    with wheels.lock(key, lambda: say("another process is building the same Horovod; waiting")):
        current = installed.installed_version() == key.version and not options.force
        if not current or options.wheel_dir:
            wheel = _wheel(toolchain, key, options)
            if options.wheel_dir:
                options.wheel_dir.mkdir(parents=True, exist_ok=True)
                say(f"wheel: {shutil.copy(wheel, options.wheel_dir)}")
        if current:
            say(f"Horovod {VERSION} for {toolchain} is installed already")
            return
        installed.install(wheel)
        installed.check(toolchain)
    say(f"Horovod {VERSION} is installed for {toolchain}")


def _wheel(toolchain: Toolchain, key: Key, options: Options) -> Path:
    cached = wheels.find(key)
    if cached and not options.force:
        say(f"taking the wheel built before: {cached}")
        return cached
    return builder.build(toolchain, key, options.jobs or default_jobs())
