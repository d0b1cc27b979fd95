"""Requests of one rank to the parameter server.

A rank that enters a collective first tells the server, which then counts it as away: it must not
hold up a rank that waits for the server and comes to that collective later. At the end of the
script a rank waits until all ranks have ended theirs, since Horovod ends on all ranks with the
first.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.messages import open_mailbox
from hvkit.errors import RankLostError
from hvkit.log import logger
from hvkit.parameter_server.server import (
    ANSWER,
    DROP,
    END,
    KINDS,
    LEAVE,
    LOST,
    NOTHING,
    PUSH,
    TAKE,
    Server,
    purpose_of,
)
from hvkit.strategies.parameter_server import Array, ParameterServer
from hvkit.transport import engines
from hvkit.watch.calls import call, waiting

_STEP = "optimizer.step()"
_SETTLED = "hvkit.settled"
_END_OF_SCRIPT = "the end of the script"


class Client:
    """This rank's requests to the server, for all models; making it is a collective."""

    def __init__(self, user: str) -> None:
        self._mailbox = open_mailbox(user)
        self.server = Server(self._mailbox, runtime.size()) if runtime.rank() == 0 else None
        # One request at a time, also if the script has several threads.
        self._lock = threading.Lock()
        # Models that the garbage collector has freed, which it may do at any time.
        self.dropped: deque[int] = deque()
        engines.before_collective.append(self._leave)
        # Registered after Horovod's own function and the watcher's, so it runs before them.
        atexit.register(self._end)

    def request(self, kind: int, arrays: list[Array], number: int = 0) -> list[Array]:
        """Send a request about a model; return the answer, which may overwrite ``arrays``."""
        with self._lock:
            while self.dropped:
                self._request(DROP, [NOTHING], self.dropped.popleft())
            return self._request(kind, arrays, number)

    def _request(self, kind: int, arrays: list[Array], number: int) -> list[Array]:
        if self.server:
            return self.server.request(kind, arrays, number)
        for each in arrays:
            self._mailbox.send(each, 0, number * KINDS + kind, purpose_of(each))
        if (found := self._mailbox.wait()).tag == LOST:
            text = np.empty(found.bytes, np.uint8)
            self._mailbox.receive(text, 0, LOST)
            raise RankLostError(text.tobytes().decode())
        for each in arrays:
            self._mailbox.receive(each, 0, ANSWER)
        return arrays

    def _leave(self) -> None:
        """Let the others train without this rank, until all ranks have called this as often."""
        self.request(LEAVE, [NOTHING])

    def _end(self) -> None:
        """Wait at the end of the script for the others, unless this rank has failed."""
        engines.before_collective.remove(self._leave)
        if getattr(sys, "last_value", None) is not None:
            if self.server:
                self.server.end(failed=True)
            return
        with contextlib.suppress(RankLostError), call(_END_OF_SCRIPT), waiting():
            self.request(END, [NOTHING])
            if self.server:
                self.server.end(failed=False)
            self._mailbox.close()


_client: Client | None = None
_numbers = itertools.count(1)  # of models
# By queue: the last iteration in which this rank has taken a batch.
_iterations: dict[int, int] = {}
# The queues for which ranks have differed.
_uneven: set[int] = set()


def take_batch(queue: int, iteration: int, count: int = 1) -> int:
    """Take the next batch that no rank has taken, and return its number.

    With ``count=0`` it takes nothing. The queue has the same number on every rank; iterations over
    it count from 1. It raises RankLostError if another rank has ended.
    """
    if _client is None:
        raise ValueError(
            "hvkit.shard(..., dynamic=True) is for ranks that take different numbers of steps: "
            "pass strategy=hvkit.ParameterServer(staleness=None) to hvkit.distribute before the "
            "loop, or leave dynamic out"
        )
    if count:
        _iterations[queue] = max(iteration, _iterations.get(queue, 0))
    (answer,) = _client.request(TAKE, [np.array([queue, iteration, count], np.int64)])
    return int(answer[0])


def compare_iterations() -> None:
    """Warn, once for a queue, if ranks have begun different numbers of iterations; a collective."""
    gathered = [dict(each) for each in collectives.gather(_SETTLED, [*_iterations.items()])]
    for queue in sorted(set().union(*gathered) - _uneven):
        begun = [iterations.get(queue, 0) for iterations in gathered]
        if len(set(begun)) > 1:
            _uneven.add(queue)
            if runtime.rank() == 0:
                counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(begun))
                logger.warning(
                    "ranks have begun different numbers of epochs of the data from "
                    f"hvkit.shard(..., dynamic=True) ({counts}), so at the end some train alone: "
                    "iterate over it equally often on every rank, and look at samples in the "
                    "original data"
                )


class Exchange:
    """One model's weights on the server; making it is a collective."""

    def __init__(self, strategy: ParameterServer) -> None:
        global _client
        if _client is None:
            _client = Client(str(strategy))
        self._client = _client
        self._strategy = strategy
        self._number: int | None = None
        self._drop: weakref.finalize[Any, Any] | None = None

    @property
    def begun(self) -> bool:
        return self._number is not None

    def add(self, weights: list[Array]) -> None:
        """Serve vectors with rank 0's values, behind those that were added before; a collective."""
        collectives.gather(_STEP, None)  # from here on no rank trains
        server = self._client.server
        if self._number is None:
            self._number = collectives.from_rank(0, next(_numbers))
            if server:
                server.begin(self._number, weights, self._strategy)
            self._drop = weakref.finalize(self, self._client.dropped.append, self._number)
            self._drop.atexit = False
        elif server:
            server.extend(self._number, weights)
        collectives.gather(_STEP, None)  # until the server has the vectors

    def exchange(self, changes: list[Array]) -> list[Array]:
        """Send the changes of a step, which are overwritten; return the weights after it."""
        assert self._number is not None
        return self._client.request(PUSH, changes, self._number)

    def read(self, like: list[Array]) -> list[Array]:
        """The server's weights, arrays like these, the same on every rank; a collective.

        Every rank must have waited for all others since its last exchange.
        """
        assert self._number is not None
        server = self._client.server
        weights = server.read(self._number) if server else [np.empty_like(each) for each in like]
        engine = runtime.any_engine()
        return [
            engines.broadcast_in_pieces(engine, each.view(np.uint8), 0, "weights").view(each.dtype)
            for each in weights
        ]

    def close(self) -> None:
        """Let the server forget these weights, once every rank has."""
        if self._drop:
            self._drop()
