"""The parameter server: a thread on rank 0 that holds the weights and answers the other ranks.

``hvkit.strategies.parameter_server`` decides which ranks may continue, ``client`` sends the
requests. A rank sends one at a time and waits for its answer; rank 0 calls the server directly. The
tag of a message holds its kind and the number of the model, so messages hold nothing but values.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from hvkit import threads
from hvkit.errors import RankLostError, ranks_text
from hvkit.strategies.parameter_server import (
    Array,
    Attendance,
    ParameterServer,
    ServedWeights,
    Update,
)
from hvkit.transport.mailbox import Mailbox, pauses
from hvkit.watch.diagnosis import LIMIT_SET_BY, Limits

# Kinds of messages: requests, an answer, and the end of a wait for an answer that cannot come.
PUSH, LEAVE, END, DROP, TAKE, ANSWER, LOST, KINDS = range(8)
NOTHING = np.empty(0, np.uint8)

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
        # The next batch that no rank has taken, by queue and iteration.
        self._next: dict[tuple[int, int], int] = {}
        # When each rank began to wait for its answer, by model and rank.
        self._since: dict[tuple[int, int], float] = {}
        self._reported: set[tuple[int, int]] = set()
        self._lost = ""
        self._over = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threads.start("hvkit-server", self._run)

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
        """As ``client.Client.exchange``, for rank 0."""
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

    def take(self, request: Array) -> int:
        """As ``Client.take``, for rank 0."""
        with self._changed:
            self._raise_if_lost()
            return self._take_batch(request)

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
            self._mailbox.require_ranks()  # knows where this thread waits
            raise RankLostError(self._lost)

    def _run(self) -> None:
        try:
            self._serve()
        except RankLostError as error:
            with self._changed:
                self._lost = str(error)
                self._changed.notify_all()

    def _serve(self) -> None:
        pause, next_look = pauses(), 0.0
        while not self._stopped and not (self._attendance.all_ended and not self._outbox):
            if (found := self._mailbox.look()) is not None:
                self._take(found.source, *divmod(found.tag, KINDS))
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
        tag = number * KINDS + kind
        if kind == TAKE:
            request = np.empty(3, np.int64)
            self._mailbox.receive(request, source, tag)
            with self._changed:
                answer = np.array([self._take_batch(request)])
                self._outbox.append((source, ANSWER, [answer]))
            return
        if kind == PUSH:
            changes = [np.empty_like(each) for each in self._models[number].weights]
            for each in changes:
                self._mailbox.receive(each, source, tag)
            with self._changed:
                self._push(source, number, changes)
            return
        self._mailbox.receive(NOTHING.copy(), source, tag)
        with self._changed:
            if kind == LEAVE:
                self._leave(source)
                self._outbox.append((source, ANSWER, [NOTHING]))
            elif kind == DROP:
                self._drop(source, number)
            else:
                self._end(source)

    def _push(self, rank: int, number: int, changes: list[Array]) -> None:
        self._attendance.train(rank)
        self._models[number].push(rank, changes, self._attendance.away)
        self._since[number, rank] = time.monotonic()
        self._release()

    def _take_batch(self, request: Array) -> int:
        queue, iteration, count = map(int, request)
        number = self._next.setdefault((queue, iteration), 0)
        self._next[queue, iteration] = number + count
        return number

    def _leave(self, rank: int) -> None:
        if self._attendance.enter(rank):
            for each in self._models.values():
                each.restart_clocks()
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
                self._outbox.append((each, ANSWER, [NOTHING]))
            self._wake.set()

    def _release(self) -> None:
        """Answer the ranks that may continue: rank 0 at once, others from the server's thread."""
        away = self._attendance.away
        for number, model in self._models.items():
            for rank in model.release(away) if model.waiting else ():
                weights = [each.copy() for each in model.weights]
                self._since.pop((number, rank), None)
                if rank == 0:
                    self._own_answers[number] = weights
                    self._changed.notify_all()
                else:
                    self._outbox.append((rank, ANSWER, weights))
                    self._wake.set()

    def _send_answers(self) -> bool:
        """Send the answers in the outbox; return whether there were any."""
        sent = bool(self._outbox)
        while self._outbox:
            rank, tag, arrays = self._outbox.popleft()
            for each in arrays:
                purpose = "weights" if each.dtype.kind == "f" else "checks"
                self._mailbox.send(each, rank, tag, purpose)
        return sent

    def _look_for_long_waits(self) -> None:
        """Report ranks that wait long for an answer, and end such a wait after the time limit."""
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
                text += f"; the limit is {self._limits.end:g} s ({LIMIT_SET_BY})"
                del self._since[number, rank]
                if rank == 0:
                    self._lost = text
                    self._changed.notify_all()
                else:
                    self._outbox.append((rank, LOST, [np.frombuffer(text.encode(), np.uint8)]))
