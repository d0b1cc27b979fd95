"""The parameter server: a thread on rank 0 that holds the weights and answers the other ranks.

``hvkit.strategies.parameter_server`` decides which ranks may continue, ``parameter_server_client``
sends the requests. A rank sends one at a time and waits for its answer; rank 0 calls the server
directly. The tag of a message holds its kind and the number of the model, so messages hold nothing
but values.
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
)
from hvkit.transport.mailbox import Mailbox, pauses
from hvkit.watch.diagnosis import LIMIT_SET_BY, Limits

# Kinds of messages: requests, an answer, and the end of a wait for an answer that cannot come.
PUSH, LEAVE, END, DROP, TAKE, ANSWER, LOST, KINDS = range(8)
NOTHING = np.empty(0, np.uint8)


def purpose_of(array: Array) -> str:
    """As what ``hvkit.traffic`` counts it."""
    return "weights" if array.dtype.kind == "f" else "checks"


class Server:
    """The weights of all models, on rank 0; while its thread runs, only that sends and receives."""

    def __init__(self, mailbox: Mailbox, size: int) -> None:
        self._mailbox = mailbox
        self._size = size
        self._limits = Limits.from_environment()
        # Guards everything below; notified when rank 0's own request has an answer.
        self._changed = threading.Condition()
        self._models: dict[int, ServedWeights] = {}
        self._dropped: dict[int, set[int]] = {}
        self._attendance = Attendance(size)
        self._answer_to_0: list[Array] | None = None
        self._outbox: deque[tuple[int, int, list[Array]]] = deque()
        # The next batch that no rank has taken, by queue and iteration.
        self._next: dict[tuple[int, int], int] = {}
        # When each rank began to wait for its answer, by model and rank.
        self._since: dict[tuple[int, int], float] = {}
        self._reported: set[tuple[int, int]] = set()
        self._lost = ""
        self._failed = False
        self._wake = threading.Event()
        self._thread = threads.start("hvkit-server", self._run)

    def begin(self, number: int, weights: Sequence[Array], strategy: ParameterServer) -> None:
        with self._changed:
            copies = [each.copy() for each in weights]
            self._models[number] = ServedWeights(copies, self._size, strategy.staleness)

    def extend(self, number: int, weights: Sequence[Array]) -> None:
        """Serve more vectors of a model; no rank may train meanwhile."""
        with self._changed:
            self._models[number].weights.extend(each.copy() for each in weights)

    def read(self, number: int) -> list[Array]:
        with self._changed:
            return [each.copy() for each in self._models[number].weights]

    def request(self, kind: int, arrays: list[Array], number: int) -> list[Array]:
        """Act on a request of rank 0, which has one at a time; return the answer."""
        with self._changed:
            self._answer_to_0 = None
            self._raise_if_lost()
            self._act(0, number, kind, arrays)
            while self._answer_to_0 is None:
                self._changed.wait(1)
                self._raise_if_lost()
            return self._answer_to_0

    def end(self, *, failed: bool) -> None:
        """Stop: at once if this rank has failed, else once all ranks have their last answers."""
        self._failed = failed
        self._wake.set()
        self._thread.join(1 if failed else None)
        if not failed:  # it may have ended just before the last answers were there
            self._send_answers()

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
        while not self._failed and not (self._attendance.all_ended and not self._outbox):
            if (found := self._mailbox.look()) is not None:
                self._receive(found.source, *divmod(found.tag, KINDS))
            sent = self._send_answers()
            if found or sent:
                pause = pauses()
                continue
            if time.monotonic() > next_look:
                next_look = time.monotonic() + 1
                self._look_for_long_waits()
            self._wake.wait(next(pause))
            self._wake.clear()

    def _receive(self, source: int, number: int, kind: int) -> None:
        arrays = [NOTHING]
        if kind == PUSH:
            arrays = [np.empty_like(each) for each in self._models[number].weights]
        elif kind == TAKE:
            arrays = [np.empty(3, np.int64)]
        for each in arrays:
            self._mailbox.receive(each, source, number * KINDS + kind)
        with self._changed:
            self._act(source, number, kind, arrays)

    def _act(self, rank: int, number: int, kind: int, arrays: list[Array]) -> None:
        """Act on a request, and answer it with arrays of the same shapes, now or later."""
        if kind == PUSH:
            self._attendance.train(rank)
            self._models[number].push(rank, arrays)
            self._since[number, rank] = time.monotonic()
        elif kind == LEAVE:
            if self._attendance.enter(rank):
                for each in self._models.values():
                    each.restart_clocks()
            self._answer(rank, arrays)
        elif kind == DROP:
            ranks = self._dropped.setdefault(number, set())
            ranks.add(rank)
            if len(ranks) == self._size:
                del self._models[number], self._dropped[number]
            self._answer(rank, arrays)
        elif kind == TAKE:
            queue, iteration, count = map(int, arrays[0])
            batch = self._next.get((queue, iteration), 0)
            self._next[queue, iteration] = batch + count
            self._answer(rank, [np.array([batch, iteration, count], np.int64)])
        else:
            self._attendance.end(rank)
            for each_rank in range(self._size) if self._attendance.all_ended else ():
                self._answer(each_rank, arrays)
        self._release()

    def _answer(self, rank: int, arrays: list[Array], tag: int = ANSWER) -> None:
        """Give rank 0 its answer at once; the server's thread sends those to others."""
        if rank == 0:
            self._answer_to_0 = arrays
            self._changed.notify_all()
        else:
            self._outbox.append((rank, tag, arrays))
            self._wake.set()

    def _release(self) -> None:
        away = self._attendance.away
        for number, model in self._models.items():
            for rank in model.release(away) if model.waiting else ():
                self._since.pop((number, rank), None)
                self._answer(rank, [each.copy() for each in model.weights])

    def _send_answers(self) -> bool:
        """Send the answers in the outbox; return whether there were any."""
        sent = bool(self._outbox)
        while self._outbox:
            rank, tag, arrays = self._outbox.popleft()
            for each in arrays:
                self._mailbox.send(each, rank, tag, purpose_of(each))
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
                    self._answer(rank, [np.frombuffer(text.encode(), np.uint8)], LOST)
