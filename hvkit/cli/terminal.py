"""What ``hvkit`` writes to standard output, and what happens if nobody reads it."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console

UNREAD = 128 + signal.SIGPIPE
"""Exit status where a reader such as ``head`` has ended before all was written."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class Terminal(Console):
    """rich's console, which leaves a reader that has ended to ``all_written``."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise ``BrokenPipeError``; rich would end with status 1, as for a problem."""
        raise BrokenPipeError


@contextlib.contextmanager
def all_written() -> Iterator[None]:
    """At the end, all output is written.

    Raises:
        SystemExit: with ``UNREAD``, silently, if its reader has ended; with 1 and a line, if a disk
            is full.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(UNREAD) from None
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        _drop_output()
        print(f"hvkit: cannot write to standard output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _drop_output() -> None:
    """Send what is left of the output nowhere, so that Python's end does not fail on it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
