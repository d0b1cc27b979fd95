"""Messages between the ranks of a pipeline, and how long a rank waits for them."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.errors import HvkitError
from hvkit.watch.calls import call, translated, waiting, working
from hvkit.watch.spans import PASS, mark, observers

# Bytes of the message that describes tensors before they come.
_HEADER = 8192

# Passes of all models that are under way.
_under_way = 0


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it arrives.

    Attributes:
        shape: of it.
        dtype: of it, the framework's own; None if there is no tensor, as where Keras has no mask.
        trained: whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: Any
    trained: bool = False


NO_TENSOR = TensorSpec((), None)


class StageTimes:
    """How long a rank computes its stages; with a GPU by the host's clock, which runs ahead.

    Attributes:
        computed: seconds in which it computed its stages.
        passed: seconds of its forward and backward passes.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was before, also the first part of the current pass."""
        self.computed = self.passed = 0.0
        self._since = time.monotonic()

    @property
    def bubble(self) -> float:
        """The share of its passes in which the rank did not compute: from 0 to 1."""
        return 1 - self.computed / self.passed if self.passed else 0.0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds a forward or backward pass."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.passed += time.monotonic() - self._since

    @contextmanager
    def computing(self, what: str, microbatch: int, stage: int) -> Iterator[None]:
        """Surrounds what a stage computes for a micro-batch; a span of a timeline.

        Args:
            what: ``forward``, ``backward``, or a part of them.
            microbatch: its number in the batch, from 0.
            stage: its number in the model, from 0.
        """
        with working():
            begun = time.monotonic()
            yield
            ended = time.monotonic()
        self.computed += ended - begun
        if observers:
            mark(f"{what} {microbatch} of stage {stage}", begun, ended)


class Channel(ABC):
    """Sends between this rank and others of its pipeline; each pair in the order of sending.

    How a tensor travels is the framework's: the abstract methods.

    Args:
        ranks: their numbers among all ranks, in the order of the pipeline.
        rank: this rank's number among all ranks.
        name: of the model; the same on every rank.

    Attributes:
        rank: this rank's place along the pipeline, by which methods name ranks.
        step: the number of the pass.
        times: of the passes.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks, self.name = tuple(ranks), name
        self.rank = self.ranks.index(rank)
        self.step, self.times = 0, StageTimes()
        self._known: dict[Hashable, list[TensorSpec]] = {}
        # What waits until a message has gone.
        self._sending: list[Callable[[], object]] = []

    @abstractmethod
    def start(self, data: Any, to: int) -> Callable[[], object]:
        """Start to send a tensor, or bytes in an array; return what waits until it has gone."""

    @abstractmethod
    def expect(self, spec: TensorSpec, source: int) -> Callable[[], Any]:
        """Start to receive a tensor; return what waits for it, and gives it."""

    @abstractmethod
    def bytes_from(self, source: int, size: int) -> NDArray[np.uint8]:
        """Wait for bytes."""

    @abstractmethod
    def spec_of(self, tensor: Any) -> TensorSpec:
        """What another rank has to know of a tensor."""

    def dtype_named(self, name: str) -> Any:
        """The framework's dtype of a name, such as ``float32``."""
        return name

    def handed_on(self, tensors: list[Any]) -> list[Any]:
        """What a stage gives, for the next one on the same rank."""
        return tensors

    @contextmanager
    def in_call(self, what: str = PASS) -> Iterator[None]:
        """Surrounds a pass, or what all ranks of the pipeline call, for messages about waits."""
        global _under_way
        _under_way += 1
        try:
            with call(what, self.step, self.name):
                yield
        finally:
            _under_way -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds a wait for other ranks of the pipeline."""
        with translated(), waiting(self.ranks):
            yield

    def send(
        self,
        tensors: Sequence[Any],
        to: int,
        specs: list[TensorSpec] | None = None,
        key: Hashable | None = None,
    ) -> None:
        """Start to send tensors.

        Args:
            tensors: None stands for none.
            to: the rank along the pipeline.
            specs: of the tensors; None for what ``spec_of`` says.
            key: the other rank knows the shapes once they were sent with this key; the same on both
                ranks. Without one they are sent each time.

        Raises:
            ValueError: other shapes were sent with this key.
        """
        if specs is None:
            specs = [NO_TENSOR if t is None else self.spec_of(t) for t in tensors]
        known = specs if key is None else self._known.setdefault(("to", to, key), specs)
        if known is specs:
            self._send_header(list(map(_as_json, specs)), to)
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
        """Have a rank that waits for a description of tensors raise an error instead."""
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
        """Whether the shapes of what comes with this key are known."""
        return ("from", source, key) in self._known

    def receive(
        self, source: int, key: Hashable | None = None
    ) -> tuple[list[TensorSpec], Callable[[], list[Any]]]:
        """Start to receive what ``send`` sends; wait for shapes that are not known.

        Raises:
            HvkitError: the other rank could not compute them.
        """
        if self.knows(source, key):
            specs = self._known["from", source, key]
        else:
            with self.waiting():
                content = json.loads(bytes(self.bytes_from(source, _HEADER)))
            if isinstance(content, str):
                raise HvkitError(content)
            specs = [self._spec(*each) for each in content]
            if key is not None:
                self._known["from", source, key] = specs
        return specs, self.receive_known(specs, source)

    def _spec(self, shape: list[int], dtype: str, trained: bool) -> TensorSpec:
        found = None if dtype == "None" else self.dtype_named(dtype)
        return TensorSpec(tuple(shape), found, trained)

    def receive_known(self, specs: Sequence[TensorSpec], source: int) -> Callable[[], list[Any]]:
        """Start to receive tensors of known shapes; return what waits for them."""
        arriving = [None if each.dtype is None else self.expect(each, source) for each in specs]

        def wait() -> list[Any]:
            with self.waiting():
                return [each and each() for each in arriving]

        return wait

    def flush(self) -> None:
        """Wait until all that was sent is on its way or there."""
        with self.waiting():
            for wait in self._sending:
                wait()
        self._sending.clear()

    def from_rank(self, source: int, tensors: Sequence[Any] = ()) -> list[Any]:
        """One rank's tensors on all ranks of the pipeline; None stands for none.

        Raises:
            HvkitError: that rank could not compute them.
        """
        if self.rank != source:
            return self.receive(source)[1]()
        for to in self._others():
            self.send(tensors, to)
        self.flush()
        return list(tensors)

    def gather_numbers(self, numbers: Sequence[float] | NDArray[Any]) -> NDArray[Any]:
        """Numbers of all ranks, of shape ``(ranks, len(numbers))``; of one dtype on all of them."""
        own = np.ascontiguousarray(numbers)
        rows = np.empty((len(self.ranks), *own.shape), own.dtype)
        rows[self.rank] = own
        for to in self._others():
            self._sending.append(self.start(own.view(np.uint8), to))
        with self.waiting():
            for source in self._others():
                rows[source] = self.bytes_from(source, own.nbytes).view(own.dtype)
        self.flush()
        return rows

    def _others(self) -> list[int]:
        return [place for place in range(len(self.ranks)) if place != self.rank]


def in_pass() -> bool:
    """Whether a forward or backward pass through stages is under way."""
    return _under_way > 0


def _as_json(spec: TensorSpec) -> list[Any]:
    return [spec.shape, str(spec.dtype).rpartition(".")[2], spec.trained]
