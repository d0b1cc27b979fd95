"""Wheels as files: the facts inside them, and two wheels joined into one.

A wheel is a zip file with a list of its members' hashes, ``RECORD``. Each change here writes the
whole wheel anew, with a new list.
"""

import base64
import hashlib
import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvkit.build.abi import FILE, Abi, abi_of
from hvkit.build.horovod_patches import VERSION
from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError

_FACTS = f"horovod/{FILE}"
_NO_ZIP = (zipfile.BadZipFile, zlib.error, EOFError)
_METADATA = "horovod/metadata.json"
_EXECUTABLE = 0o100755 << 16
_LIBRARY = re.compile(r"horovod/\w+/mpi_lib[^/]*\.so")


def facts_of(wheel: Path) -> Abi:
    """The facts inside a wheel.

    Raises:
        BuildError: it is no wheel that this version of hvkit has built.
    """
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
    with tempfile.TemporaryDirectory() as folder:
        libraries = []
        for name in filter(_LIBRARY.fullmatch, members):
            libraries.append(Path(folder, name.replace("/", "-")))
            libraries[-1].write_bytes(members[name])
        abi = abi_of(libraries, toolchain, environ)
    wheel.unlink()
    return _write(wheel.parent, _version(members), {**members, _FACTS: abi.text.encode()}, abi)


def join(wheels: Sequence[Path], folder: Path) -> Path:
    """One wheel of Horovod, written into ``folder``, with the libraries of several.

    Each of them, at least one, is for another framework and fits the same machine.

    Raises:
        BuildError: one of them is no wheel of hvkit's.
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
    needed = [line for members in parts for line in _requirements(members)]
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


def _requirements(members: Mapping[str, bytes]) -> list[bytes]:
    return re.findall(rb"^Requires-Dist: .*$", members["dist-info/METADATA"], re.MULTILINE)


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
    kind = re.sub(rb"(?m)^Tag: .*$", b"Tag: " + tag.encode(), members["dist-info/WHEEL"])
    written = {**members, "dist-info/METADATA": about, "dist-info/WHEEL": kind}
    place = f"horovod-{version}.dist-info/"
    named = {re.sub("^dist-info/", place, name): data for name, data in written.items()}
    listed = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in named.items()]
    record = f"{place}RECORD"
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
