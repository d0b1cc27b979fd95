"""What a host needs before ranks start there: prints the host's facts, and the first problem.

``preflight`` runs ``python -m hvkit.launching.probe FOLDER PATH PROGRAM SCRIPT`` on all hosts of a
job. This module imports little: from a network file system that is not cached yet, each import
takes long.

hvkit's programs on other hosts print lines of JSON, ``{"hvkit": ...}``. The host may print a
greeting before them, with or without an end of line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hvkit
from hvkit.host.hardware import usable_cpus
from hvkit.host.network import Interface, interfaces

NOT_FOUND = 127  # exit status where a shell finds no such command

NOT_EXECUTABLE = 126  # exit status where a shell finds the command and cannot start it

_PYTHON = re.compile(r"python(\d(\.\d+)?t?)?")
# Options of Python's: with a value, and with the code or module that takes a script's place.
_WITH_VALUE = "WX"
_LONG_WITH_VALUE = "--check-hash-based-pycs"
_IN_PLACE_OF_SCRIPT = "cm"

_LINE_START = '{"hvkit": '

# Where Open MPI puts the files of a run: the first of these that is set, else /tmp.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
# Ends the names of the settings that move them.
_MOVED = "tmpdir_base"
# Bytes; Open MPI needs more than 16 KiB.
_ROOM = 1 << 16


@dataclass(frozen=True)
class RankCommand:
    """The files that a command needs on each host."""

    program: str  # the first word of the command
    script: str  # that Python is to run; empty if there is none
    path: str  # the folders in which ranks look for programs, as in PATH

    @classmethod
    def of(cls, words: Sequence[str], path: str) -> RankCommand:
        index = _index_of_script(words)
        return cls(words[0], "" if index is None else words[index], path)

    def problem(self, folder: str) -> tuple[int, str] | None:
        """The exit status of a shell, and why this host cannot start the command in ``folder``."""
        for name, status, reason in self._problems(folder):
            return status, f"cannot run {name}: {reason}"
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
        name, file = self.script, Path(folder, self.script)
        if name == "-":
            yield name, NOT_FOUND, "ranks have no standard input: write the script to a file"
        elif name and not file.exists():
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
class Facts:
    """A host, seen from itself."""

    hostname: str
    version: str  # of its hvkit
    cpus: int  # logical ones that this process may use; in a container at most its limit
    interfaces: tuple[Interface, ...]  # with IPv4, as launchers support no other
    problem: str | None = None  # why ranks cannot start there, with the fix
    status: int | None = None  # the exit status of the ranks' command, if that cannot start

    @classmethod
    def here(cls, folder: str, command: RankCommand) -> Facts:
        problem = _problem_of_folder(folder) or _problem_of_temporary_files(os.environ)
        status = None
        if problem is None:
            status, problem = command.problem(folder) or (None, None)
        return cls(
            hostname=socket.gethostname(),
            version=hvkit.__version__,
            cpus=usable_cpus(),
            interfaces=tuple(each for each in interfaces() if each.version == 4),
            problem=problem,
            status=status,
        )

    def printed(self) -> str:
        return json_line(asdict(self))

    @classmethod
    def read(cls, output: str) -> Facts:
        """The facts in the output of another host."""
        lines = [values for line in output.splitlines() if (values := read_line(line)) is not None]
        if not lines:
            raise ValueError("it printed no facts")
        values = lines[-1]
        if values.get("version") != hvkit.__version__:
            raise ValueError(f"it has hvkit {values.get('version')}, not {hvkit.__version__}")
        found = tuple(Interface(**interface) for interface in values["interfaces"])
        return cls(**{**values, "interfaces": found})


def json_line(values: Mapping[str, Any]) -> str:
    """The line that ``read_line`` reads."""
    return json.dumps({"hvkit": values})


def read_line(line: str) -> dict[str, Any] | None:
    """The values in a line that another host printed; ``None`` if hvkit did not print the line."""
    _, found, rest = line.partition(_LINE_START)
    if not found:
        return None
    values: dict[str, Any] = json.JSONDecoder().raw_decode(found + rest)[0]["hvkit"]
    return values


def _problem_of_folder(folder: str) -> str | None:
    if os.path.isdir(folder):
        return None
    return (
        f"has no folder {folder}, the working directory: share it with all hosts, or start in a "
        "folder that all hosts have"
    )


def _problem_of_temporary_files(environ: Mapping[str, str]) -> str | None:
    if any(name.endswith(_MOVED) for name in environ):
        return None
    named = next((environ[name] for name in _TEMPORARY if environ.get(name)), "/tmp")
    # Open MPI makes a folder that does not exist.
    folder = next(each for each in (Path(named), *Path(named).absolute().parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="hvkit-") as file:
            file.write(bytes(_ROOM))
            file.flush()
    except OSError as error:
        return (
            f"cannot write temporary files to {folder} ({error.strerror}), which the launcher "
            "needs: make room there, or set TMPDIR to another folder"
        )
    return None


if __name__ == "__main__":
    _, folder, path, program, script = sys.argv
    with contextlib.suppress(OSError):  # PATH may name folders below it
        os.chdir(folder)
    print(Facts.here(folder, RankCommand(program, script, path)).printed())
