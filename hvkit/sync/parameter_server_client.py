"""A rank's side of the parameter server: it exchanges a model's weights after each step.

All weights that train are exchanged, whichever of the model's optimizers steps. A weight that
begins to train later, or that the script adds later, joins in a collective before the first step
that changes it. A step that a loss scale skips counts as a step without a change.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.collectives import open_mailbox, require_equal
from hvkit.errors import RankLostError
from hvkit.log import logger
from hvkit.strategies.parameter_server import Array, ParameterServer
from hvkit.sync.local_weights import LocalWeightsSync, Weights
from hvkit.sync.parameter_server_thread import (
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
from hvkit.transport import engines
from hvkit.watch.calls import call, waiting

_STEP = "optimizer.step()"
_SETTLED = "hvkit.settled"
_END_OF_SCRIPT = "the end of the script"

# Prefix of the names of the server's weights in a checkpoint.
_SERVED = "served."


class _Vector(NamedTuple):
    """Weights that are sent as one vector."""

    numbers: list[int]
    read: Array


class ServerSync(LocalWeightsSync):
    """Exchanges the weights of one model with the server. Making it is a collective."""

    strategy: ParameterServer
    compression = None
    equal_steps = False

    def __init__(self, strategy: ParameterServer, weights: Weights, name: str) -> None:
        global _client
        super().__init__(weights, name)
        self.strategy = strategy
        self._client = _client = _client or Client(str(strategy))
        # The model's number on the server, once that has weights; and what lets it forget them.
        self._number: int | None = None
        self._drop: Callable[[], object] = lambda: None
        self._vectors: list[_Vector] = []
        # The mean over ranks of the changes since the last exchange, by vector, as of the last
        # collective.
        self._unsent: list[Array] = []
        self._served: set[int] = set()
        # The server's weights by number: from a checkpoint, until a step trains them; and as shown
        # last.
        self._resumed: dict[int, Array] = {}
        self._shown: dict[int, Array] = {}

    def _before_step(self, number: int) -> None:
        """Give the server the weights that this step is the first to train; a collective if any."""
        trained = dict.fromkeys(i for each in self._optimizers for i in sorted(each.trained()))
        self._serve(number, trained)

    def _serve(self, number: int, trained: Iterable[int]) -> None:
        """Give the server weights that an optimizer is about to train."""
        new = [i for i in trained if i not in self._served]
        if not new and self._number is not None:
            return
        with call(self._optimizers[number].call, self._steps_ended + 1, self._name):
            self._require_same(new)
            lists = self.weights.by_dtype(new)
            found = {i: self._joined([i]) for each in lists for i in each} | self._resumed
            self._send([np.concatenate([found[i] for i in each]) for each in lists])
        self._vectors += [_Vector(numbers, self._joined(numbers)) for numbers in lists]
        self._served.update(new)
        for i in new:
            self._resumed.pop(i, None)

    def _send(self, vectors: list[Array]) -> None:
        """Serve vectors with rank 0's values, behind those that were added before; a collective."""
        collectives.gather(_STEP, None)  # from here on no rank trains
        if self._number is None:
            self._number = collectives.from_rank(0, next(_numbers))
            if self._client.server:
                self._client.server.begin(self._number, vectors, self.strategy)
            self._drop = drop = weakref.finalize(self, self._client.dropped.append, self._number)
            drop.atexit = False
        elif self._client.server:
            self._client.server.extend(self._number, vectors)
        collectives.gather(_STEP, None)  # until the server has the vectors

    def _require_same(self, new: list[int]) -> None:
        """Raise on every rank unless all begin to train the same weights; a collective."""
        noun = self.weights.noun
        facts = [self.weights.label(i) for i in new]
        advice = f"train the same {noun} on every rank"
        require_equal(f"list of {noun} to train", facts, advice, self.weights.step_call)
        if self._number is None and not self._resumed:
            self.weights.require_equal()

    def _joined(self, numbers: Sequence[int]) -> Array:
        return self.weights.to_numpy(self.weights.join([self.weights.read(i) for i in numbers]))

    def _changes(self) -> list[Array]:
        return [self._joined(each.numbers) - each.read for each in self._vectors]

    def _end_step(self, number: int) -> None:
        """Send the changes of the step, and continue with the server's weights."""
        with call(self._optimizers[number].call, self._steps_ended, self._name):
            assert self._number is not None
            served = self._client.request(PUSH, self._changes(), self._number)
        for at, (vector, values) in enumerate(zip(self._vectors, served, strict=True)):
            joined = self.weights.from_numpy(values, vector.numbers[0])
            pieces = self.weights.split(joined, vector.numbers)
            for i, piece in zip(vector.numbers, pieces, strict=True):
                self.weights.write(i, piece)
            # Weights of 16 bits hold these values rounded.
            self._vectors[at] = vector._replace(read=self._joined(vector.numbers))

    def _compare_ranks(self) -> bool:
        compare_iterations()
        self._unsent = self._changes()
        if any(collectives.gather("hvkit.settled", any(each.any() for each in self._unsent))):
            for n, (vector, unsent) in enumerate(zip(self._vectors, self._unsent, strict=True)):
                of_weights = self.weights.from_numpy(unsent, vector.numbers[0])
                mean = self.weights.mean(of_weights, f"{self._name}.unsent.{n}")
                self._unsent[n] = self.weights.to_numpy(mean)
        return self._number is not None or bool(self._resumed)

    def _show_agreed(self) -> None:
        self._shown = dict(self._resumed)
        for (numbers, _), values, unsent in zip(
            self._vectors, self._read(), self._unsent, strict=True
        ):
            parts = Weights.split(self.weights, values + unsent, numbers)  # of NumPy's arrays
            self._shown.update(zip(numbers, parts, strict=True))
        for i, value in self._shown.items():
            self.weights.show(i, self.weights.from_numpy(value, i))
        self._average_statistics(keep=False)

    def _read(self) -> list[Array]:
        """The server's vectors, the same on every rank; a collective, if it has any.

        Every rank must have waited for all others since its last exchange.
        """
        if self._number is None:
            return []
        vectors = [np.empty_like(each.read) for each in self._vectors]
        if self._client.server:
            vectors = self._client.server.read(self._number)
        for each in vectors:
            data = each.view(np.uint8)
            engines.broadcast_in_pieces(runtime.any_engine(), data, 0, "weights")
        return vectors

    def _replaced(self, i: int, local: Any, agreed: Any, chosen: Any) -> Any:
        if i not in self._served:
            return chosen
        # All ranks send the difference with their next step, and the server takes their mean.
        self._shown[i] = self.weights.to_numpy(self.weights.read(i))
        return local + (chosen - agreed)

    def end_rounds(self) -> None:
        """Give all ranks the server's weights, as at the end of training; a collective."""
        if not self._compare_ranks():
            return
        self._show_agreed()
        for at, (vector, unsent) in enumerate(zip(self._vectors, self._unsent, strict=True)):
            # The next step sends the script's changes, which the server lacks.
            self._vectors[at] = vector._replace(read=self._joined(vector.numbers) - unsent)
        self._shown = {}

    def put_back(self) -> None:
        super().put_back()
        self._shown = {}

    def start_over(self) -> None:
        self._drop()
        self._number = None
        self._vectors = []
        self._served.clear()
        self._resumed.clear()

    def state(self) -> dict[str, Array]:
        return {f"{_SERVED}{i}": np.array(value) for i, value in self._shown.items()}

    def load_state(self, arrays: dict[str, Array], *, in_round: bool) -> None:
        self.start_over()
        if in_round:
            self._resumed = {int(key.removeprefix(_SERVED)): a for key, a in arrays.items()}


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
_numbers = itertools.count(1)  # the numbers of models

# The last iteration in which this rank has taken a batch, by queue.
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
