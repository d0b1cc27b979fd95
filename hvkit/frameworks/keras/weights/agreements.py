"""Carries out what strategies need from the other ranks, beside training if they allow it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import threads
from hvkit.communication.exchanges import Mean, Messages, Neighbours, by_rank, circle
from hvkit.frameworks.keras.collectives.graph_collectives import CompressedMeans, GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.weights.weight_keeper import (
    Array,
    flat_values,
    ids,
    in_numpy,
    pieces,
    shaped,
    split,
)
from hvkit.sync.shown_weights import arrive_before_exit
from hvkit.watch.calls import call, waiting_for_all_ranks

# By the id of a weight: its state by name.
States = dict[int, dict[str, tf.Tensor]]
Agree = Callable[[list[tf.Variable], tf.Tensor], tuple[tf.Tensor, States]]


class Network:
    """How vectors travel between ranks.

    Args:
        wait: counts the waits in graphs; None in a thread.
        wire: counts the bytes.
        compressed: for float32 vectors, if they travel compressed.
        keep: whether the round ends, so that what the compression keeps changes.
    """

    def __init__(
        self, wait: GraphWait | None, wire: Wire, compressed: CompressedMeans | None, keep: bool
    ) -> None:
        self._wait = wait
        self._wire = wire
        self._compressed = compressed
        self._keep = keep

    def carry_out(
        self, flow: Generator[Mean | Neighbours, Any, Any], variables: Sequence[Any], name: str
    ) -> Any:
        """Make all exchanges of a strategy, and return what it returns; a collective.

        Args:
            flow: the strategy's generator.
            variables: of its vectors, all of one dtype.
            name: the same on every rank, and no other collective's.
        """
        answer: Any = None
        while True:
            try:
                exchange = flow.send(answer)
            except StopIteration as end:
                return end.value
            match exchange:
                case Mean(vector):
                    answer = self._mean(vector, variables, name)
                case Neighbours():
                    answer = self._neighbours(exchange, name)

    def _mean(self, vector: tf.Tensor, variables: Sequence[Any], name: str) -> tf.Tensor:
        compressed = self._compressed
        if compressed and compressed.suits(vector.dtype):
            return self._around(
                vector, lambda v: compressed.mean(v, variables, name, keep=self._keep)
            )
        return self._around(vector, lambda v: self._wire.mean(v, name))

    def _neighbours(self, exchange: Neighbours, name: str) -> list[tf.Tensor]:
        to, sources = circle(exchange.offsets, self._wire)
        length = exchange.vector.shape[0]
        messages = Messages(
            tf.tile(exchange.vector, [len(to)]),
            by_rank(length, to, self._wire.size),
            by_rank(length, sources, self._wire.size),
        )
        received = self._around(
            messages.rows, lambda _: self._wire.exchange(messages, f"{name}.exchange")
        )
        of = dict(zip(sorted(sources), tf.split(received, len(sources)), strict=True))
        return [of[source] for source in sources]

    def _around(self, sent: tf.Tensor, collective: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        return self._wait.around(sent, collective) if self._wait else collective(sent)


class RunningAgreements:
    """Agreements of one keeper that run while the next round trains.

    Args:
        agree: returns what the strategy makes of some variables' joined weights, and the new state
            of each by id.
        set_states: keeps these states.
        wait: counts the waits in graphs.
    """

    def __init__(self, agree: Agree, set_states: Callable[[States], None], wait: GraphWait) -> None:
        self._agree = agree
        self._set_states = set_states
        self._wait = wait
        # What graphs wait in, by the ids of their variables.
        self._queues: dict[tuple[int, ...], Any] = {}
        # What agreements that have ended will add to the weights, by id.
        self.due: dict[int, Array] = {}
        self._running: list[tuple[set[int], _Thread]] = []
        self._graphs: dict[tuple[int, ...], Any] = {}
        self._variables: dict[int, tf.Variable] = {}

    def begin(self, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """End a round of these variables, which nothing may be due to."""
        self._variables.update((id(v), v) for v in variables)
        flat = [flat_values(v) for v in variables]
        begun: tf.Tensor = in_numpy(self._begin, ids(variables), flat, [tf.bool])[0]
        return begun

    def _begin(self, keys: Sequence[int], weights: Sequence[Array]) -> list[Array]:
        key = tuple(keys)
        if key not in self._graphs:
            self._graphs[key] = tf.function(functools.partial(self._graph, key))
        agree = self._graphs[key]
        tensors = [tf.constant(each) for each in weights]
        self._running.append((set(keys), _Thread(lambda: agree(tensors))))
        arrive_before_exit(self)
        return [np.array(True)]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _graph(
        self, keys: Sequence[int], weights: Sequence[tf.Tensor]
    ) -> tuple[dict[int, tf.Tensor], States]:
        """By id: what an agreement changes of weights, and their new states.

        A graph that a thread runs: in eager code Horovod gives operations of one kind one name,
        and would mix this one up with those of the main thread.
        """
        given = dict(zip(keys, weights, strict=True))
        due: dict[int, tf.Tensor] = {}
        states: States = {}
        for together in pieces([self._variables[key] for key in keys]):
            own = tf.concat([given[id(v)] for v in together], axis=0)
            agreed, new = self._agree(together, own)
            due |= dict(zip(ids(together), split(agreed - own, together), strict=True))
            states |= new
        return due, states

    def arrive(self, keys: Sequence[int] | None = None) -> None:
        """Wait for the agreements.

        Args:
            keys: ids of variables, for the agreements on any of these; None for all.
        """
        for of, thread in list(self._running):
            if keys is None or not of.isdisjoint(keys):
                with call(self._wait.name):
                    due, states = thread.result()
                self._running.remove((of, thread))
                self.due |= {key: each.numpy() for key, each in due.items()}
                self._set_states(states)

    def add_due(self, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """Wait, and add what the agreements have changed to the weights."""
        flat = [flat_values(v) for v in variables]
        arrived = [] if tf.executing_eagerly() else [self._arrived(ids(variables))]
        with tf.control_dependencies(arrived):
            due = in_numpy(self._take_due, ids(variables), flat, [each.dtype for each in flat])
        for v, weights in zip(variables, due, strict=True):
            v.assign(shaped(weights, v))
        return tf.constant(True)

    def _arrived(self, keys: list[int]) -> tf.Tensor:
        """Wait in a graph for the agreements on these variables.

        A queue takes none of TensorFlow's threads while it waits, as Python code would. There are
        as many as a rank may use cores, and the agreement needs one.
        """
        with tf.init_scope(), tf.device("CPU:0"):
            if tuple(keys) not in self._queues:
                self._queues[tuple(keys)] = tf.queue.FIFOQueue(10, [tf.bool], [()])
        queue = self._queues[tuple(keys)]

        def dequeue(begun: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([begun]), tf.device("CPU:0"):
                return queue.dequeue()

        return self._wait.around(in_numpy(self._enqueue_later, keys, [], [tf.bool])[0], dequeue)

    def _enqueue_later(self, keys: Sequence[int], _: Sequence[Array]) -> list[Array]:
        """Let one graph that waits for these variables go on, now or when it may."""
        queue = self._queues[tuple(keys)]
        awaited = [thread for of, thread in self._running if not of.isdisjoint(keys)]

        def after_next() -> None:
            if awaited:
                awaited.pop().when_done(after_next)
            else:
                queue.enqueue(True)

        after_next()
        return [np.array(True)]

    def _take_due(self, keys: Sequence[int], weights: Sequence[Array]) -> list[Array]:
        self.arrive(keys)
        return [
            each + self.due.pop(key) if key in self.due else each
            for key, each in zip(keys, weights, strict=True)
        ]


class _Thread:
    """Runs a function that waits for other ranks while this one trains.

    Args:
        function: without arguments.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        # A daemon: it must not hold up a rank that ends because another one has.
        self._thread = threads.start("hvkit-agreement", self._run)

    def _run(self) -> None:
        try:
            with tf.device("CPU:0"):
                self._result = self._function()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._done = True
        for callback in self._callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this once the function has returned or raised."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> Any:
        """Wait for the function; return what it returns, or raise what it raises."""
        with waiting_for_all_ranks():
            self._thread.join()
            if self._error is not None:
                raise self._error
        return self._result
