"""From Horovod's source package to a wheel."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hvkit.build import cuda, edits, failures, source
from hvkit.build.cmake import find_cmake
from hvkit.build.environment import build_environment
from hvkit.build.horovod_edits import EDITS
from hvkit.build.key import Key
from hvkit.build.progress import BuildProgress, say
from hvkit.build.toolchain import Toolchain
from hvkit.build.wheels import store
from hvkit.errors import BuildError
from hvkit.host.cache import cache_dir

_MIB = 1024**2
_NEEDED_TO_BUILD = 1024 * _MIB
_NEEDED_TO_KEEP = 256 * _MIB


def build(toolchain: Toolchain, key: Key, jobs: int) -> Path:
    """Build the wheel and return its place in the cache.

    Raises:
        BuildError: fetching, editing or compiling failed; the message says why, what to do, and
            where the full log is.
    """
    with tempfile.TemporaryDirectory(prefix="hvkit-build-") as folder:
        _require_space(Path(folder))
        if toolchain.cuda:
            cuda.ensure(toolchain.cuda)
        archive = source.fetch()
        root = source.unpack(archive, Path(folder))
        made = edits.apply(EDITS, root, toolchain)
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        environ = build_environment(toolchain, jobs, find_cmake(), scratch)
        environ["HOROVOD_LOCAL_VERSION"] = key.local_version
        log = _new_log(key)
        say(f"building Horovod {source.VERSION} for {toolchain}")
        say(f"{len(made)} edits to its source, {jobs} files compiled at once; log: {log}")
        return store(_run(root, environ, log), key)


def _run(root: Path, environ: Mapping[str, str], log: Path) -> Path:
    started = time.monotonic()
    command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", "wheel"]
    with log.open("w", encoding="utf-8") as kept, BuildProgress() as progress:
        kept.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command,
            cwd=root,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as build:
            assert build.stdout is not None
            try:
                for line in build.stdout:
                    kept.write(line)
                    progress.read(line)
            except BaseException:
                # Compilers in flight outlive their make otherwise.
                os.killpg(build.pid, signal.SIGTERM)
                raise
    if build.returncode != 0:
        raise failures.explain(log.read_text(), "compiling Horovod failed", log)
    say(f"built in {time.monotonic() - started:.0f} s")
    return next((root / "wheel").glob("*.whl"))


def _new_log(key: Key) -> Path:
    folder = cache_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"horovod-{key.digest}-{time.strftime('%Y%m%d-%H%M%S')}.log"


def _require_space(scratch: Path) -> None:
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    for folder, variable, needed in (
        (scratch, "TMPDIR", _NEEDED_TO_BUILD),
        (cache, "HVKIT_CACHE_DIR", _NEEDED_TO_KEEP),
    ):
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise BuildError(
                f"not enough disk: {folder} has {free / _MIB:.0f} MiB free, the build needs "
                f"{needed / _MIB:.0f} MiB. Free some, or set {variable} to a folder on another "
                "disk"
            )
