"""Builds Horovod's wheel: fetches the official source, patches and compiles it, keeps the wheel."""

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hvkit.build.build_output import BuildProgress, announce, explain, run_pip
from hvkit.build.cuda import fetch_toolkit
from hvkit.build.horovod_patches import PATCHES, VERSION, apply_patches
from hvkit.build.toolchain import Toolchain, build_environment, find_cmake
from hvkit.build.wheels import Key, store_wheel, with_facts
from hvkit.errors import BuildError
from hvkit.host.hardware import free_memory
from hvkit.host.system import cache_dir

SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
ARCHIVE = f"horovod-{VERSION}.tar.gz"

# The largest translation units include all of TensorFlow's or PyTorch's headers.
_BYTES_PER_JOB = 2 * 1024**3


def build(toolchain: Toolchain, key: Key, jobs: int) -> Path:
    """Build the wheel, ``jobs`` files at once, and return its path in the cache."""
    with tempfile.TemporaryDirectory(prefix="hvkit-build-") as folder:
        if toolchain.cuda:
            fetch_toolkit(toolchain.cuda)
        root = unpack(fetch_source(), Path(folder))
        applied = apply_patches(PATCHES, root, toolchain)
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        environ = build_environment(toolchain, jobs, find_cmake(), scratch)
        environ["HOROVOD_LOCAL_VERSION"] = f"hvkit{key.digest}"
        log = _new_log(key)
        announce(f"building Horovod {VERSION} for {toolchain}")
        announce(f"{len(applied)} patches applied, {jobs} files compiled at once; log: {log}")
        return store_wheel(with_facts(_compile(root, environ, log), toolchain, os.environ), key)


def fetch_source() -> Path:
    """The official source package, from the cache or from the package index that pip uses."""
    archive = cache_dir() / "source" / ARCHIVE
    if archive.is_file() and _sha256(archive) == SHA256:
        return archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        downloaded = _download(Path(folder), archive)
        if (found := _sha256(downloaded)) != SHA256:
            raise BuildError(
                f"{ARCHIVE} is not the official Horovod {VERSION}: its SHA-256 is {found}, "
                f"expected {SHA256}. Check which package index pip uses with `pip config list`"
            )
        os.replace(downloaded, archive)
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the package into ``folder`` and return the root of the source."""
    with tarfile.open(archive) as package:
        # Python before 3.11.4 has no filters. The checksum has proved the package harmless.
        package.extraction_filter = getattr(tarfile, "data_filter", None)
        package.extractall(folder)
    return folder / ARCHIVE.removesuffix(".tar.gz")


def default_jobs() -> int:
    """The number of files to compile at once here, by cores and free memory; at least one."""
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // _BYTES_PER_JOB))


def _download(folder: Path, cached: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    try:
        run_pip(
            ["download", *options, "--dest", str(folder), "--requirement", str(requirements)],
            summary=f"fetching the source of Horovod {VERSION} failed",
        )
    except BuildError as error:
        raise BuildError(f"{error}\nWithout an index: put {ARCHIVE} at {cached}") from None
    return folder / ARCHIVE


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compile(root: Path, environ: Mapping[str, str], log: Path) -> Path:
    started = time.monotonic()
    command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", "wheel"]
    progress = BuildProgress()
    with log.open("w", encoding="utf-8") as full, progress.bar:
        full.write(f"$ {' '.join(command)}\n")
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
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    full.write(line)
                    progress.read(line)
            except BaseException:
                # Running compilers would outlive their make.
                os.killpg(process.pid, signal.SIGTERM)
                raise
    if process.returncode != 0:
        raise explain(log.read_text(), "compiling Horovod failed", log)
    announce(f"built in {time.monotonic() - started:.0f} s")
    return next((root / "wheel").glob("*.whl"))


def _new_log(key: Key) -> Path:
    folder = cache_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"horovod-{key.digest}-{time.strftime('%Y%m%d-%H%M%S')}.log"
