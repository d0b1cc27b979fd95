"""Numbers, lengths of time and errors in words; long texts cut; short paths."""

import os


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
