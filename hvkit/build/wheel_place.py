"""Where wheels lie: a folder, or the URL of one.

A wheel is a program, so nobody on the way may change it: every URL is https, also those that a
server leads to. What proves a user's rights, a password or the query of a signed URL, goes to the
server and into no message.
"""

import base64
import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from hvkit.errors import BuildError

_SECONDS = 60.0
_LARGEST = 512 * 1024**2
_HOW = ". `make wheels` or `hvkit install-horovod --wheel-dir DIR` fills such a folder"
_ON_THIS_HOST = ("localhost", "127.0.0.1", "::1")
_AUTHORIZATION = "Authorization"
# What parts of a URL may hold besides letters and digits; escapes stay as they are.
_IN_PATH = "/%:@!$&'()*+,;=~"
_IN_QUERY = _IN_PATH + "?"


def require_place(text: str) -> str:
    """A folder, as an absolute path, or a URL that nobody on the way can change.

    Raises:
        ValueError: it is empty, or a URL of another kind.
    """
    if not text:
        raise ValueError("must be a folder or an https:// URL, got ''")
    if not _is_url(text):
        return str(Path(text).absolute())
    url = _parts(text)
    if url is not None and not _is_safe(url):
        raise ValueError(
            f"must be a folder or an https:// URL, got {shown(text)!r}: without https, anyone on "
            "the network could put a program of their own in place of a wheel"
        )
    if url is None or not url.hostname or not text.isprintable() or " " in url.netloc:
        raise ValueError("must be a folder or an https:// URL, but this URL has no valid host")
    return text


def require_folder(text: str) -> Path:
    """A folder of this machine.

    Raises:
        ValueError: it is empty, or a URL.
    """
    if not text or _is_url(text):
        raise ValueError(f"must be a folder of this machine, got {shown(text)!r}")
    return Path(text)


def shown(place: str) -> str:
    """The place for a message: without user, password and query."""
    url = _parts(place)
    if not _is_url(place) or url is None:
        return place
    return urlunsplit((url.scheme, _host(url), url.path, "..." if url.query else "", ""))


def read(place: str, name: str) -> bytes:
    """The file of this name in a place that ``require_place`` has returned.

    Raises:
        BuildError: it is missing, cannot be fetched, or is too large.
    """
    if not _is_url(place):
        try:
            return Path(place, name).read_bytes()
        except OSError as error:
            raise BuildError(f"{place} has no {name} to read: {error.strerror}{_HOW}") from error
    url = urlsplit(place)
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
        if followed is not None and password and _origin(url) == _origin(urlsplit(req.full_url)):
            followed.add_unredirected_header(_AUTHORIZATION, password)
        return followed


def _is_url(place: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*://", place, re.IGNORECASE) is not None


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


def _origin(url: SplitResult) -> tuple[str, str]:
    return url.scheme, _host(url)


def _host(url: SplitResult) -> str:
    """The host and port of a URL, without the user."""
    return url.netloc.rpartition("@")[2]
