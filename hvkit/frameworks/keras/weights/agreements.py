"""Carries out what strategies need from the other ranks: in eager code, graphs or threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import threads
from hvkit.communication.exchanges import Mean, Messages, Neighbours, Place, by_rank, circle
from hvkit.compression import Compression
from hvkit.frameworks.keras.collectives.graph_collectives import CompressedMeans, GraphWait
from hvkit.frameworks.keras.collectives.named_collectives import NamedCollectives
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.weights.variables import Array, Variables
from hvkit.strategies.strategy import Flow
from hvkit.transport.engines import ProcessSet
from hvkit.watch.calls import waiting_for_all_ranks


class Agreements:
    """Agreements on the weights of one model; implements ``hvkit.sync.rounds.Agreements``.

    Args:
        variables: of the model.
        compression: of float32 vectors, if there is one.
        overlap: whether agreements run in threads while training goes on.
    """

    def __init__(
        self, variables: Variables, compression: Compression | None, *, overlap: bool
    ) -> None:
        self._wire = Wire("weights", variables.group)
        self.place: Place = self._wire
        self._variables = variables
        self._compressed = CompressedMeans(compression, self._wire) if compression else None
        self._named = NamedCollectives(self._wire)
        self._overlap = overlap
        # What the compression keeps by number, once the agreements with it count.
        self._suggested: dict[int, dict[str, tf.Tensor]] = {}

    def start(self, flow: Flow[Any], values: Array, numbers: list[int], name: str) -> Agreement:
        def agree() -> Any:
            return self.carry_out(flow, numbers, name)

        return Agreement(agree, values, numbers, self._wire.within, overlap=self._overlap)

    def carry_out(
        self, flow: Flow[Any], numbers: list[int], name: str, wait: GraphWait | None = None
    ) -> Any:
        """Make all exchanges of a strategy, and return what it returns; a collective.

        Args:
            flow: the strategy's generator.
            numbers: of its weights.
            name: as for ``start``.
            wait: counts the waits in a graph, where what the compression keeps counts at once; None
                outside of graphs.
        """
        answer: Any = None
        while True:
            try:
                asked = flow.send(answer)
            except StopIteration as end:
                return end.value
            match asked:
                case Mean(vector):
                    answer = self._mean(vector, numbers, name, wait)
                case Neighbours():
                    answer = self._neighbours(asked, name, wait)

    def _mean(self, vector: Any, numbers: list[int], name: str, wait: GraphWait | None) -> Any:
        sent = tf.convert_to_tensor(vector)
        if not self._compressed or not self._compressed.suits(sent.dtype):
            return self._exchanged(Mean(sent), name, wait)
        compressed, variables = self._compressed, [self._variables.in_order[i] for i in numbers]
        if wait:
            return wait.around(sent, lambda vector: compressed.mean(vector, variables, name))
        mean, state = compressed.reduced(sent, variables, name, self._named.exchange)
        self._suggested |= dict(zip(numbers, state, strict=True))
        return mean.numpy()

    def _neighbours(self, asked: Neighbours, name: str, wait: GraphWait | None) -> list[Any]:
        to, sources = circle(asked.offsets, self.place)
        length = asked.vector.shape[0]
        messages = Messages(
            tf.tile(asked.vector, [len(to)]),
            by_rank(length, to, self.place.size),
            by_rank(length, sources, self.place.size),
        )
        received = self._exchanged(messages, f"{name}.exchange", wait)
        split = (tf if wait else np).split(received, len(sources))
        of = dict(zip(sorted(sources), split, strict=True))
        return [of[source] for source in sources]

    def _exchanged(self, exchange: Mean | Messages, name: str, wait: GraphWait | None) -> Any:
        if wait is None:
            return self._named.exchange(exchange, name).numpy()
        sent = exchange.vector if isinstance(exchange, Mean) else exchange.rows
        return wait.around(sent, lambda _: self._wire.exchange(exchange, name))

    def commit(self, numbers: Container[int]) -> None:
        if self._compressed:
            # In a list: other agreements may end meanwhile, in their threads.
            kept = {i: state for i, state in list(self._suggested.items()) if i in numbers}
            variables = [self._variables.in_order[i] for i in kept]
            self._compressed.keep(variables, list(kept.values()))
            for i in kept:
                del self._suggested[i]

    def forget(self) -> None:
        self._suggested.clear()

    def clear(self) -> None:
        if self._compressed:
            self._compressed.begin_anew()

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._kept(self._compressed.compression.common) if self._compressed else {}

    def own_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._kept(self._compressed.compression.own) if self._compressed else {}

    def _kept(self, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        assert self._compressed
        return self._compressed.arrays(names, self._variables.in_order)

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if self._compressed:
            self._compressed.load(arrays, self._variables.in_order)


class Agreement:
    """An agreement that runs in a thread of its own, or once it is waited for.

    Args:
        agree: makes the exchanges, and returns what the strategy returns.
        values: of the weights when it begins.
        numbers: of the weights.
        within: the ranks that take part; None for all.
        overlap: whether it begins now, in a thread.
    """

    def __init__(
        self,
        agree: Callable[[], Any],
        values: Array,
        numbers: list[int],
        within: ProcessSet | None,
        *,
        overlap: bool,
    ) -> None:
        self.values = values
        self.numbers = numbers
        self._agree = agree
        self._within = within
        self._result: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._callbacks: list[Callable[[], None]] = []
        # A daemon: it must not hold up a rank that ends because another one has.
        self._thread = threads.start("hvkit-agreement", self._run) if overlap else None

    def _run(self) -> None:
        try:
            with tf.device("CPU:0"):
                self._result = self._agree()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._ended = True
        for callback in self._callbacks:
            callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call this once the thread has ended, perhaps at once."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> Any:
        """Wait for the other ranks; return what the strategy returns."""
        with waiting_for_all_ranks(self._within):
            if self._thread is None:
                return self._agree()
            self._thread.join()
            if self._error is not None:
                raise self._error
            return self._result
