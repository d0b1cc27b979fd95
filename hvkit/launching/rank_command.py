"""The command that every rank runs, and whether a host can start it.

``probe`` checks that on every host before ranks start there, so this module imports little.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvkit.errors import UsageError

NOT_FOUND = 127
"""Exit status where a shell finds no such command."""

NOT_EXECUTABLE = 126
"""Exit status where a shell finds the command and cannot start it."""

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


@dataclass(frozen=True)
class CommandProblem:
    """Why a host cannot start a command."""

    status: int
    text: str


@dataclass(frozen=True)
class RankCommand:
    """The files that a command needs on each host."""

    program: str
    script: str
    path: str

    @classmethod
    def of(cls, words: Sequence[str], path: str) -> "RankCommand":
        """The files of a command."""
        index = _index_of_script(words)
        return cls(words[0], "" if index is None else words[index], path)

    def problem(self, folder: str) -> CommandProblem | None:
        """Why this host cannot start the command in ``folder``; ``None`` if it can."""
        if problem := self._problem_of_program(folder):
            return problem
        if not self.script:
            return None
        script = Path(folder, self.script)
        if not script.exists():
            return CommandProblem(
                NOT_FOUND,
                f"cannot run {self.script}: there is no such file{_in(self.script, folder)}",
            )
        if not os.access(script, os.R_OK):
            return CommandProblem(NOT_EXECUTABLE, f"cannot run {self.script}: you may not read it")
        return None

    def _problem_of_program(self, folder: str) -> CommandProblem | None:
        name = self.program
        if os.sep not in name:
            if shutil.which(name, path=self.path):
                return None
            return CommandProblem(
                NOT_FOUND, f"cannot run {name}: there is no such program on PATH{self._fix(folder)}"
            )
        file = Path(folder, name)
        if not file.exists():
            return CommandProblem(
                NOT_FOUND, f"cannot run {name}: there is no such file{_in(name, folder)}"
            )
        if file.is_dir():
            return CommandProblem(NOT_EXECUTABLE, f"cannot run {name}: it is a folder")
        if not os.access(file, os.X_OK):
            return CommandProblem(
                NOT_EXECUTABLE, f"cannot run {name}: it is not executable: `chmod +x {name}`"
            )
        if reason := _no_program(file):
            return CommandProblem(NOT_EXECUTABLE, f"cannot run {name}: {reason}")
        return None

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
