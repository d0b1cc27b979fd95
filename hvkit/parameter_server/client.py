"""Requests of one rank to the parameter server.

A rank that enters a collective first tells the server, which then counts it as away: it must not
hold up a rank that waits for the server and comes to that collective later. At the end of the
script a rank waits until all ranks have ended theirs, since Horovod ends on all ranks with the
first.
"""

from __future__ import annotations

import atexit
import contextlib
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
)
from hvkit.strategies.parameter_server import Array, ParameterServer
from hvkit.transport import engines
from hvkit.transport.mailbox import Mailbox
from hvkit.watch.calls import call, waiting

_STEP = "optimizer.step()"
_SETTLED = "hvkit.settled"
_END_OF_SCRIPT = "the end of the script"


class Client:
    """Sends requests of a rank other than 0 to the server.

    Args:
        mailbox: of this rank.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        # One request at a time, also if the script has several threads.
        self._lock = threading.Lock()

    def exchange(self, number: int, changes: list[Array]) -> list[Array]:
        """Send the changes of a step; wait until this rank may continue, and return the weights.

        Args:
            number: of the model.
            changes: of each vector; they are overwritten.
        """
        self._request(PUSH, changes, changes, number, "weights")
        return changes

    def leave(self) -> None:
        """Let the others train without this rank, until all ranks have called this as often."""
        self._request(LEAVE, [NOTHING], [NOTHING.copy()])

    def drop(self, number: int) -> None:
        """Never exchange weights of this model again."""
        self._request(DROP, [NOTHING], [], number)

    def take(self, request: Array) -> int:
        """Take batches of a queue, and return the number of the first.

        Args:
            request: of int64: the queue, the iteration, and how many to take.
        """
        answer = np.empty(1, np.int64)
        self._request(TAKE, [request], [answer])
        return int(answer[0])

    def end(self) -> None:
        """Wait until all ranks have ended their scripts."""
        self._request(END, [NOTHING], [NOTHING.copy()])

    def _request(
        self,
        kind: int,
        sent: list[Array],
        answers: list[Array],
        number: int = 0,
        purpose: str = "checks",
    ) -> None:
        """Send a request, and receive its answers, if it has some.

        Raises:
            RankLostError: there will be none.
        """
        with self._lock:
            for each in sent:
                self._mailbox.send(each, 0, number * KINDS + kind, purpose)
            if answers and (found := self._mailbox.wait()).tag == LOST:
                text = np.empty(found.bytes, np.uint8)
                self._mailbox.receive(text, 0, LOST)
                raise RankLostError(text.tobytes().decode())
            for each in answers:
                self._mailbox.receive(each, 0, ANSWER)


class Service:
    """This rank's connection with the server, for all models; making it is a collective.

    Args:
        user: what needs it, for errors.
    """

    def __init__(self, user: str) -> None:
        self._mailbox = open_mailbox(user)
        self.server: Server | None = None
        self._requests: Server | Client
        if runtime.rank() == 0:
            self._requests = self.server = Server(self._mailbox, runtime.size())
        else:
            self._requests = Client(self._mailbox)
        # Models that this rank has dropped, but has not told the server about.
        self._dropped: deque[int] = deque()
        engines.before_collective.append(self.leave)
        # Registered after Horovod's own function and the watcher's, so it runs before them.
        atexit.register(self._end)

    def exchange(self, number: int, changes: list[Array]) -> list[Array]:
        """As ``Client.exchange``."""
        self._drop_some()
        return self._requests.exchange(number, changes)

    def leave(self) -> None:
        """As ``Client.leave``."""
        self._drop_some()
        self._requests.leave()

    def take(self, request: Array) -> int:
        """As ``Client.take``."""
        return self._requests.take(request)

    def drop_later(self, number: int) -> None:
        """Drop a model with the next request: the garbage collector calls this at any time."""
        self._dropped.append(number)

    def _drop_some(self) -> None:
        while self._dropped:
            self._requests.drop(self._dropped.popleft())

    def _end(self) -> None:
        """Wait at the end of the script for the others, unless this rank has failed."""
        engines.before_collective.remove(self.leave)
        if getattr(sys, "last_value", None) is not None:
            if self.server:
                self.server.stop()
            return
        with contextlib.suppress(RankLostError), call(_END_OF_SCRIPT), waiting():
            self._requests.end()
            self._mailbox.close()


_service: Service | None = None
_models = 0
# By queue: the last iteration in which this rank has taken a batch.
_iterations: dict[int, int] = {}
# The queues for which ranks have differed.
_uneven: set[int] = set()


def take_batch(queue: int, iteration: int, count: int = 1) -> int:
    """Take the next batch that no rank has taken, and return its number.

    Args:
        queue: a number, the same on every rank.
        iteration: over this queue, counted from 1.
        count: 0 to look at the next number, and take nothing.

    Raises:
        ValueError: no model is trained with a parameter server.
        RankLostError: another rank has ended.
    """
    if _service is None:
        raise ValueError(
            "hvkit.shard(..., dynamic=True) is for ranks that take different numbers of steps: "
            "pass strategy=hvkit.ParameterServer(staleness=None) to hvkit.distribute before the "
            "loop, or leave dynamic out"
        )
    if count:
        _iterations[queue] = max(iteration, _iterations.get(queue, 0))
    return _service.take(np.array([queue, iteration, count], np.int64))


def compare_iterations() -> None:
    """Warn, once for each queue, if a rank has begun more iterations than others; a collective.

    This is no error: scripts that count steps instead of epochs end in different epochs.
    """
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
    """One model's weights on the server; making it is a collective.

    Args:
        strategy: how far ranks may be ahead.
    """

    def __init__(self, strategy: ParameterServer) -> None:
        global _service
        if _service is None:
            _service = Service(str(strategy))
        self._service = _service
        self._strategy = strategy
        self._number: int | None = None
        # Dtype and length of each vector.
        self._layout: list[tuple[Any, int]] = []
        self._drop: weakref.finalize[Any, Any] | None = None

    @property
    def begun(self) -> bool:
        """Whether the server has weights of this model."""
        return self._number is not None

    def add(self, weights: list[Array]) -> None:
        """Serve vectors of shape (n,), behind those that were added before; a collective.

        The values of rank 0 count.
        """
        global _models
        collectives.gather(_STEP, None)  # from here on no rank trains
        server = self._service.server
        if self._number is None:
            _models += 1
            self._number = collectives.from_rank(0, _models)
            if server:
                server.begin(self._number, weights, self._strategy)
            self._drop = weakref.finalize(self, self._service.drop_later, self._number)
            self._drop.atexit = False
        elif server:
            server.extend(self._number, weights)
        self._layout += [(each.dtype, each.size) for each in weights]
        collectives.gather(_STEP, None)  # until the server has the vectors

    def exchange(self, changes: list[Array]) -> list[Array]:
        """Send the changes of a step, and return the weights to continue with.

        Args:
            changes: of each vector; they are overwritten.

        Raises:
            RankLostError: another rank has ended, or is too slow.
        """
        assert self._number is not None
        return self._service.exchange(self._number, changes)

    def read(self) -> list[Array]:
        """The server's weights, the same on every rank; a collective.

        Every rank must have waited for all others since its last exchange.
        """
        assert self._number is not None
        server = self._service.server
        if server:
            weights = server.read(self._number)
        else:
            weights = [np.empty(length, dtype) for dtype, length in self._layout]
        engine = runtime.any_engine()
        return [
            engines.broadcast_in_pieces(engine, each.view(np.uint8), 0, "weights").view(each.dtype)
            for each in weights
        ]

    def close(self) -> None:
        """Let the server forget these weights, once every rank has."""
        if self._drop:
            self._drop()
