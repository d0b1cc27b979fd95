"""The mailbox of a run: by MPI, or over TCP where Horovod runs on Gloo."""

from __future__ import annotations

import secrets

from hvkit import runtime
from hvkit.communication.collectives import from_rank, gather, raise_together
from hvkit.errors import LaunchError
from hvkit.transport.mailbox import Mailbox, mpi_mailbox, obstacle
from hvkit.transport.tcp_mailbox import TcpMailbox


def open_mailbox(user: str) -> Mailbox:
    """A mailbox for this run; making it is a collective.

    Args:
        user: what needs it, for errors.

    Raises:
        LaunchError: a rank cannot send messages; on every rank, with the fix.
    """
    engine = runtime.any_engine()
    if not engine.hvd.mpi_enabled():
        mailbox = TcpMailbox(
            runtime.rank(),
            from_rank(0, secrets.token_bytes(32)),
            runtime.local_size() == runtime.size(),
            lambda: not engine.hvd.is_initialized(),
        )
        mailbox.addresses = gather("distribute", mailbox.address)
        return mailbox
    why = obstacle(engine)
    raise_together(LaunchError(f"{user} needs messages by MPI: {why}") if why else None)
    return mpi_mailbox()
