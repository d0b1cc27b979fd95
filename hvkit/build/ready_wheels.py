"""Wheels that are built already, in a folder or behind a URL, and which of them fit here.

The folder has an index, ``wheels.json``: each wheel's file name, SHA-256 and facts (``Abi``).
``add`` writes it. So a machine downloads only what fits, and refuses without loading what does not.

A wheel is a program, so nobody on the way may change it: every URL is https, also those that a
server leads to. A password, or the query of a signed URL, goes to the server only, and into
no message.
"""

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from filelock import FileLock

from hvkit.build.frameworks import title
from hvkit.build.wheels import Abi, Machine, facts_of, minors_between, misfits
from hvkit.errors import BuildError

INDEX = "wheels.json"

_NAME = re.compile(r"horovod-[\w.+]+-[\w.]+-[\w.]+-[\w.]+\.whl", re.ASCII)
# Bytes of a file that is no index.
_SHOWN = 60
_AGAIN = ". Make the wheels again, in an empty folder"

_SECONDS = 60.0
_LARGEST = 512 * 1024**2
_HOW = ". `make wheels` or `hvkit install-horovod --wheel-dir DIR` fills such a folder"
_ON_THIS_HOST = ("localhost", "127.0.0.1", "::1")
_AUTHORIZATION = "Authorization"
# What parts of a URL may hold besides letters and digits; escapes stay as they are.
_IN_PATH = "/%:@!$&'()*+,;=~"
_IN_QUERY = _IN_PATH + "?"


@dataclass(frozen=True)
class ReadyWheel:
    """A wheel of an index."""

    name: str  # of its file
    sha256: str
    abi: Abi

    @classmethod
    def of(cls, entry: Any) -> "ReadyWheel":
        """The wheel of an entry of an index; a BuildError for any other entry."""
        if not isinstance(entry, dict) or not {"name", "sha256", "abi"} <= entry.keys():
            raise BuildError("it is no entry of this version of hvkit")
        name, sha256 = entry["name"], entry["sha256"]
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(sha256, str):
            raise BuildError("it names no wheel")
        return cls(name, sha256, Abi.of(entry["abi"]))


def add(wheel: Path, folder: Path) -> Path:
    """Copy a wheel into a folder of wheels and its index, and return the copy."""
    abi = facts_of(wheel)
    with lock(folder):
        copy = folder / wheel.name
        if not copy.exists() or not copy.samefile(wheel):  # the folder may be the cache's
            shutil.copy(wheel, copy)
        kept = [e for e in entries_in(folder) if _names_file_in(folder, e) not in (None, copy.name)]
        digest = hashlib.sha256(copy.read_bytes()).hexdigest()
        kept.append(asdict(ReadyWheel(copy.name, digest, abi)))
        fresh = folder / f".{INDEX}.new"
        fresh.write_text(json.dumps(kept, indent=2) + "\n")
        os.replace(fresh, folder / INDEX)
    return copy


