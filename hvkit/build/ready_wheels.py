"""Wheels that are built already, in a folder or behind a URL, and those of them that fit here.

The folder has an index, ``wheels.json``: each wheel's file name, SHA-256 and facts (``abi.Abi``).
``add`` writes it. So a machine downloads only what fits, and refuses without loading what does not.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from filelock import FileLock

from hvkit.build.abi import Abi, Machine, minors_between, misfits
from hvkit.build.frameworks import title
from hvkit.build.wheel_file import facts_of, joined_facts
from hvkit.errors import BuildError

INDEX = "wheels.json"

_SECONDS = 60.0
_NAME = re.compile(r"horovod-[\w.+]+-[\w.]+-[\w.]+-[\w.]+\.whl", re.ASCII)
_LARGEST = 512 * 1024**2
_HOW = ". `make wheels` or `hvkit install-horovod --wheel-dir DIR` fills such a folder"
_ON_THIS_HOST = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ReadyWheel:
    """A wheel of an index.

    Attributes:
        name: its file name.
        sha256: the digest of the file.
        abi: the facts inside it.
    """

    name: str
    sha256: str
    abi: Abi


@dataclass(frozen=True)
class Choice:
    """Wheels that serve all frameworks of a machine together."""

    wheels: tuple[ReadyWheel, ...]

    @property
    def abi(self) -> Abi:
        """The facts of the wheels, joined."""
        return joined_facts([wheel.abi for wheel in self.wheels])

    def __str__(self) -> str:
        return " and ".join(wheel.name for wheel in self.wheels)


def add(wheel: Path, folder: Path) -> Path:
    """Copy a wheel into a folder of wheels and its index, and return the copy."""
    folder.mkdir(parents=True, exist_ok=True)
    abi = facts_of(wheel)
    # Several builds may write into one folder.
    with FileLock(folder / f".{INDEX}.lock"):
        copy = Path(shutil.copy(wheel, folder))
        listed = _listed(str(folder)) if (folder / INDEX).exists() else []
        kept = [one for one in listed if one.name != copy.name and (folder / one.name).exists()]
        digest = hashlib.sha256(copy.read_bytes()).hexdigest()
        kept.append(ReadyWheel(copy.name, digest, abi))
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as fresh:
            json.dump([asdict(one) for one in kept], fresh, indent=2)
        os.chmod(fresh.name, 0o644)
        os.replace(fresh.name, folder / INDEX)
    return copy


def choices(place: str, machine: Machine) -> tuple[list[Choice], list[str]]:
    """The wheels in a place that fit a machine.

    Args:
        place: a folder, or the URL of one.
        machine: what they have to fit.

    Returns:
        The ways to serve all frameworks, the best first; and, for each wheel that does not fit, its
        name and why.

    Raises:
        BuildError: the place has no index, or cannot be reached.
    """
    fitting, refused = [], []
    for wheel in _listed(place):
        reasons = misfits(wheel.abi, machine)
        if reasons:
            refused.append(f"{wheel.name}: {reasons[0]}")
        else:
            fitting.append(wheel)
    wanted = [framework.name for framework in machine.frameworks]
    found = list(_covers(wanted, fitting))
    if not found:
        served = {name for wheel in fitting for name in wheel.abi.frameworks}
        refused += [f"no wheel for {title(name)} fits" for name in wanted if name not in served]
    return sorted(found, key=lambda choice: _distance(choice, machine)), refused


def fetch(wheel: ReadyWheel, place: str, folder: Path) -> Path:
    """Copy or download a wheel into ``folder`` and compare it with the index.

    Raises:
        BuildError: it is missing, or another file than the index says.
    """
    data = _read(place, wheel.name)
    found = hashlib.sha256(data).hexdigest()
    if found != wheel.sha256:
        raise BuildError(
            f"{wheel.name} in {place} is not the file of {INDEX}: its SHA-256 is {found}, expected "
            f"{wheel.sha256}. Make the wheels again"
        )
    path = folder / wheel.name
    path.write_bytes(data)
    if facts_of(path) != wheel.abi:
        raise BuildError(f"{wheel.name} in {place} has other facts inside it than {INDEX} says")
    return path


def is_url(place: str) -> bool:
    """Whether a place is behind a URL, rather than a folder."""
    return re.match(r"[a-z][a-z0-9+.-]*://", place, re.IGNORECASE) is not None


def require_place(text: str) -> str:
    """A folder, or a URL that nobody on the way can change; wheels are programs.

    Raises:
        ValueError: it is a URL of another kind.
    """
    if not is_url(text):
        return str(Path(text).absolute())
    url = urllib.parse.urlsplit(text)
    if url.scheme == "https" or (url.scheme == "http" and url.hostname in _ON_THIS_HOST):
        return text.rstrip("/")
    raise ValueError(
        f"must be a folder or an https:// URL, got {text!r}: without https, anyone on the network "
        "could put a program of their own in place of a wheel"
    )


def _covers(wanted: Sequence[str], wheels: Sequence[ReadyWheel]) -> Iterator[Choice]:
    """Every way to serve each framework once, fewest wheels first."""
    for wheel in wheels:
        if set(wheel.abi.frameworks) == set(wanted):
            yield Choice((wheel,))
    single = [[w for w in wheels if set(w.abi.frameworks) == {name}] for name in wanted]
    if len(wanted) > 1:
        yield from map(Choice, product(*single))


def _distance(choice: Choice, machine: Machine) -> tuple[int, int]:
    between = [
        minors_between(built, framework.version) or 0
        for wheel in choice.wheels
        for name, built in wheel.abi.frameworks.items()
        if (framework := machine.framework(name)) is not None
    ]
    return sum(between), len(choice.wheels)


def _listed(place: str) -> list[ReadyWheel]:
    try:
        listed = [
            ReadyWheel(one["name"], one["sha256"], Abi.of(one["abi"]))
            for one in json.loads(_read(place, INDEX))
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{INDEX} in {place} is damaged: {error}. Make it again") from error
    for wheel in listed:
        if not _NAME.fullmatch(wheel.name):
            raise BuildError(f"{INDEX} in {place} lists {wheel.name!r}, which names no wheel")
    return listed


def _read(place: str, name: str) -> bytes:
    if not is_url(place):
        try:
            return Path(place, name).read_bytes()
        except OSError as error:
            raise BuildError(f"{place} has no {name} to read: {error.strerror}{_HOW}") from error
    url = f"{place}/{urllib.parse.quote(name)}"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            data: bytes = answer.read(_LARGEST + 1)
    except (OSError, urllib.error.URLError) as error:
        raise BuildError(f"cannot fetch {url}: {error}{_HOW}") from error
    if len(data) > _LARGEST:
        raise BuildError(f"{url} is larger than {_LARGEST // 1024**2} MiB: no wheel of Horovod is")
    return data
