"""Carries out what strategies need from the other ranks, beside training if they allow it.

All of it is eager code, in the script's thread, in a function that a graph calls, or in a thread of
its own. In eager code Horovod gives operations of one kind one name, whatever they are called, so
the collectives of such a thread are small graphs: there names count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import threads
from hvkit.communication.engines import waiting_for_all_ranks
from hvkit.communication.exchanges import (
    Exchange,
    Mean,
    Messages,
    Neighbours,
    Place,
    by_rank,
    circle,
)
from hvkit.compression import Compression
from hvkit.frameworks.keras.collectives.graph_collectives import CompressedMeans
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.weights.variables import Array, Variables

Flow = Generator[Mean | Neighbours, Any, Any]
Make = Callable[[Exchange, str], tf.Tensor]


class Agreements:
    """Agreements on the weights of one model; implements ``hvkit.sync.rounds.Agreements``.

    Args:
        variables: of the model.
        name: the same on every rank, and no other model's.
        compression: of float32 vectors, if there is one.
        overlap: whether agreements run in threads while training goes on.
    """

    def __init__(
        self, variables: Variables, name: str, compression: Compression | None, *, overlap: bool
    ) -> None:
        self._wire = Wire("weights")
        self.place: Place = self._wire
        self._variables = variables
        self._name = name
        self._compressed = CompressedMeans(compression, self._wire) if compression else None
        self._exchange: Make = _SmallGraphs(self._wire).exchange if overlap else self._wire.exchange
        self._overlap = overlap
        self._running: list[_Agreement] = []
        # What the compression keeps by number, once the agreements with it count.
        self._suggested: dict[int, dict[str, tf.Tensor]] = {}

    def start(self, flow: Flow, values: Array, numbers: list[int]) -> _Agreement:
        name = f"{self._name}.weights.{numbers[0]}"

        def agree() -> Any:
            return self._carry_out(flow, numbers, name)

        if not self._overlap:
            return _Agreement(agree, values, numbers)
        thread = _Thread(agree)
        self._running = [each for each in self._running if not each.collected]
        self._running.append(_Agreement(thread.result, values, numbers, thread))
        return self._running[-1]

    def when_done(self, numbers: Sequence[int], callback: Callable[[], None]) -> None:
        """Call a function once no agreement on any of these weights runs, perhaps at once."""
        awaited = [each for each in self._running if not set(numbers).isdisjoint(each.numbers)]

        def after_next() -> None:
            if not awaited:
                callback()
            elif (thread := awaited.pop().thread) is not None:
                thread.when_done(after_next)

        after_next()

    def _carry_out(self, flow: Flow, numbers: list[int], name: str) -> Any:
        """Make all exchanges of a strategy, and return what it returns; a collective."""
        answer: Any = None
        while True:
            try:
                exchange = flow.send(answer)
            except StopIteration as end:
                return end.value
            match exchange:
                case Mean(vector):
                    answer = self._mean(vector, numbers, name)
                case Neighbours():
                    answer = self._neighbours(exchange, name)

    def _mean(self, vector: Array, numbers: list[int], name: str) -> Array:
        sent = tf.constant(vector)
        if self._compressed and self._compressed.suits(sent.dtype):
            variables = [self._variables.in_order[i] for i in numbers]
            mean, state = self._compressed.reduced(sent, variables, name, self._exchange)
            self._suggested |= dict(zip(numbers, state, strict=True))
        else:
            mean = self._exchange(Mean(sent), name)
        array: Array = mean.numpy()
        return array

    def _neighbours(self, exchange: Neighbours, name: str) -> list[Array]:
        to, sources = circle(exchange.offsets, self.place)
        length = len(exchange.vector)
        messages = Messages(
            tf.constant(np.tile(exchange.vector, len(to))),
            by_rank(length, to, self.place.size),
            by_rank(length, sources, self.place.size),
        )
        received = self._exchange(messages, f"{name}.exchange").numpy()
        of = dict(zip(sorted(sources), np.split(received, len(sources)), strict=True))
        return [of[source] for source in sources]

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

    def _kept(self, names: Any) -> dict[str, np.ndarray[Any, Any]]:
        assert self._compressed
        return self._compressed.arrays(names, self._variables.in_order)

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if self._compressed:
            self._compressed.load(arrays, self._variables.in_order)


class _Agreement:
    """An agreement that has begun, or begins once it is waited for.

    Args:
        result: waits for what the strategy returns.
        values: of the weights when it began.
        numbers: of the weights.
        thread: in which it runs; None for that of ``result``.
    """

    def __init__(
        self,
        result: Callable[[], Any],
        values: Array,
        numbers: list[int],
        thread: _Thread | None = None,
    ) -> None:
        self.values = values
        self.numbers = numbers
        self.thread = thread
        self.collected = False
        self._result = result

    def result(self) -> Any:
        self.collected = True
        with waiting_for_all_ranks():
            return self._result()


class _SmallGraphs:
    """Collectives in graphs of their own.

    Args:
        wire: counts the bytes.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._functions: dict[Any, Any] = {}

    def exchange(self, exchange: Exchange, name: str) -> tf.Tensor:
        """As ``Wire.exchange``."""
        sent = exchange.vector if isinstance(exchange, Mean) else exchange.rows
        field = "vector" if isinstance(exchange, Mean) else "rows"
        key = name, type(exchange), sent.dtype, tuple(sent.shape)
        if key not in self._functions:

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def function(tensor: tf.Tensor) -> tf.Tensor:
                return self._wire.exchange(replace(exchange, **{field: tensor}), name)

            # Concrete: else TensorFlow warns that one code is traced too often.
            spec = tf.TensorSpec(sent.shape, sent.dtype)
            self._functions[key] = tf.function(function).get_concrete_function(spec)
        return self._functions[key](sent)


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
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
