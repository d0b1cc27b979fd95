"""The per-user cache of built wheels, and the key under which each one lies.

The key lists everything that changes the binary. Its digest is part of the wheel's version, so that
an installed Horovod shows which build it is.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hvkit.build.frameworks import NAMES
from hvkit.build.horovod_patches import PATCHES, VERSION, patches_digest
from hvkit.build.toolchain import Toolchain, run_time_paths, user_build_options
from hvkit.errors import BuildError, is_of_full_disk
from hvkit.host.system import cache_dir


@dataclass(frozen=True)
class Key:
    """Everything that a wheel was built from, by name, as readable text."""

    ingredients: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A short hash of all the ingredients."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def version(self) -> str:
        """The version of the wheel: Horovod's, with the digest as its local part."""
        return f"{VERSION}+{self.local_version}"

    @property
    def local_version(self) -> str:
        """The local part of the version."""
        return f"hvkit{self.digest}"

    @property
    def text(self) -> str:
        """The ingredients as JSON."""
        return json.dumps(dict(self.ingredients), indent=2) + "\n"


def key_of(toolchain: Toolchain, environ: Mapping[str, str] = os.environ) -> Key:
    """The key of the wheel that this toolchain builds."""
    mpi, compiler = toolchain.mpi, toolchain.compiler
    return Key(
        {
            "horovod": VERSION,
            "patches": patches_digest(PATCHES),
            "python": str(sysconfig.get_config_var("SOABI")),
            "platform": sysconfig.get_platform(),
            "libc": " ".join(platform.libc_ver()),
            "cpu": " ".join(cpu_features()),
            **{name: _framework_version(toolchain, name) for name in NAMES},
            "mpi": f"{mpi.flavour} {mpi.version}",
            "compiler": " ".join([compiler.version.partition("\n")[0], *compiler.command[1:]]),
            "gpu": f"NCCL, CUDA {toolchain.cuda.version}" if toolchain.cuda else "none",
            "run-time paths": ":".join(run_time_paths(toolchain, environ)),
            **user_build_options(environ),
        }
    )


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets of this CPU that Horovod's build uses where it finds them."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return sorted({"avx", "f16c", "fma"} & set(flags[1].split() if flags else ()))


def _framework_version(toolchain: Toolchain, name: str) -> str:
    framework = toolchain.framework(name)
    return framework.version if framework else "none"


def wheels_dir() -> Path:
    """The folder of the cache; creates it if it is missing."""
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def require_writable_cache() -> None:
    """Make the folder of the cache, and check that it can hold a build.

    Raises:
        BuildError: it cannot be made or written to.
    """
    try:
        with tempfile.TemporaryFile(dir=wheels_dir()):
            pass
    except OSError as error:
        if is_of_full_disk(error):
            raise
        raise BuildError(
            f"hvkit's cache, {cache_dir()}, cannot be written to ({error.strerror}): set "
            "HVKIT_CACHE_DIR to a folder that can"
        ) from error


def find_wheel(key: Key) -> Path | None:
    """The cached wheel with this key; ``None`` if there is none."""
    return next(wheels_dir().glob(f"horovod-{key.version}-*.whl"), None)


def store_wheel(wheel: Path, key: Key) -> Path:
    """Copy a wheel into the cache, with its ingredients beside it, and return the copy.

    The copy appears whole or not at all.
    """
    target = wheels_dir() / wheel.name
    ingredients = target.with_suffix(".json")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        text = Path(folder, ingredients.name)
        text.write_text(key.text)
        os.replace(text, ingredients)
        os.replace(shutil.copyfile(wheel, Path(folder, wheel.name)), target)
    return target


def stored_ingredients(version: str) -> dict[str, str] | None:
    """The ingredients of a wheel that this cache has, or had, by the wheel's version."""
    file = next((cache_dir() / "wheels").glob(f"horovod-{version}-*.json"), None)
    ingredients: dict[str, str] | None = json.loads(file.read_text()) if file else None
    return ingredients


@contextmanager
def lock(key: Key, when_waiting: Callable[[], None]) -> Iterator[None]:
    """Keep other processes of this user from building and installing the same wheel.

    ``when_waiting`` is called once if another process holds the lock.
    """
    file = FileLock(wheels_dir() / f"{key.digest}.lock")
    try:
        file.acquire(blocking=False)
    except Timeout:
        when_waiting()
        file.acquire()
    try:
        yield
    finally:
        file.release()
