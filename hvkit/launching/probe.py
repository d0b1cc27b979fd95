"""Prints facts about a host before ranks start there.

``preflight`` runs ``python -m hvkit.launching.probe FOLDER PATH PROGRAM SCRIPT`` on all
hosts of a job. It is a module of its own to import little: from a network file system that is not
cached yet, each import takes long.

hvkit's programs on other hosts print lines of JSON, ``{"hvkit": ...}``. The host may print a
greeting before them, with or without an end of line.
"""

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hvkit
from hvkit.host.hardware import usable_cpus
from hvkit.host.network import Interface, interfaces
from hvkit.launching.rank_command import RankCommand

_LINE_START = '{"hvkit": '

# Where Open MPI puts the files of a run: the first of these that is set, else /tmp.
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
# Ends the names of the settings that move them.
_MOVED = "tmpdir_base"
# Bytes; Open MPI needs more than 16 KiB.
_ROOM = 1 << 16


@dataclass(frozen=True)
class Facts:
    """A host, seen from itself."""

    hostname: str
    version: str  # of its hvkit
    cpus: int  # logical ones that this process may use; in a container at most its limit
    interfaces: tuple[Interface, ...]
    problem: str | None = None  # why ranks cannot start there, with the fix
    status: int | None = None  # the exit status of the ranks' command, if that cannot start

    @classmethod
    def here(cls, folder: str, command: RankCommand) -> "Facts":
        problem = _problem_of_folder(folder) or _problem_of_temporary_files(os.environ)
        status = None
        if problem is None:
            status, problem = command.problem(folder) or (None, None)
        return cls(
            hostname=socket.gethostname(),
            version=hvkit.__version__,
            cpus=usable_cpus(),
            interfaces=tuple(interfaces()),
            problem=problem,
            status=status,
        )

    def printed(self) -> str:
        return json_line(asdict(self))

    @classmethod
    def read(cls, output: str) -> "Facts":
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
