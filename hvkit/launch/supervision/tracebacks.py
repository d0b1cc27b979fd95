"""Python's tracebacks in what a rank prints: where one begins, what it says, what Ctrl-C leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

# A traceback, or the error of a file that is no Python, which comes without that line.
_BEGIN = re.compile(
    rb'^(?:Exception in thread [^\n]*\n)?Traceback \(most recent call last\):|^  File "[^"\n]+", '
    rb"line \d+\n",
    re.MULTILINE,
)
# The same behind the unfinished line of a progress bar, and lines of hvkit's there.
_GLUED = re.compile(rb"(\r[^\r\n]+?)(Traceback \(most recent call last\):|hvkit: )")
_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*(?:\| +)?File "(.+?)", line (\d+)')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_INTERRUPT = "KeyboardInterrupt"
# What Python prints around tracebacks.
_AROUND = re.compile(
    r"Traceback \(most|\s|$|During handling of|The above exception|Process \S+:$|Exception ignored "
    r"|Exception in thread|Fatal Python error|Python runtime state|KeyboardInterrupt"
    r"|[\w.]+(Error|Exception|Exit)\b"
)


@dataclass(frozen=True)
class Raised:
    """An exception and the lines that led to it; the message does not count.

    Attributes:
        kind: the exception's class.
        lines: files and lines, the innermost last.
    """

    kind: str
    lines: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """``SyntaxError at train.py:3``."""
        file, line = self.lines[-1]
        return f"{self.kind} at {_near(file)}:{line}"


def beginning(text: bytes) -> int | None:
    """Where in whole lines a traceback begins; None if there is none."""
    found = _BEGIN.search(text)
    return None if found is None else found.start()


def separated(text: bytes) -> bytes:
    """The text with a traceback, or a line of hvkit's, on a line of its own behind a bar's."""
    return _GLUED.sub(rb"\1\n\2", text)


def starts_a_line(data: bytes) -> bool:
    """Whether what a rank writes begins with a traceback, or a line of hvkit's."""
    return data.startswith((_HEAD.encode(), b"hvkit: "))


def raised(lines: Sequence[str]) -> Raised | None:
    """The last exception that lines of output show with its place; None if there is none."""
    found = None
    frames: list[tuple[str, int]] = []
    for line in lines:
        if line.startswith(_HEAD):
            frames = []
        elif frame := _FRAME.match(line):
            frames.append((frame[1], int(frame[2])))
        elif frames and (error := _ERROR.match(line)):
            found = Raised(error[0], tuple(frames))
            frames = []
    return found


def interrupted_at(lines: Sequence[str]) -> str | None:
    """The script's line at which Ctrl-C came, empty if unknown; None without a traceback of it."""
    if not any(line.startswith(_INTERRUPT) for line in lines):
        return None
    frames = [frame for line in lines if (frame := _FRAME.match(line))]
    own = [frame for frame in frames if not any(each in frame[1] for each in _LIBRARIES)]
    return f"{_near(own[-1][1])}:{own[-1][2]}" if own else ""


def is_of_traceback(line: str) -> bool:
    """Whether this line, behind the beginning of a traceback, is a part of one."""
    return _AROUND.match(line) is not None


def _near(file: str) -> str:
    """The file as seen from the working directory, if it is below that."""
    try:
        near = os.path.relpath(file) if os.path.isabs(file) else file
    except OSError:  # somebody removed the working directory
        return file
    return file if near.startswith("..") else near
