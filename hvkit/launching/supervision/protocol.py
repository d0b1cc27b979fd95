"""The messages between an agent and the supervisor, in frames of ``hvkit.connections``.

**Output.** A kernel whose receive buffer is full acknowledges more and more rarely, as if its host
were lost. So an agent sends at most ``WINDOW`` bytes of output that the supervisor has not read
yet: its kernel can hold as much while ``hvkit run`` or its terminal is stopped.

**The command** of a rank stands on the launcher's command line, after the agent's own
(``agent_command``). Launchers read words there that are meant for the script: Open MPI and Hydra
begin another program after a ``:``, and Open MPI 5 changes ``--map-by`` and takes ``--mca`` for its
own wherever they stand. So these words travel with a mark before them.

**A function** for ranks, and what each has returned, are files in a folder that only its user can
read. Ranks on the host of ``hvkit run`` use the folder that was made there. On another host each
agent makes one of its own, which the supervisor's connection fills and empties.
``hvkit.functions`` knows what is in the files.
"""

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

from hvkit.connections import HEADER_BYTES, Connection, ConnectionLost, connect, keep_alive
from hvkit.errors import is_of_full_disk

KEY_VARIABLE = "HVKIT_RUN_KEY"  # environment variable with the key of the run, in hexadecimal

SUPERVISOR_VARIABLE = "HVKIT_RUN"  # environment variable with the ``AgentSettings`` in JSON

CANNOT_RUN = 127  # the status that shells and agents return for a command they cannot run

CALL_VARIABLE = "HVKIT_CALL"  # environment variable of ranks that run a function: the folder

CALL_PREFIX = "hvkit-call-"  # how the names of such folders begin

_AGENT = "hvkit.launching.supervision.agent"
# Before a word that a launcher might read, or that begins with the mark itself.
_MARK = "+"
_MARKED = (_MARK, "-", ":")

_NUMBER_BYTES = 4

LONGEST_FRAME = 1 << 16  # bytes of the longest frame, without its header

# Bytes of output, or of a file, in a frame; small, so that several fit into the window.
PIECE = 1 << 14

WINDOW = 1 << 16  # bytes of output, with headers, that an agent may send ahead of the supervisor

# Bytes of the supervisor's receive buffer, larger since the kernel includes its own overhead.
RECEIVE_BUFFER = 4 * WINDOW


class Frame(IntEnum):
    """The types of frames. An agent sends those up to ``CLOCK``, the supervisor the others."""

    HELLO = 1  # rank and host, and whether it wants the call (``CALL``), in JSON
    STDOUT = 2  # bytes that the command wrote to its standard output
    STDERR = 3  # bytes that the command wrote to its standard error
    STOPPED = 4  # the command is being ended, by the supervisor or for instance by the launcher
    ENDED = 5  # how the command ended, in JSON
    REPORT = 6  # a report of the rank, see ``hvkit.host.run_reports``: a line of JSON
    # The rank's latest spans, see ``hvkit.watch.spans``: a line of JSON. Counts as output.
    SPANS = 11
    # A piece of the file with what the function has returned or raised on another host; a SEAL
    # follows the last. Counts as output.
    OUTCOME = 14
    CLOCK = 12  # the number of an ASK, and this host's ``time.monotonic()``, in JSON
    TAKEN = 7  # the number of bytes of output that the supervisor has read since the last TAKEN
    SIGNAL = 8  # the number of a signal to send to the command
    STOP = 9  # end the command within this number of milliseconds
    INTERRUPT = 10  # send the command the signal of Ctrl-C; a STOP follows if it does not end
    ASK = 13  # a number; a CLOCK answers it
    CALL = 15  # a piece of the file with the function to call; a SEAL follows the last
    # From both: a digest of the file before it (``sealed``), since what is in it is executed.
    SEAL = 16


def agent_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command line of an agent that runs ``command``, for any launcher."""
    words = (_MARK + word if word.startswith(_MARKED) else word for word in command)
    return (sys.executable, "-P", "-m", _AGENT, *words)


def command_of_agent(words: Sequence[str]) -> tuple[str, ...]:
    """The command in an agent's arguments, which ``agent_command`` has made."""
    return tuple(word.removeprefix(_MARK) for word in words)


@dataclass(frozen=True)
class AgentSettings:
    """The settings of a run that its agents need; they get them in the environment."""

    addresses: Sequence[str]  # of the supervisor, in the order to try; one host: only loopback
    lost_after: float | None  # seconds without an acknowledgement; None if the run uses one host
    grace: float  # seconds that commands have to end
    bind: bool  # each rank to its part of the host's cores
    # For the commands on the supervisor's host only.
    variables: Mapping[str, str] = field(default_factory=dict)
    call: str | None = None  # the folder on the supervisor's host, if ranks run a function
    host: str = ""
    port: int = 0


