"""Copies of the newest checkpoint in the memory of other hosts, for restarts by ``hvkit run``.

Rank 0 sends each checkpoint that is complete on its disk to the first rank of some other hosts, the
holders (``transfer``). A thread there keeps it as files in memory, which outlive the ranks. After a
restart the ranks load the copy, so they need neither the disk nor the host of rank 0
(``newest_checkpoint``).

The copies belong to one run of ``hvkit run`` with all its restarts, which deletes them at its end.
If ``hvkit run`` itself was killed, the next run with copies on that host deletes them a day later.

Similar: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints" (SOSP 2023).
"""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hvkit import runtime, threads
from hvkit.checkpoint import store, transfer
from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.host.run_reports import memory_folder
from hvkit.log import logger
from hvkit.watch import channel

# Seconds that the first save waits for the holders to connect.
_CONNECTED = 10.0
# Seconds before a holder that cannot reach rank 0 tries again.
_AGAIN = 10.0


class Replicas:
    """The copies of one directory's newest checkpoint.

    Args:
        directory: rank 0's directory.
        number: on how many other hosts to keep a copy; 0 for none.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self._directory = directory
        self._opened = False
        self._hosts: dict[int, str] = {}
        self._links: dict[int, Connection] = {}
        self._late: set[int] | None = None
        self._listener: channel.RankListener | None = None
        # Guards these.
        self._changed = threading.Condition()

    @property
    def folder(self) -> Path | None:
        """Where this host keeps copies of the directory's checkpoints.

        None without ``replicas``, and if ``hvkit run`` will not start the ranks again.
        """
        if (root := memory_folder()) is None or not self.number:
            return None
        return root / store.id_of(self._directory)

    def require_same_number(self, call: str) -> None:
        """Raise on every rank unless all have the same ``replicas``; a collective.

        Raises:
            RanksDisagreeError: names the numbers of two ranks.
        """
        self._from_all(call, ())

    def open(self, call: str) -> None:
        """Connect rank 0 to the hosts that keep the copies, once; a collective.

        Raises:
            RanksDisagreeError: the ranks have different ``replicas``.
        """
        if self._opened:
            return
        self._opened = True
        mine = (self.folder is not None, runtime.local_rank(), socket.gethostname())
        everyone = list(enumerate(self._from_all(call, mine)))
        if not self.number:
            return
        others = {rank: host for rank, (_, local, host) in everyone if rank and local == 0}
        restarts = all(restarts for _, (restarts, _, _) in everyone)
        if restarts:
            self._hosts = dict(list(others.items())[: self.number])
        if runtime.rank() == 0 and len(self._hosts) < self.number:
            _log_fewer(self.number, len(others), restarts=restarts)
        if not self._hosts:
            return
        problem, endpoint = None, ""
        if runtime.rank() == 0:
            try:
                self._listener = channel.RankListener(one_host=False, patience=transfer.PATIENCE)
                endpoint = self._listener.endpoint.to_json()
                threads.start("hvkit-replicas", self._listener.serve, self._admit)
            except OSError as error:
                problem = error
        endpoint = collectives.share(call, problem, endpoint)[0]
        if runtime.rank() in self._hosts and self.folder is not None:
            rank_0 = channel.Endpoint.from_json(endpoint)
            threads.start("hvkit-replicas", _hold, rank_0, self.folder)

    def send(self, folder: Path) -> None:
        """Send a complete checkpoint to all holders; on rank 0.

        If a host does not keep it, rank 0 logs why, and training goes on.

        Args:
            folder: the checkpoint, which nobody may delete meanwhile.
        """
        with self._changed:
            if self._late is None:
                self._late = set()
                self._changed.wait_for(self._are_complete, _CONNECTED)
            links = {rank: self._links.get(rank) for rank in self._hosts}
        for rank, link in links.items():
            fails = f"{self._hosts[rank]} keeps no copy of {folder}"
            if link is None:
                if rank not in self._late:
                    logger.warning(
                        "%s: rank %d there has not connected yet; once it has, it gets the next",
                        *(fails, rank),
                    )
                self._late.add(rank)
                continue
            try:
                problem = transfer.give(link, folder)
            except transfer.LinkError as error:
                self._drop(rank)
                problem = f"rank {rank} there {error}; it gets no more copies until a restart"
            except OSError as error:  # drop the holder, which waits for the rest
                self._drop(rank)
                problem = (
                    f"rank 0 cannot read it again ({error.strerror or error}); it gets no more "
                    "copies until a restart"
                )
            if problem:
                logger.warning("%s: %s", fails, problem)

    def _are_complete(self) -> bool:
        return self._links.keys() >= self._hosts.keys()

    def _admit(self, rank: int, connection: Connection) -> None:
        with self._changed:
            if rank not in self._hosts:
                connection.close()
                return
            self._links[rank] = connection
            self._stop_listening_if_complete()
            self._changed.notify_all()

    def _drop(self, rank: int) -> None:
        with self._changed:
            del self._hosts[rank]
            self._links.pop(rank).close()
            self._stop_listening_if_complete()

    def _stop_listening_if_complete(self) -> None:
        if self._listener is not None and self._are_complete():
            self._listener.close()
            self._listener = None

    def _from_all(self, call: str, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """What each rank has passed; an error on every rank if their ``replicas`` differ."""
        numbers, everyone = zip(*collectives.gather(call, (self.number, mine)), strict=True)
        for rank, number in enumerate(numbers):
            if number != numbers[0]:
                raise RanksDisagreeError(
                    f"Checkpoint needs the same replicas= on every rank: rank 0 has {numbers[0]}, "
                    f"rank {rank} has {number}"
                )
        return list(everyone)


def _log_fewer(wanted: int, others: int, *, restarts: bool) -> None:
    if not restarts:
        logger.info(
            "replicas=%d: no copies are kept, because only restarts need them: start the script "
            "with `hvkit run --max-restarts`",
            wanted,
        )
    elif not others:
        logger.info("replicas=%d: no copies are kept, because all ranks are on one host", wanted)
    else:
        logger.info(
            "replicas=%d: fewer copies are kept, because the ranks are on %d hosts",
            *(wanted, others + 1),
        )


def _hold(endpoint: channel.Endpoint, folder: Path) -> None:
    """Keep what rank 0 sends, until it ends; on a holder."""
    transfer.delete_abandoned(folder.parent)
    while (connection := channel.connect(endpoint, runtime.rank(), transfer.PATIENCE)) is None:
        time.sleep(_AGAIN)
    transfer.keep(connection, folder)
