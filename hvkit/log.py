"""The ``hvkit`` logger: notes and warnings while a script runs.

They go to stderr as ``hvkit: ...``, from level INFO on. To see less:

    logging.getLogger("hvkit").setLevel(logging.WARNING)

To have them elsewhere as well, add a handler to that logger: they do not reach the root logger's
handlers, where each would appear twice. The reason why a run ends always goes to stderr.

The functions write numbers, lengths of time, errors and paths in the words of messages.
"""

import logging
import os
import sys
from typing import TextIO


class _ToStderr(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        # Writes to what sys.stderr is at that moment: notebooks and tests replace it.
        self.stream = sys.stderr
        super().emit(record)


logger = logging.getLogger("hvkit")
# A script may have configured the logger before it imported hvkit.
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not logger.handlers:
    logger.propagate = False
    _stderr = _ToStderr()
    _stderr.setFormatter(logging.Formatter("hvkit: %(message)s"))
    logger.addHandler(_stderr)


def printable(text: str) -> str:
    """The text without characters that command a terminal, for text that ranks or files supply."""
    return "".join(c if c.isprintable() else "?" for c in text)


def counted(number: int, thing: str) -> str:
    """``1 slot``, ``2,000 slots``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def shortened(text: str, length: int) -> str:
    """The text, or its first words and ``...``, of up to ``length`` characters, at least 4."""
    if len(text) <= length:
        return text
    words = text[: length - 2].rpartition(" ")[0].rstrip()
    return f"{words if len(words) >= length // 2 else text[: length - 3]}..."


def text_of(error: BaseException) -> str:
    """The error's text; also one that raises, as a script's own class may."""
    try:
        return str(error)
    except Exception as problem:
        return f"<its __str__ raises {type(problem).__name__}>"


def in_short(error: BaseException) -> str:
    """The error in one line: ``ValueError: boom``."""
    text = shortened(text_of(error).strip().split("\n")[0], 200)
    return type(error).__name__ + (f": {text}" if text else "")


def duration(seconds: float) -> str:
    """A length of time: ``12 s``, ``3 min 20 s``, ``1 h 5 min``."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{max(seconds, 0.0):.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def interrupted(rank: int, where: str) -> str:
    """The sentence about a rank that Ctrl-C has ended, with the script's line, if that is known."""
    return f"rank {rank} was interrupted" + (f" ({where})" if where else "")


def near(file: str) -> str:
    """The path relative to the working directory, if the file is below that."""
    try:
        path = os.path.relpath(file) if os.path.isabs(file) else file
    except OSError:  # somebody removed the working directory
        return file
    return file if path.startswith("..") else path