class AgentConnection:
    """An agent's end. After the connection is lost, sending drops the data; receiving raises."""

    def __init__(self, connected: socket.socket, key: bytes) -> None:
        self._connection = Connection(connected, LONGEST_FRAME)
        self._key = key
        self._window = threading.Condition()
        self._not_taken = 0
        self._lost = False
        self.finish = self._connection.finish

    @classmethod
    def to_supervisor(
        cls, settings: AgentSettings, key: str, rank: int, wants_call: bool
    ) -> "AgentConnection":
        """Connect to the first address where the supervisor answers, and send the HELLO.

        ``receive_call`` has to follow if it says ``wants_call``. ``key`` is in hexadecimal.
        """
        connected = connect(settings.addresses, settings.port, bytes.fromhex(key))
        keep_alive(connected, settings.lost_after)
        agent = cls(connected, bytes.fromhex(key))
        hello = {"rank": rank, "host": socket.gethostname(), "call": wants_call}
        agent.send_json(Frame.HELLO, hello)
        return agent

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self._connection.send(frame, payload)

    def send_output(self, frame: Frame, payload: bytes) -> None:
        """Send output; blocks while the window is full."""
        size = HEADER_BYTES + len(payload)
        with self._window:
            self._window.wait_for(lambda: self._lost or self._not_taken + size <= WINDOW)
            self._not_taken += size
        self.send(frame, payload)

    def send_json(self, frame: Frame, values: Mapping[str, Any]) -> None:
        self.send(frame, json.dumps(values).encode())

    def receive_call(self, path: Path) -> None:
        """Write the call, which the supervisor sends before anything else, to a file."""
        call = SealedFile(path, self._key, Frame.CALL)
        try:
            while not call.take(*self._connection.receive()):
                pass
        except ValueError as problem:
            raise ConnectionLost(str(problem)) from problem

    def send_outcome(self, path: Path) -> None:
        for frame, piece in sealed(path, self._key, Frame.OUTCOME):
            self.send_output(frame, piece)

    def receive(self) -> tuple[Frame, int]:
        """Wait for the next frame from the supervisor, and return its type and number."""
        try:
            while True:
                frame, payload = self._connection.receive()
                number = unpacked(payload)
                if frame != Frame.TAKEN:
                    return Frame(frame), number
                with self._window:
                    self._not_taken -= number
                    self._window.notify_all()
        except (ConnectionLost, ValueError) as error:
            with self._window:
                self._lost = True
                self._window.notify_all()
            raise ConnectionLost(str(error)) from error


def sealed(path: Path, key: bytes, frame: Frame) -> Iterator[tuple[Frame, bytes]]:
    """The frames that send a file: pieces of this type, and a SEAL.

    The SEAL covers the file's name, too, so that no other one can take its place.
    """
    seal = _seal(path, key)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            seal.update(piece)
            yield frame, piece
    yield Frame.SEAL, seal.digest()


class SealedFile:
    """A file that arrives in such frames, and appears under its name when it is complete."""

    def __init__(self, path: Path, key: bytes, frame: Frame) -> None:
        self._path = path
        self._seal = _seal(path, key)
        self._type = frame

    def take(self, frame: int, payload: bytes | bytearray) -> bool:
        """Take a frame; whether the file is complete."""
        part = _part_of(self._path)
        if frame == Frame.SEAL and hmac.compare_digest(payload, self._seal.digest()):
            part.replace(self._path)
            return True
        if frame != self._type:
            raise ValueError(f"{Frame(frame).name} instead of the {self._path.name}")
        self._seal.update(payload)
        with part.open("ab") as file:
            file.write(payload)
        return False


def _seal(path: Path, key: bytes) -> hmac.HMAC:
    return hmac.new(key, path.name.encode() + b"\0", "sha256")


def call_in(folder: Path) -> Path:
    """The file with the function and its arguments."""
    return folder / "call"


def outcome_in(folder: Path, rank: int) -> Path:
    """The file with what a rank has returned or raised; absent until it has."""
    return folder / f"outcome-{rank}"


def remove_outcomes(folder: Path) -> None:
    """Remove what ranks have left there, before they are started again."""
    for each in folder.glob("outcome-*"):
        each.unlink()


def _part_of(path: Path) -> Path:
    """The file that becomes this one once it is complete."""
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when it is complete.

    After an exception nothing of it is left, which makes room on a full disk for the reason.
    """
    part = _part_of(path)
    try:
        with part.open("wb") as file:
            yield file
    except BaseException as error:
        part.unlink(missing_ok=True)
        if is_of_full_disk(error) and error.filename is None:
            error.filename = str(path)
            error.add_note("Set TMPDIR to a folder on a disk with more room.")
        raise
    os.replace(part, path)


def fields(payload: bytes | bytearray, **types: type) -> list[Any]:
    """Values of a JSON object, in the order of ``types``; None for one that it lacks.

    ``float`` accepts integers, too. Another type is a ``ValueError``.
    """
    try:
        values = json.loads(payload)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"no JSON object: {payload[:80]!r}")
    found = []
    for name, type_ in types.items():
        value = values.get(name)
        accepted = (int, float) if type_ is float else type_
        wrong_flag = isinstance(value, bool) and type_ is not bool
        if value is not None and (wrong_flag or not isinstance(value, accepted)):
            raise ValueError(f"{name} is {value!r}, which is no {type_.__name__}")
        found.append(value)
    return found


def packed(number: int) -> bytes:
    """The payload of a frame that holds a number."""
    return number.to_bytes(_NUMBER_BYTES, "big")


def unpacked(payload: bytes | bytearray) -> int:
    if len(payload) != _NUMBER_BYTES:
        raise ValueError(f"a number of {len(payload)} bytes")
    return int.from_bytes(payload, "big")
