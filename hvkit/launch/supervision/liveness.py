"""Whether the other end of a connection is there: asked of the kernels, not of the processes.

A process that waits for a disk or for its core is alive, and its kernel says so. One that has ended
closes the connection. What is left is a host or a network that is gone.

All this holds while both ends have room for what is sent: a kernel that has none is asked more and
more rarely. So output is sent only as fast as it is taken, see :mod:`.protocol`.
"""

import socket
import struct

# In struct tcp_info of Linux: milliseconds since the last acknowledgement.
_TCP_INFO_BYTES = 60
_LAST_ACK = 56
# Linux allows 127 questions without an answer.
_QUESTIONS = 50


def keep_alive(connection: socket.socket, lost_after: float | None) -> None:
    """Have the kernel ask for answers, and break the connection after a time without any.

    Args:
        connection: a TCP connection.
        lost_after: seconds; ``None`` for a connection within this host.
    """
    if lost_after is None:
        return
    every = asked_every(lost_after)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, max(1, round(lost_after / every) - 1)),
        # For what was sent and not acknowledged, in milliseconds.
        (socket.TCP_USER_TIMEOUT, round(lost_after * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def asked_every(lost_after: float) -> int:
    """Seconds between the questions."""
    return max(1, int(lost_after / _QUESTIONS))


def silent_for(connection: socket.socket) -> float:
    """Seconds since the other end's kernel last answered, on a connection that is kept alive."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (milliseconds,) = struct.unpack_from("=I", info, _LAST_ACK)
    return float(milliseconds) / 1000
