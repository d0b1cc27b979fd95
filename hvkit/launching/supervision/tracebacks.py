"""Python's tracebacks in a rank's output: where one begins and ends, and what it says.

No input or output: ``rank_output`` finds tracebacks by these rules, ``failures`` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvkit.log import near

_HEADS = (
    "Traceback (most recent call last):",
    "  + Exception Group Traceback (most recent call last):",
)
_HEAD = "|".join(map(re.escape, _HEADS))
_IN_THREAD = "Exception in thread "
# A traceback, or a SyntaxError of the script itself, which has no header.
_BEGIN = re.compile(
    rf'^(?:{_IN_THREAD}[^\n]*\n)?(?:{_HEAD})|^  File "[^"\n]+", line \d+\n'.encode(), re.MULTILINE
)
# A traceback, or a line of hvkit's, after the unfinished line of a progress bar.
_GLUED = re.compile(rf"(\r[^\r\n]+?)({_HEAD}|hvkit: )".encode())
_FRAME = re.compile(r'\s*(?:\| +)?File "(.+?)", line (\d+)')
_ERROR = re.compile(r"[A-Za-z_][\w.<>]*(?=:|$)")
_LINK = re.compile(r"(During handling of the above|The above exception was) .*:$")
_OF_GROUP = re.compile(r"\s+[|+]")
_GROUP_ENDS = re.compile(r"\s+\+-+$")
# A line that begins with one of these does not belong to an exception's message.
_NO_MESSAGE = (*_HEADS, _IN_THREAD, "hvkit: ", "\r")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_INTERRUPT = "KeyboardInterrupt"
# Exceptions of wrong code. Others may come from files, networks or memory, and not occur again.
_LASTING = {
    *("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"),
    *("NameError", "UnboundLocalError", "TypeError", "AttributeError"),
}


@dataclass(frozen=True)
class Raised:
    """An exception and the lines that led to it, without its message."""

    name: str
    lines: tuple[tuple[str, int], ...]
    refused: bool = False

    def __str__(self) -> str:
        """``SyntaxError at train.py:3``: the script's innermost line."""
        return f"{self.name} at {_innermost_line(self.lines)}"

    @property
    def lasts(self) -> bool:
        """Whether the code is wrong, so that the exception will occur again."""
        return self.refused or self.name in _LASTING


def raised(lines: Sequence[str]) -> Raised | None:
    """The last exception in lines of output that has a traceback; None if there is none."""
    found = None
    frames: list[tuple[str, int]] = []
    for line in lines:
        if line.startswith(_HEADS):
            frames = []
        elif frame := _FRAME.match(line):
            frames.append((frame[1], int(frame[2])))
        elif frames and (error := _ERROR.match(line)):
            found = Raised(error[0], tuple(frames))
            frames = []
    return found


def interrupted_at(lines: Sequence[str]) -> str | None:
    """The script's line that Ctrl-C interrupted, empty if unknown; None without its traceback."""
    if not any(line.startswith(_INTERRUPT) for line in lines):
        return None
    frames = [(frame[1], int(frame[2])) for line in lines if (frame := _FRAME.match(line))]
    return _innermost_line(frames, of_script_only=True)


def _innermost_line(frames: Sequence[tuple[str, int]], *, of_script_only: bool = False) -> str:
    """The script's innermost line; without one, a library's, or empty."""
    of_script = [each for each in frames if not any(name in each[0] for name in _LIBRARIES)]
    if not of_script and of_script_only:
        return ""
    file, line = (of_script or frames)[-1]
    return f"{near(file)}:{line}"


# Where in a traceback its last line was.
_At = Literal["start", "frames", "message", "end", "link"]


class Traceback:
    """A traceback while it arrives, together with those that are linked to it.

    It ends with the exception's message. A message of several lines must arrive in one piece.
    """

    def __init__(self) -> None:
        self.text = b""
        self._at: _At = "start"

    def take(self, lines: bytes) -> int:
        """Add the first lines, as far as they belong to it; return their length in bytes."""
        taken = 0
        for line in lines.split(b"\n")[:-1]:
            at = self._after(line.decode(errors="replace").rstrip())
            if at is None:
                break
            self._at = at
            taken += len(line) + 1
        self.text += lines[:taken]
        return taken

    def end_piece(self) -> None:
        """Note that a piece of output ends with the end of a line."""
        if self._at == "message":
            self._at = "end"

    def _after(self, line: str) -> _At | None:
        """The position after this line; None if the line does not belong to the traceback."""
        at = self._at
        if at == "start":
            return at if line.startswith(_IN_THREAD) else "frames"
        if at == "link":
            return "frames" if line.startswith(_HEADS) else None if line else at
        if line.startswith(_NO_MESSAGE):
            return None
        if at == "frames":
            if _GROUP_ENDS.match(line):
                return "end"
            return at if line[:1].isspace() else "message" if _ERROR.match(line) else None
        if _LINK.match(line):
            return "link"
        return at if at == "message" or not line or _OF_GROUP.match(line) else None


def beginning(text: bytes) -> int | None:
    """The index at which a traceback begins in whole lines; None if there is none."""
    found = _BEGIN.search(text)
    return None if found is None else found.start()


def separated(text: bytes) -> bytes:
    """The text with a line break between a progress bar and a traceback or line of hvkit's."""
    return _GLUED.sub(rb"\1\n\2", text)


def starts_a_line(data: bytes) -> bool:
    """Whether the output begins with a traceback, or a line of hvkit's."""
    return data.startswith(tuple(each.encode() for each in (*_HEADS, "hvkit: ")))
