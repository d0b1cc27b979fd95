"""Messages between the ranks of a pipeline, how long a rank waits for them, and equal batches."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.errors import HvkitError, RanksDisagreeError, ranks_text
from hvkit.watch.calls import call, translated, waiting, working
from hvkit.watch.spans import PASS, mark, observers

# Bytes of the message that describes tensors before they come.
_HEADER = 8192

# How many passes of all models are running.
_running = 0


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor before it is received; ``dtype`` None is no tensor."""

    shape: tuple[int, ...]
    dtype: Any
    requires_grad: bool = False


NO_TENSOR = TensorSpec((), None)


class StageTimes:
    """How long a rank computes its stages, by the clock of the host, which runs ahead of a GPU."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start anew, also within a pass."""
        self.computed = self.passed = 0.0
        self._since = time.monotonic()

    @property
    def bubble(self) -> float:
        """The fraction of its passes in which the rank did not compute: from 0 to 1."""
        return 1 - self.computed / self.passed if self.passed else 0.0

    @contextmanager
    def passing(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.passed += time.monotonic() - self._since

    @contextmanager
    def computing(self, what: str, microbatch: int, stage: int) -> Iterator[None]:
        """Surrounds the work of a stage on a micro-batch, which is a span of a timeline."""
        with working():
            begun = time.monotonic()
            yield
            ended = time.monotonic()
        self.computed += ended - begun
        if observers:
            mark(f"{what} {microbatch} of stage {stage}", begun, ended)


class Channel(ABC):
    """Sends between this rank and others of its pipeline; each pair of ranks keeps the order.

    A framework implements the abstract methods. ``ranks`` and ``rank`` number all ranks;
    ``self.rank`` and the methods number them along the pipeline. ``step`` counts passes.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks, self.name = tuple(ranks), name
        self.rank = self.ranks.index(rank)
        self.step, self.times = 0, StageTimes()
        self._known: dict[Hashable, list[TensorSpec]] = {}
        # These functions wait until the messages have gone that were started.
        self._sending: list[Callable[[], object]] = []

    @abstractmethod
    def start(self, data: Any, to: int) -> Callable[[], object]:
        """Start to send a tensor or an array of bytes; return a function that waits for the end."""

    @abstractmethod
    def expect(self, spec: TensorSpec, source: int) -> Callable[[], Any]:
        """Start to receive a tensor; return a function that waits for it and returns it."""

    @abstractmethod
    def bytes_from(self, source: int, size: int) -> NDArray[np.uint8]:
        """Wait for bytes."""

    @abstractmethod
    def spec_of(self, tensor: Any) -> TensorSpec:
        """Describe a tensor for another rank."""

    def dtype_named(self, name: str) -> Any:
        """The framework's dtype with a name such as ``float32``."""
        return name

    def detached(self, tensors: list[Any]) -> list[Any]:
        """The outputs of a stage as inputs of the next one on the same rank."""
        return tensors

    @contextmanager
    def in_call(self, what: str = PASS) -> Iterator[None]:
        """Surrounds a pass, or another call of all ranks, whose name is in messages about waits."""
        global _running
        _running += 1
        try:
            with call(what, self.step, self.name):
                yield
        finally:
            _running -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with translated(), waiting(self.ranks):
            yield

    def send(
        self,
        tensors: Sequence[Any],
        to: int,
        specs: list[TensorSpec] | None = None,
        key: Hashable | None = None,
    ) -> None:
        """Start to send tensors, or None; with a key of both ranks, shapes only the first time."""
        if specs is None:
            specs = [NO_TENSOR if t is None else self.spec_of(t) for t in tensors]
        known = specs if key is None else self._known.setdefault(("to", to, key), specs)
        if known is specs:
            described = ((s.shape, str(s.dtype).rpartition(".")[2], s.requires_grad) for s in specs)
            self._send_header(list(described), to)
        elif known != specs:
            raise ValueError(
                f"a stage has sent tensors like {known} and now like {specs} for inputs of the "
                "same shapes: in a pipeline the shapes of results may depend on the shapes of "
                "inputs only"
            )
        self.send_known(tensors, to)

    def send_known(self, tensors: Sequence[Any], to: int) -> None:
        """Start to send tensors whose shapes the other rank knows."""
        self._sending += [self.start(t, to) for t in tensors if t is not None]

    def send_error(self, text: str, to: int) -> None:
        """Let a rank that waits for a description of tensors raise an error instead."""
        self._send_header(text[: _HEADER // 8], to)

    def _send_header(self, content: Any, to: int) -> None:
        text = json.dumps(content).encode()
        if len(text) > _HEADER:
            raise ValueError(
                f"a stage passes {len(content)} tensors on, more than a pipeline can describe"
            )
        self._sending.append(
            self.start(np.frombuffer(bytearray(text.ljust(_HEADER)), np.uint8), to)
        )

    def knows(self, source: int, key: Hashable | None) -> bool:
        return ("from", source, key) in self._known

    def receive(
        self, source: int, key: Hashable | None = None
    ) -> tuple[list[TensorSpec], Callable[[], list[Any]]]:
        """Start to receive what ``send`` sends; return its specs, and a function that waits for it.

        Waits for shapes that are not known; raises the error that the other rank has sent instead.
        """
        if self.knows(source, key):
            specs = self._known["from", source, key]
        else:
            with self.waiting():
                content = json.loads(bytes(self.bytes_from(source, _HEADER)))
            if isinstance(content, str):
                raise HvkitError(content)
            specs = [
                TensorSpec(tuple(shape), None if name == "None" else self.dtype_named(name), grad)
                for shape, name, grad in content
            ]
            if key is not None:
                self._known["from", source, key] = specs
        return specs, self.receive_known(specs, source)

    def receive_known(self, specs: Sequence[TensorSpec], source: int) -> Callable[[], list[Any]]:
        """Start to receive tensors of known shapes; return a function that waits for them."""
        started = [None if each.dtype is None else self.expect(each, source) for each in specs]

        def wait() -> list[Any]:
            with self.waiting():
                return [each and each() for each in started]

        return wait

    def flush(self) -> None:
        """Wait until all messages of this rank have left."""
        with self.waiting():
            for wait in self._sending:
                wait()
        self._sending.clear()

    def from_rank(self, source: int, tensors: Sequence[Any] = ()) -> list[Any]:
        """Copy one rank's tensors, or None, to all ranks of the pipeline; or raise its error."""
        if self.rank != source:
            return self.receive(source)[1]()
        for to in self._others():
            self.send(tensors, to)
        self.flush()
        return list(tensors)

    def gather_numbers(self, numbers: Sequence[float] | NDArray[Any]) -> NDArray[Any]:
        """Gather numbers of one dtype from all ranks, in shape ``(ranks, len(numbers))``."""
        local = np.ascontiguousarray(numbers)
        rows = np.empty((len(self.ranks), *local.shape), local.dtype)
        rows[self.rank] = local
        self._sending += [self.start(local.view(np.uint8), to) for to in self._others()]
        with self.waiting():
            for source in self._others():
                rows[source] = self.bytes_from(source, local.nbytes).view(local.dtype)
        self.flush()
        return rows

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank != self.rank]


def in_pass() -> bool:
    return _running > 0


def refuse_other_batches(
    step: int, calls: Mapping[int, int], batches: Mapping[int, int], divide: str
) -> None:
    """Raise unless ranks that train one model have the same checksums of calls and of batches."""
    for found, what in ((calls, "makes another call"), (batches, "gets another batch")):
        ranks = list(found)
        other = next((rank for rank in ranks if found[rank] != found[ranks[0]]), None)
        if other is not None:
            raise RanksDisagreeError(
                f"forward pass {step} of {ranks_text(ranks)}, which train one model together: "
                f"rank {other} {what} than rank {ranks[0]}. They must get the same batches in the "
                f"same order: divide data with {divide}"
            )
