"""Wheels as files: the facts inside them, two joined into one, and the cache of those built here.

A wheel is a zip file with a list of its members' hashes, ``RECORD``. Each change here writes the
whole wheel anew, with a new list.

The cache keeps each wheel under a key, which lists everything that changes the binary. The key's
digest is part of the wheel's version, so that an installed Horovod shows which build it is.
"""

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from hvkit.build.abi import FILE, Abi, abi_of
from hvkit.build.frameworks import NAMES
from hvkit.build.horovod_patches import PATCHES, VERSION, patches_digest
from hvkit.build.toolchain import Toolchain, cpu_features, run_time_paths, user_build_options
from hvkit.errors import BuildError, is_of_full_disk
from hvkit.host.system import cache_dir

_FACTS = f"horovod/{FILE}"
_NO_ZIP = (zipfile.BadZipFile, zlib.error, EOFError)
_METADATA = "horovod/metadata.json"
_EXECUTABLE = 0o100755 << 16
_LIBRARY = re.compile(r"horovod/\w+/mpi_lib[^/]*\.so")


def facts_of(wheel: Path) -> Abi:
    """The facts inside a wheel."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            return Abi.of(json.loads(opened.read(_FACTS)))
    # Of zipfile, too: NotImplementedError and RuntimeError, which RecursionError is as well.
    except (OSError, LookupError, ValueError, RuntimeError, *_NO_ZIP) as error:
        raise BuildError(f"{wheel} is no wheel of Horovod from hvkit: {error}") from error


def with_facts(wheel: Path, toolchain: Toolchain, environ: Mapping[str, str]) -> Path:
    """Put the facts of a fresh build into its wheel, and its platform into the wheel's tag.

    The wheel is replaced by the one that is returned, in the same folder.
    """
    members = _members(wheel)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as opened:
        libraries = [opened.extract(n, folder) for n in filter(_LIBRARY.fullmatch, members)]
        abi = abi_of(list(map(Path, libraries)), toolchain, environ)
    wheel.unlink()
    return _write(wheel.parent, _version(members), {**members, _FACTS: abi.text.encode()}, abi)


def join(wheels: Sequence[Path], folder: Path) -> Path:
    """One wheel of Horovod, written into ``folder``, with the libraries of several.

    Each of them, at least one, is for another framework and fits the same machine.
    """
    if len(wheels) == 1:
        return wheels[0]
    abi = joined_facts([facts_of(wheel) for wheel in wheels])
    parts = [_members(wheel) for wheel in wheels]
    joined = {name: data for members in reversed(parts) for name, data in members.items()}
    joined[_FACTS] = abi.text.encode()
    # Horovod reads the versions of frameworks here.
    joined[_METADATA] = json.dumps(abi.frameworks).encode()
    versions = [_version(members) for members in parts]
    digest = hashlib.sha256(" ".join(sorted(versions)).encode()).hexdigest()[:12]
    pattern = re.compile(rb"^Requires-Dist: .*$", re.MULTILINE)
    needed = [line for part in parts for line in pattern.findall(part["dist-info/METADATA"])]
    return _write(folder, f"{VERSION}+hvkit{digest}", joined, abi, needed)


def joined_facts(facts: Sequence[Abi]) -> Abi:
    """The facts of a wheel that has the libraries of several, each for another framework."""
    return replace(
        facts[0],
        frameworks={name: of for each in facts for name, of in each.frameworks.items()},
        platform=max((each.platform for each in facts), key=_glibc),
        cpu=tuple(sorted({feature for each in facts for feature in each.cpu})),
    )


def _members(wheel: Path) -> dict[str, bytes]:
    """The files in a wheel but for ``RECORD``; those about the wheel below ``dist-info/``."""
    with zipfile.ZipFile(wheel) as opened:
        return {
            re.sub(r"^[^/]*\.dist-info/", "dist-info/", name): opened.read(name)
            for name in opened.namelist()
            if not name.endswith((".dist-info/RECORD", "/"))
        }


def _version(members: Mapping[str, bytes]) -> str:
    found = re.search(rb"^Version: (\S+)", members["dist-info/METADATA"], re.MULTILINE)
    assert found is not None
    return found[1].decode()


def _write(
    folder: Path,
    version: str,
    members: Mapping[str, bytes],
    abi: Abi,
    requirements: Sequence[bytes] = (),
) -> Path:
    """Write a wheel of these files; the version, the tag and more requirements go into them."""
    about = members["dist-info/METADATA"]
    about = re.sub(rb"(?m)^Version: .*$", b"Version: " + version.encode(), about, count=1)
    more = [line for line in dict.fromkeys(requirements) if line not in about.splitlines()]
    about = re.sub(rb"\n\n|\Z", b"".join(b"\n" + line for line in more) + b"\n\n", about, count=1)
    python = re.search(rb"^Tag: ([^-]+-[^-]+)-", members["dist-info/WHEEL"], re.MULTILINE)
    assert python is not None
    tag = f"{python[1].decode()}-{abi.platform}"
    about_wheel = re.sub(rb"(?m)^Tag: .*$", b"Tag: " + tag.encode(), members["dist-info/WHEEL"])
    written = {**members, "dist-info/METADATA": about, "dist-info/WHEEL": about_wheel}
    folder_inside = f"horovod-{version}.dist-info/"
    named = {re.sub("^dist-info/", folder_inside, name): data for name, data in written.items()}
    listed = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in named.items()]
    record = f"{folder_inside}RECORD"
    named[record] = "\n".join([*listed, f"{record},,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in named.items():
            # Without times, so that the same files make the same wheel.
            member = zipfile.ZipInfo(name)
            member.external_attr = _EXECUTABLE if _LIBRARY.fullmatch(name) else 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(member, data)
    return path


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _glibc(platform: str) -> int:
    found = re.match(r"manylinux_2_(\d+)_", platform)
    return int(found[1]) if found else 1000


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
        """Horovod's version, with the digest as its local part."""
        return f"{VERSION}+hvkit{self.digest}"

    @property
    def text(self) -> str:
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


def _framework_version(toolchain: Toolchain, name: str) -> str:
    return framework.version if (framework := toolchain.framework(name)) else "none"


def wheels_dir() -> Path:
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def require_writable_cache() -> None:
    """Make the folder of the cache, and check that it can hold a build."""
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
    """Copy a wheel into the cache, with its ingredients; it appears completely or not at all."""
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


def lock(key: Key, when_waiting: Callable[[], None]) -> AbstractContextManager[object]:
    """Keep other processes of this user from building and installing the same wheel."""
    file = FileLock(wheels_dir() / f"{key.digest}.lock")
    try:
        return file.acquire(blocking=False)
    except Timeout:
        when_waiting()
        return file.acquire()
