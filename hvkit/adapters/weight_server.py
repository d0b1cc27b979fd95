"""The parameter server's messages: a thread on rank 0 that holds the weights, and its clients.

``hvkit.strategies.parameter_server`` has the rule who may go on. A client sends one request at a
time and waits for its answer; rank 0's own requests need no message. The tag of a message says
what it is and for which model, so messages hold nothing but values.

A rank that waits for all others in a collective first says so to the server, which then counts it
as away: it must not hold up a rank that waits for the server and will come to that collective
later. At the end of the script a rank waits until all ranks have ended theirs, since Horovod ends
on all ranks with the first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit import collectives, engines, runtime
from hvkit.errors import RankLostError, ranks_text
from hvkit.messages import Mailbox, pauses
from hvkit.strategies.parameter_server import (
    Attendance,
    ParameterServer,
    ServedWeights,
    Update,
)
from hvkit.watch.calls import call, in_short, waiting
from hvkit.watch.watcher import Limits

Array = NDArray[Any]

# Requests, answers, and what ends a wait without an answer.
_PUSH, _LEAVE, _END, _DROP, _ANSWER, _LOST, _KINDS = range(7)
_NOTHING = np.empty(0, np.uint8)
_STEP = "optimizer.step()"
_END_OF_SCRIPT = "the end of the script"

log_of_next: list[Update] | None = None
"""The log of the models that are served from now on, on rank 0; None for no log."""


class Server:
    """The weights of all models, on rank 0.

    Args:
        mailbox: only the server's thread uses it.
        size: the number of ranks.
    """

    def __init__(self, mailbox: Mailbox, size: int) -> None:
        self._mailbox = mailbox
        self._size = size
        self._limits = Limits.from_environment()
        # Guards everything below; notified when rank 0's own request has an answer.
        self._changed = threading.Condition()
        self._models: dict[int, ServedWeights] = {}
        self._dropped: dict[int, set[int]] = {}
        self._attendance = Attendance(size)
        self._own_answers: dict[int, list[Array]] = {}
        self._outbox: deque[tuple[int, int, list[Array]]] = deque()
        # When each rank began to wait for its answer, by model and rank.
        self._since: dict[tuple[int, int], float] = {}
        self._reported: set[tuple[int, int]] = set()
        self._lost = ""
        self._over = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvkit-server", daemon=True)
        self._thread.start()

    def begin(self, number: int, weights: Sequence[Array], strategy: ParameterServer) -> None:
        """Serve a model, with these vectors first."""
        with self._changed:
            copies = [each.copy() for each in weights]
            self._models[number] = ServedWeights(
                copies, self._size, strategy.staleness, log_of_next
            )

    def extend(self, number: int, weights: Sequence[Array]) -> None:
        """Serve more vectors of a model; no rank may train meanwhile."""
        with self._changed:
            self._models[number].weights.extend(each.copy() for each in weights)

    def read(self, number: int) -> list[Array]:
        """The weights of a model as they are now."""
        with self._changed:
            return [each.copy() for each in self._models[number].weights]

    def exchange(self, number: int, changes: list[Array]) -> list[Array]:
        """As ``Client.exchange``, for rank 0."""
        with self._changed:
            self._push(0, number, changes)
            while number not in self._own_answers:
                self._raise_if_lost()
                self._changed.wait(1)
            return self._own_answers.pop(number)

    def leave(self) -> None:
        """As ``Client.leave``, for rank 0."""
        with self._changed:
            self._raise_if_lost()
            self._leave(0)

    def drop(self, number: int) -> None:
        """As ``Client.drop``, for rank 0."""
        with self._changed:
            self._drop(0, number)

    def end(self) -> None:
        """Wait until all ranks have ended their scripts, and stop."""
        with self._changed:
            self._end(0)
            while not (self._over or self._lost):
                self._changed.wait(1)
        self._thread.join()

    def stop(self) -> None:
        """Stop without waiting for anyone: this rank has failed."""
        self._stopped = True
        self._wake.set()
        self._thread.join(1)

    def _raise_if_lost(self) -> None:
        if self._lost:
            self._mailbox.require_mpi()  # knows where this thread waits
            raise RankLostError(self._lost)

    def _run(self) -> None:
        try:
            self._serve()
        except RankLostError as error:
            lost = str(error)
        except Exception as error:
            lost = f"the parameter server on rank 0 failed with {in_short(error)}"
            os.write(2, f"hvkit: {lost}\n".encode())
            runtime.any_engine().shut_down()
        else:
            return
        with self._changed:
            self._lost = lost
            self._changed.notify_all()

    def _serve(self) -> None:
        pause, next_look = pauses(), 0.0
        while not self._stopped and not (self._attendance.all_ended and not self._outbox):
            if (found := self._mailbox.look()) is not None:
                self._take(found.source, *divmod(found.tag, _KINDS))
            sent = self._send_answers()
            if found or sent:
                pause = pauses()
                continue
            if time.monotonic() > next_look:
                next_look = time.monotonic() + 1
                self._look_for_long_waits()
            self._wake.wait(next(pause))
            self._wake.clear()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _take(self, source: int, number: int, kind: int) -> None:
        """Receive a request and act on it."""
        tag = number * _KINDS + kind
        if kind == _PUSH:
            changes = [np.empty_like(each) for each in self._models[number].weights]
            for each in changes:
                self._mailbox.receive(each, source, tag)
            with self._changed:
                self._push(source, number, changes)
            return
        self._mailbox.receive(_NOTHING.copy(), source, tag)
        with self._changed:
            if kind == _LEAVE:
                self._leave(source)
                self._outbox.append((source, _ANSWER, [_NOTHING]))
            elif kind == _DROP:
                self._drop(source, number)
            else:
                self._end(source)

    def _push(self, rank: int, number: int, changes: list[Array]) -> None:
        self._attendance.train(rank)
        self._models[number].push(rank, changes, self._attendance.away)
        self._since[number, rank] = time.monotonic()
        self._release()

    def _leave(self, rank: int) -> None:
        if self._attendance.enter(rank):
            for each in self._models.values():
                each.meet()
        self._release()

    def _drop(self, rank: int, number: int) -> None:
        ranks = self._dropped.setdefault(number, set())
        ranks.add(rank)
        if len(ranks) == self._size:
            del self._models[number], self._dropped[number]

    def _end(self, rank: int) -> None:
        self._attendance.end(rank)
        self._release()
        if self._attendance.all_ended:
            for each in range(1, self._size):
                self._outbox.append((each, _ANSWER, [_NOTHING]))
            self._wake.set()

    def _release(self) -> None:
        """Answer the ranks that may go on; rank 0 at once, the others from the server's thread."""
        away = self._attendance.away
        for number, model in self._models.items():
            for rank in model.release(away) if model.waiting else ():
                weights = [each.copy() for each in model.weights]
                self._since.pop((number, rank), None)
                if rank == 0:
                    self._own_answers[number] = weights
                    self._changed.notify_all()
                else:
                    self._outbox.append((rank, _ANSWER, weights))
                    self._wake.set()

    def _send_answers(self) -> bool:
        """Send what waits in the outbox; return whether there was anything."""
        sent = bool(self._outbox)
        while self._outbox:
            rank, tag, arrays = self._outbox.popleft()
            for each in arrays:
                purpose = "weights" if each is not _NOTHING else "checks"
                self._mailbox.send(each, rank, tag, purpose)
        return sent

    def _look_for_long_waits(self) -> None:
        """Report a rank that waits for an answer for long, and end the wait some time after."""
        with self._changed:
            for (number, rank), since in list(self._since.items()):
                seconds = time.monotonic() - since
                if seconds < self._limits.report:
                    continue
                model, away = self._models[number], self._attendance.away
                slowest = ranks_text(model.slowest(away))
                text = (
                    f"rank {rank} waits for the parameter server on rank 0 for {seconds:.0f} s: it "
                    f"is ahead of {slowest} by {model.lead(rank, away)} of its steps"
                )
                if (number, rank) not in self._reported:
                    self._reported.add((number, rank))
                    os.write(2, f"hvkit: {text}\n".encode())
                if seconds < self._limits.end:
                    continue
                text += f"; the limit is HVKIT_STALL_LIMIT_SECONDS={self._limits.end:g}"
                del self._since[number, rank]
                if rank == 0:
                    self._lost = text
                    self._changed.notify_all()
                else:
                    self._outbox.append((rank, _LOST, [np.frombuffer(text.encode(), np.uint8)]))


