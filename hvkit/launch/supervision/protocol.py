"""What supervisor and agents say to each other: frames of a kind, a length and bytes.

The supervisor speaks first, with a nonce. The agent answers with a HELLO that proves, by an HMAC
over the nonce, that it knows the key of this run.

Of output an agent sends no more than ``WINDOW`` bytes ahead of what the supervisor tells to have
taken: no more than the supervisor's kernel can hold while its process is stopped or its terminal.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum

KEY_VARIABLE = "HVKIT_RUN_KEY"
"""Environment variable with the key of the run, in hexadecimal."""

SUPERVISOR_VARIABLE = "HVKIT_RUN"
"""Environment variable with what agents have to know: a :class:`Supervised` in JSON."""

NONCE_BYTES = 16
_HEADER = struct.Struct("!BI")
_NUMBER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size
LONGEST_FRAME = 1 << 16
"""Bytes after the header; what is longer was not sent by an agent."""

LONGEST_HELLO = 1 << 12
"""Bytes; so much is read of who has not proved yet to be an agent."""

WINDOW = 1 << 16
"""Bytes of output, with headers, that may be under way."""

RECEIVE_BUFFER = 4 * WINDOW
"""Bytes to ask the supervisor's kernel for; it counts more than what was sent."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """Of an agent: who it is, in JSON."""
    STDOUT = 2
    STDERR = 3
    ASKED = 4
    """Of an agent: it was told to end its command, by something else than the supervisor."""
    ENDED = 5
    """Of an agent: how its command ended, in JSON."""
    TAKEN = 6
    """Of the supervisor: a number of bytes of output that were taken."""
    SIGNAL = 7
    """Of the supervisor: the number of a signal for the command."""
    STOP = 8
    """Of the supervisor: end the command, within a number of milliseconds."""
    INTERRUPT = 9
    """Of the supervisor: send the command what Ctrl-C sends; a STOP follows if it does not end."""


@dataclass(frozen=True)
class Supervised:
    """What an agent is told in the environment.

    Attributes:
        host: the name of the supervisor's host.
        addresses: where the supervisor may be reached, in the order to try.
        port: its TCP port.
        lost_after: seconds without a sign of life after which the other host is given up; ``None``
            on one host.
        grace: seconds that a command has to end when its launcher asks for that.
        bind: whether each rank keeps to its share of the host's cores.
        variables: environment variables for the commands on the supervisor's host alone.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    lost_after: float | None
    grace: float
    bind: bool
    variables: Mapping[str, str]

    def to_json(self) -> str:
        """For ``SUPERVISOR_VARIABLE``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Supervised":
        """The contents of ``SUPERVISOR_VARIABLE``."""
        values = json.loads(text)
        return cls(**{**values, "addresses": tuple(values["addresses"])})


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(kind, len(payload)) + payload


def header(data: bytes, longest: int = LONGEST_FRAME) -> tuple[Kind, int]:
    """Kind and length of the frame that begins with ``data``.

    Raises:
        ValueError: that is no header of ours.
    """
    kind, length = _HEADER.unpack(data)
    if length > longest:
        raise ValueError(f"a frame of {length} bytes")
    return Kind(kind), length


def packed(value: int) -> bytes:
    """A number as a payload."""
    return _NUMBER.pack(value)


def unpacked(payload: bytes) -> int:
    """The number that a payload is."""
    value: int = _NUMBER.unpack(payload)[0]
    return value


def proof(key: str, nonce: bytes) -> str:
    """What only who knows the key can answer to a nonce, in hexadecimal."""
    return hmac.new(bytes.fromhex(key), nonce, hashlib.sha256).hexdigest()