def lock(folder: Path) -> FileLock:
    """The lock of a folder of wheels, which it makes: several builds may write there."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f".{INDEX}.lock")


def entries_in(folder: Path) -> list[Any]:
    """The entries of the index of a folder, which may have none yet."""
    return _entries(str(folder)) if (folder / INDEX).exists() else []


def fitting(source: str, machine: Machine) -> tuple[list[ReadyWheel], list[str]]:
    """The wheels that serve all frameworks of a machine, the best first; why others do not fit.

    The source is a folder or the URL of one.
    """
    found, refused = [], []
    for entry in _entries(source):
        try:
            wheel = ReadyWheel.of(entry)
        except BuildError as error:
            name = entry.get("name") if isinstance(entry, dict) else entry
            refused.append(f"{str(name)[:100]!r} in {INDEX}: {error}")
            continue
        lacking = [f for f in machine.frameworks if f.name not in wheel.abi.frameworks]
        reasons = misfits(wheel.abi, machine) + [f"it is not for {title(f.name)}" for f in lacking]
        if reasons:
            refused.append(f"{wheel.name}: {reasons[0]}")
        else:
            found.append(wheel)
    return sorted(found, key=lambda wheel: _distance(wheel, machine)), refused


def fetch(wheel: ReadyWheel, source: str, folder: Path) -> Path:
    """Copy or download a wheel into ``folder`` and compare it with the index."""
    data = read(source, wheel.name)
    if (found := hashlib.sha256(data).hexdigest()) != wheel.sha256:
        raise BuildError(
            f"{wheel.name} in {shown(source)} is not the file of {INDEX}: its SHA-256 is {found}, "
            f"expected {wheel.sha256}. Make the wheels again"
        )
    path = folder / wheel.name
    path.write_bytes(data)
    if facts_of(path) != wheel.abi:
        raise BuildError(
            f"{wheel.name} in {shown(source)} holds other facts than {INDEX} says{_AGAIN}"
        )
    return path


def _distance(wheel: ReadyWheel, machine: Machine) -> int:
    built = wheel.abi.frameworks
    return sum(minors_between(built[f.name], f.version) or 0 for f in machine.frameworks)


def _entries(source: str) -> list[Any]:
    """The entries of an index as they stand there, also entries of other versions of hvkit."""
    data = read(source, INDEX)
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        begins = data[:_SHOWN].decode(errors="replace")
        raise BuildError(
            f"{INDEX} in {shown(source)} is damaged: it begins with {begins!r} ({error}){_AGAIN}"
        ) from error
    if not isinstance(entries, list):
        raise BuildError(f"{INDEX} in {shown(source)} is damaged: it is no list{_AGAIN}")
    return entries


def _names_file_in(folder: Path, entry: Any) -> str | None:
    """The name of the wheel that an entry describes, if it is in the folder."""
    name = entry.get("name") if isinstance(entry, dict) else None
    found = isinstance(name, str) and _NAME.fullmatch(name) and (folder / name).exists()
    return name if found else None


def require_source(text: str) -> str:
    """A folder, as an absolute path, or a URL that nobody on the way can change."""
    must = "must be a folder or an https:// URL"
    if not text:
        raise ValueError(f"{must}, got ''")
    if not _is_url(text):
        return str(Path(text).absolute())
    url = _parts(text)
    if url is not None and not _is_safe(url):
        raise ValueError(
            f"{must}, got {shown(text)!r}: without https, anyone on the network could put a "
            "program of their own in place of a wheel"
        )
    if url is None or not url.hostname or not text.isprintable() or " " in url.netloc:
        raise ValueError(f"{must}, but this URL has no valid host")
    return text


def require_folder(text: str) -> Path:
    """A folder of this machine."""
    if not text or _is_url(text):
        raise ValueError(f"must be a folder of this machine, got {shown(text)!r}")
    return Path(text)


def shown(source: str) -> str:
    """The source for a message: without user, password and query."""
    url = _parts(source)
    if not _is_url(source) or url is None:
        return source
    return urlunsplit((url.scheme, _host(url), url.path, "..." if url.query else "", ""))


def read(source: str, name: str) -> bytes:
    """The file of this name in a source that ``require_source`` has returned."""
    if not _is_url(source):
        try:
            return Path(source, name).read_bytes()
        except OSError as error:
            raise BuildError(f"{source} has no {name} to read: {error.strerror}{_HOW}") from error
    url = urlsplit(source)
    path = f"{quote(url.path.rstrip('/'), _IN_PATH)}/{quote(name)}"
    address = urlunsplit((url.scheme, _host(url), path, quote(url.query, _IN_QUERY), ""))
    request = urllib.request.Request(address)
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
        request.add_unredirected_header(_AUTHORIZATION, f"Basic {base64.b64encode(pair).decode()}")
    try:
        with urllib.request.build_opener(_Redirects).open(request, timeout=_SECONDS) as answer:
            data: bytes = answer.read(_LARGEST + 1)
            if answer.length and len(data) <= _LARGEST:
                raise http.client.IncompleteRead(data, answer.length)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = str(error).strip() or type(error).__name__
        raise BuildError(f"cannot fetch {shown(address)}: {why}{_HOW}") from error
    if len(data) > _LARGEST:
        raise BuildError(
            f"{shown(address)} is larger than {_LARGEST // 1024**2} MiB: no wheel of Horovod is"
        )
    return data


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a server to safe URLs only, and sends the password to no other server."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        url = _parts(newurl)
        if url is None or not _is_safe(url):
            raise urllib.error.URLError(
                f"it leads to {shown(newurl)}, which is not https, so that anyone on the network "
                "could change what comes from there"
            )
        followed = super().redirect_request(req, fp, code, msg, headers, newurl)
        password = req.unredirected_hdrs.get(_AUTHORIZATION)
        before = urlsplit(req.full_url)
        same_server = (url.scheme, _host(url)) == (before.scheme, _host(before))
        if followed is not None and password and same_server:
            followed.add_unredirected_header(_AUTHORIZATION, password)
        return followed


def _is_url(source: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE) is not None


def _parts(text: str) -> SplitResult | None:
    """The parts of a URL; ``None`` if its host or port cannot be."""
    try:
        url = urlsplit(text)
        _ = url.port
    except ValueError:
        return None
    return url


def _is_safe(url: SplitResult) -> bool:
    return url.scheme == "https" or (url.scheme == "http" and url.hostname in _ON_THIS_HOST)


def _host(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]
