"""What supervisor and agents say to each other: frames of a kind, a length and bytes.

The supervisor speaks first, with a nonce. The agent answers with a HELLO that proves, by an HMAC
over the nonce, that it knows the key of this run.
"""

import hashlib
import hmac
import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum

KEY_VARIABLE = "HVKIT_RUN_KEY"
"""Environment variable with the key of the run, in hexadecimal."""

SUPERVISOR_VARIABLE = "HVKIT_RUN"
"""Environment variable with what agents have to know: a :class:`Supervised` in JSON."""

NONCE_BYTES = 16
_HEADER = struct.Struct("!BI")
HEADER_BYTES = _HEADER.size
LONGEST_FRAME = 1 << 20
"""Bytes; what is longer was not sent by an agent."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    STDOUT = 2
    STDERR = 3
    ENDED = 4
    STOP = 5


@dataclass(frozen=True)
class Supervised:
    """What an agent is told in the environment.

    Attributes:
        host: the name of the supervisor's host.
        addresses: where the supervisor may be reached, in the order to try.
        port: its TCP port.
        lost_after: seconds without a sign of life after which the other host is given up; ``None``
            on one host.
        bind: whether each rank keeps to its share of the host's cores.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    lost_after: float | None
    bind: bool

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


def header(data: bytes) -> tuple[Kind, int]:
    """Kind and length of the frame that begins with ``data``.

    Raises:
        ValueError: that is no header of ours.
    """
    number, length = _HEADER.unpack(data)
    if length > LONGEST_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    return Kind(number), length


def proof(key: str, nonce: bytes) -> str:
    """What only who knows the key can answer to a nonce, in hexadecimal."""
    return hmac.new(bytes.fromhex(key), nonce, hashlib.sha256).hexdigest()
