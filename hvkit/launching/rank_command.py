"""The command that every rank runs, and whether a host can start it.

``probe`` checks that on every host before ranks start there, so this module imports little.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hvkit.errors import UsageError

NOT_FOUND = 127  # exit status where a shell finds no such command

NOT_EXECUTABLE = 126  # exit status where a shell finds the command and cannot start it

_SCRIPT = ".py"
# How the first line of a script begins that names its interpreter.
_INTERPRETER = b"#!"
_PYTHON = re.compile(r"python(\d(\.\d+)?t?)?")
# Options of Python's: with a value, and with the code or module that takes a script's place.
_WITH_VALUE = "WX"
_LONG_WITH_VALUE = "--check-hash-based-pycs"
_IN_PLACE_OF_SCRIPT = "cm"
# Bytes of the longest word that Linux accepts in a command.
_LONGEST_WORD = (1 << 17) - 1


def with_python(words: Sequence[str], read_script: Callable[[], str]) -> tuple[str, ...]:
    """The command, with this Python before a script ``train.py``.

    A program on PATH whose name ends with ``.py`` stays as it is, unless the working directory has
    a file of that name; so does a path to an executable file whose first line names its
    interpreter. With ``-`` in place of the script, all ranks run what ``read_script`` returns.
    """
    first = words[0]
    if first == "-" or (first.endswith(_SCRIPT) and not _starts_itself(first)):
        words = (sys.executable, *words)
    index = _index_of_script(words)
    if index is None or words[index] != "-":
        return tuple(words)
    source = read_script()
    if not source.strip():
        raise UsageError("the script on standard input is empty")
    if len(source.encode()) > _LONGEST_WORD:
        raise UsageError(
            f"the script on standard input is longer than {_LONGEST_WORD} bytes: write it to a file"
        )
    return (*words[:index], "-c", source, *words[index + 1 :])


def _starts_itself(name: str) -> bool:
    """Whether a shell would start this file without the name of an interpreter."""
    if os.sep in name:
        start = _first_line(Path(name)) if os.access(name, os.X_OK) else None
        return start is not None and start.startswith(_INTERPRETER)
    return not os.path.exists(name) and shutil.which(name) is not None


def _index_of_script(words: Sequence[str]) -> int | None:
    """The index of the script, or of ``-``, in a command of Python's; ``None`` if there is none."""
    if not _PYTHON.fullmatch(os.path.basename(words[0])):
        return None
    numbered = enumerate(words[1:], start=1)
    for index, word in numbered:
        if word == "-" or not word.startswith("-"):
            return index
        if word == _LONG_WITH_VALUE:
            next(numbered, None)
        elif not word.startswith("--"):
            # One letter each: -um MODULE is -u -m MODULE. The first with a value ends the word.
            letters = word[1:]
            valued = re.search(f"[{_WITH_VALUE}{_IN_PLACE_OF_SCRIPT}]", letters)
            if valued and valued[0] in _IN_PLACE_OF_SCRIPT:
                return None
            if valued and valued.end() == len(letters):
                next(numbered, None)
    return None


class CommandProblem(NamedTuple):
    """Why a host cannot start a command, with the status with which a shell would end."""

    status: int  # NOT_FOUND or NOT_EXECUTABLE
    text: str  # with the fix


@dataclass(frozen=True)
class RankCommand:
    """The files that a command needs on each host."""

    program: str  # the first word of the command
    script: str  # that Python is to run; empty if there is none
    path: str  # the folders in which ranks look for programs, as in PATH

    @classmethod
    def of(cls, words: Sequence[str], path: str) -> "RankCommand":
        index = _index_of_script(words)
        return cls(words[0], "" if index is None else words[index], path)

    def problem(self, folder: str) -> CommandProblem | None:
        """Why this host cannot start the command in ``folder``; ``None`` if it can."""
        for name, status, reason in self._problems(folder):
            return CommandProblem(status, f"cannot run {name}: {reason}")
        return None

    def _problems(self, folder: str) -> Iterator[tuple[str, int, str]]:
        name, file = self.program, Path(folder, self.program)
        if os.sep not in name:
            if not shutil.which(name, path=self.path):
                yield name, NOT_FOUND, f"there is no such program on PATH{self._fix(folder)}"
        elif not file.exists():
            yield name, NOT_FOUND, f"there is no such file{_in(name, folder)}"
        elif file.is_dir():
            yield name, NOT_EXECUTABLE, "it is a folder"
        elif not os.access(file, os.X_OK):
            yield name, NOT_EXECUTABLE, f"it is not executable: `chmod +x {name}`"
        elif reason := _no_program(file):
            yield name, NOT_EXECUTABLE, reason
        name, file = self.script, Path(folder, self.script)
        if name and not file.exists():
            yield name, NOT_FOUND, f"there is no such file{_in(name, folder)}"
        elif name and not os.access(file, os.R_OK):
            yield name, NOT_EXECUTABLE, "you may not read it"

    def _fix(self, folder: str) -> str:
        if _PYTHON.fullmatch(self.program):
            return ": `hvkit run ... script.py` takes the Python of hvkit"
        if Path(folder, self.program).is_file():
            return f": write ./{self.program} for the file in {folder}"
        return ""


def _in(name: str, folder: str) -> str:
    return "" if os.path.isabs(name) else f" in {folder}"


def _no_program(file: Path) -> str | None:
    """Why Linux does not start an executable file; ``None`` if it does."""
    start = _first_line(file)
    if start is None:
        return None
    if start.startswith(_INTERPRETER):
        # A line that ends with \r\n names a program whose name ends with \r.
        interpreter = os.fsdecode(start[2:]).rstrip("\n").strip(" \t").split(" ")[0]
        if interpreter and not os.path.exists(interpreter):
            return f"its first line names {interpreter!r}, which does not exist"
    elif b"\0" not in start:
        return "it is text, and its first line names no program such as #!/bin/sh"
    return None


def _first_line(file: Path) -> bytes | None:
    """The first line of a file, or its first 256 bytes; ``None`` if it cannot be read.

    Programs need not be readable.
    """
    try:
        with file.open("rb") as opened:
            return opened.readline(256)
    except OSError:
        return None