class Client:
    """The server, as the other ranks reach it.

    Args:
        mailbox: of this rank.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        # One request at a time, also if the script has several threads.
        self._one = threading.Lock()

    def exchange(self, number: int, changes: list[Array]) -> list[Array]:
        """Send the changes of a step; wait until this rank may go on, and return the weights.

        Args:
            number: of the model.
            changes: of each vector; they are overwritten.
        """
        with self._one:
            for each in changes:
                self._mailbox.send(each, 0, number * _KINDS + _PUSH, "weights")
            self._wait()
            for each in changes:
                self._mailbox.receive(each, 0, _ANSWER)
            return changes

    def leave(self) -> None:
        """Let the others train without this rank, until all ranks have called this as often."""
        with self._one:
            self._mailbox.send(_NOTHING, 0, _LEAVE, "checks")
            self._wait()
            self._mailbox.receive(_NOTHING.copy(), 0, _ANSWER)

    def drop(self, number: int) -> None:
        """Never exchange weights of this model again."""
        with self._one:
            self._mailbox.send(_NOTHING, 0, number * _KINDS + _DROP, "checks")

    def end(self) -> None:
        """Wait until all ranks have ended their scripts."""
        with self._one:
            self._mailbox.send(_NOTHING, 0, _END, "checks")
            self._wait()
            self._mailbox.receive(_NOTHING.copy(), 0, _ANSWER)

    def _wait(self) -> None:
        """Wait for an answer.

        Raises:
            RankLostError: there will be none.
        """
        found = self._mailbox.wait()
        if found.tag == _LOST:
            text = np.empty(found.bytes, np.uint8)
            self._mailbox.receive(text, 0, _LOST)
            raise RankLostError(text.tobytes().decode())


class Service:
    """This rank's way to the server, for all models; making it is a collective.

    Args:
        user: what needs it, for errors.
    """

    def __init__(self, user: str) -> None:
        self._mailbox = Mailbox(user)
        self.server: Server | None = None
        self._reach: Server | Client
        if runtime.rank() == 0:
            self._reach = self.server = Server(self._mailbox, runtime.size())
        else:
            self._reach = Client(self._mailbox)
        # Models that this rank has dropped, which the server does not know yet.
        self._dropped: deque[int] = deque()
        engines.before_meeting.append(self.leave)
        # Registered after Horovod's own function and the watcher's, so it runs before them.
        atexit.register(self._end)

    def exchange(self, number: int, changes: list[Array]) -> list[Array]:
        """As ``Client.exchange``."""
        self._drop_some()
        return self._reach.exchange(number, changes)

    def leave(self) -> None:
        """As ``Client.leave``."""
        self._drop_some()
        self._reach.leave()

    def drop_later(self, number: int) -> None:
        """Drop a model with the next request: the garbage collector calls this at any time."""
        self._dropped.append(number)

    def _drop_some(self) -> None:
        while self._dropped:
            self._reach.drop(self._dropped.popleft())

    def _end(self) -> None:
        """Wait at the end of the script for the others, unless this rank has failed."""
        engines.before_meeting.remove(self.leave)
        if getattr(sys, "last_value", None) is not None:
            if self.server:
                self.server.stop()
            return
        with contextlib.suppress(RankLostError), call(_END_OF_SCRIPT), waiting():
            self._reach.end()
            self._mailbox.close()


_service: Service | None = None
_models = 0


class Exchange:
    """The weights of one model on the server, as one rank sees them; making it is a collective.

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
        # Of each vector: its dtype and length.
        self._kinds: list[tuple[Any, int]] = []
        self._drop: weakref.finalize[Any, Any] | None = None

    @property
    def begun(self) -> bool:
        """Whether the server has weights of this model."""
        return self._number is not None

    def add(self, weights: list[Array]) -> None:
        """Serve vectors, behind those that were added before; a collective.

        Args:
            weights: of shape (n,) each; those of rank 0 count.
        """
        global _models
        collectives.gather(_STEP, None)  # no rank trains from here on
        server = self._service.server
        if self._number is None:
            _models += 1
            self._number = collectives.broadcast(_models)
            if server:
                server.begin(self._number, weights, self._strategy)
            self._drop = weakref.finalize(self, self._service.drop_later, self._number)
            self._drop.atexit = False
        elif server:
            server.extend(self._number, weights)
        self._kinds += [(each.dtype, each.size) for each in weights]
        collectives.gather(_STEP, None)  # and none before the server has them

    def exchange(self, changes: list[Array]) -> list[Array]:
        """Send the changes of a step, and return the weights to go on with.

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
            weights = [np.empty(length, dtype) for dtype, length in self._kinds]
        engine = runtime.any_engine()
        return [
            engines.broadcast_in_pieces(engine, each.view(np.uint8), 0, "weights").view(each.dtype)
            for each in weights
        ]

    def close(self) -> None:
        """Let the server forget these weights, once every rank has."""
        if self._drop:
            self._drop()
