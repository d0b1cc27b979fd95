"""Standard output of ``hvkit``, and its exit status if that cannot be written."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console

UNREAD = 128 + signal.SIGPIPE
"""Exit status if a reader such as ``head`` has ended before everything was written."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


class Terminal(Console):
    """rich's console, which leaves the handling of a broken pipe to ``all_written``."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise ``BrokenPipeError``; rich would end with status 1, as for a problem."""
        raise BrokenPipeError

    def show_line(self, text: str, style: str = "") -> None:
        """Print a line as it is, not wrapped."""
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def all_written() -> Iterator[None]:
    """At the end, write all output; if that fails, end with ``UNREAD``, or with 1 and a line."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        unread = isinstance(error, BrokenPipeError)
        if not unread and (error.errno not in _CANNOT_WRITE or error.filename is not None):
            raise
        _drop_output()
        if unread:
            raise SystemExit(UNREAD) from None
        print(f"hvkit: cannot write to standard output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _drop_output() -> None:
    """Discard the rest of the output, so that Python does not fail on it again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
