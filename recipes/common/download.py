"""Downloads: verified, complete or not at all, and only once for all processes of a host."""

import fcntl
import hashlib
import http.client
import os
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.images import DataError


def fetch(
    file: str,
    mirrors: Sequence[str],
    checksum: str,
    content: Callable[[bytes], bytes] = bytes,
    timeout: float = 5.0,
) -> bytes:
    """Download a file from the first mirror that has it, with the right content.

    Args:
        file: its name, which follows the mirror's address.
        mirrors: addresses, tried in order; they end in a slash.
        checksum: SHA-256 that the content must have.
        content: from the bytes of the file to what the checksum is of, such as ``gzip.decompress``.
        timeout: seconds to wait for a connection, and for each piece of the answer.

    Raises:
        DataError: no mirror has it; says for each one why.
    """
    problems = []
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(mirror + file, timeout=timeout) as response:
                received: bytes = response.read()
            found = hashlib.sha256(content(received)).hexdigest()
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            problems.append(f"{mirror + file}: {error or type(error).__name__}")
            continue
        if found == checksum:
            return received
        problems.append(f"{mirror + file}: content has SHA-256 {found}, expected {checksum}")
    raise DataError("; ".join(problems))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made; waits while another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_whole(target: Path, content: bytes) -> None:
    """Write a file that appears under its name only when it is complete."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
        try:
            part.write(content)
            part.close()
            os.replace(part.name, target)
        except BaseException:
            os.unlink(part.name)
            raise
