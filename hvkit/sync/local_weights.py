"""Local weights: exchanging and showing them around each step of an optimizer.

A framework's port shows the weights as vectors by number (``Weights``), and the optimizers that
change them (``LocalOptimizer``).
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from hvkit.communication import collectives
from hvkit.communication.exchanges import chunks
from hvkit.compression.compression import Shape
from hvkit.errors import RanksDisagreeError
from hvkit.runtime import Group
from hvkit.strategies.strategy import Vector
from hvkit.sync.fingerprints import first_unlike
from hvkit.sync.port import Sync


class Weights(Protocol):
    """The weights of models that train together, by number, in the same order on every rank.

    A vector has one dimension, and the dtype in which weights are sent: float32 for weights of 16
    bits. Complex weights are vectors of twice as many numbers. Vectors are NumPy's unless a port
    redefines what computes with them.
    """

    step_call: str  # the user's call that changes them: ``optimizer.step()``

    group: Group  # the ranks that agree on them

    noun: str = "parameters"  # what the framework calls several of them

    in_order: list[Any]

    def add(self, weights: Iterable[Any]) -> None:
        """Number more weights; the same ones on every rank, with the same values."""

    def __len__(self) -> int:
        return len(self.in_order)

    def __contains__(self, weight: Any) -> bool: ...

    def label(self, i: int) -> str:
        """The name of a weight in messages: ``parameter 0.weight``."""

    def shape(self, i: int) -> Shape:
        """Its shape, with a dimension of 2 at the end if it is complex."""

    def nbytes(self, i: int) -> int:
        """Its size."""

    def vector_dtype(self, i: int) -> Any:
        """The same for weights whose vectors can be joined; None for one that has no mean."""

    def by_dtype(self, numbers: Iterable[int]) -> list[list[int]]:
        """The numbers of floating-point weights, in one list for each dtype of a vector."""
        found: dict[Any, list[int]] = {}
        for i in numbers:
            if (dtype := self.vector_dtype(i)) is not None:
                found.setdefault(dtype, []).append(i)
        return list(found.values())

    def read(self, i: int) -> Vector:
        """A copy of a weight."""

    def write(self, i: int, vector: Vector) -> None:
        """Set a weight."""

    def show(self, i: int, vector: Vector) -> None:
        """Set a weight temporarily, unseen by a backward pass that still needs its old value."""
        self.write(i, vector)

    def equals(self, i: int, vector: Vector) -> bool:
        """Whether a weight has the value to which ``write`` would set it from a vector."""

    def join(self, vectors: Sequence[Vector]) -> Vector:
        """Vectors of one dtype, one after the other."""
        return np.concatenate(vectors)

    def split(self, vector: Vector, numbers: Sequence[int]) -> Sequence[Vector]:
        """Undo ``join``: cut a vector into those of these weights."""
        ends = list(itertools.accumulate(math.prod(self.shape(i)) for i in numbers))
        return [vector[start:end] for start, end in itertools.pairwise([0, *ends])]

    def to_numpy(self, vector: Vector) -> np.ndarray[Any, Any]:
        """The same vector for NumPy."""
        array: np.ndarray[Any, Any] = vector
        return array

    def from_numpy(self, array: np.ndarray[Any, Any], i: int) -> Vector:
        """A copy of an array as a vector, on the device of a weight."""
        return array.copy()

    def mean(self, vector: Vector, name: str) -> Vector:
        """The mean over ranks of a vector, which may be overwritten; a collective."""

    def values(self) -> list[tuple[Any, Any]]:
        """Everything that an agreement changes, with a copy of its value; weights come first."""

    def same(self, value: Any, other: Any) -> bool:
        """Whether two of these values of one thing are equal; NaN is equal to NaN."""
        return bool(((value == other) | ((value != value) & (other != other))).all())

    def set_values(self, values: list[tuple[Any, Any]]) -> None:
        """Set what ``values`` returned."""

    def average_statistics(self, name: str, *, keep: bool) -> None:
        """Average the statistics of normalisation layers over ranks; a collective.

        Training continues with them if it is to ``keep`` them. If not, they are for evaluation, and
        layers in evaluation mode change as well.
        """

    def require_equal(self) -> None:
        """Raise on every rank unless all hold the same weights and optimizers; a collective."""

    def require_close(self, call: str, note: str, vectors: Mapping[int, Vector]) -> bool:
        """Raise unless vectors differ by rounding; return whether they are equal. A collective."""


class LocalOptimizer(Protocol):
    """An optimizer that updates some of the weights, and counts its steps and rounds."""

    call: str  # the user's call that makes a step: ``SGD.step()``

    steps: int  # the steps that it has taken since ranks last agreed on its weights

    rounds: int  # the number of rounds that it has ended

    @property
    def taken(self) -> int:
        """How many steps it has taken in all, or since the script began."""

    def updates(self) -> set[int]:
        """Numbers of the weights that it updates; none if the script no longer has it."""

    def trained(self) -> set[int]:
        """Numbers of the weights that a step changes now."""

    def checksum_of_rates(self) -> int:
        """A number that differs, in all likelihood, if the learning rates do."""

    def require_same_training(self, call: str) -> None:
        """Raise if ranks train other weights, or at other rates; a collective."""


class HookedOptimizer(LocalOptimizer, Protocol):
    """An optimizer whose steps are plain calls of Python."""

    def attach(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call functions around each step, also around one that a loss scale skips."""


class LocalWeightsSync(Sync):
    """Exchanges the weights of one model after its optimizers' steps, and shows agreed weights.

    While the model holds the weights that ranks would agree on, the sync holds this rank's.

    A step that a loss scale skips counts, too: an overflow on one rank must not move the ends of
    its rounds against those of the others.
    """

    local = True

    def __init__(self, weights: Weights, name: str) -> None:
        self.weights = weights
        self._name = name
        # The values that callbacks see, in the order of ``Weights.values``; they may set others.
        self._for_callbacks: list[tuple[Any, Any]] = []
        self._optimizers: list[LocalOptimizer] = []
        self._steps_ended = 0
        # The local weights, in the order of ``Weights.values``, while the agreed ones are shown.
        self._local: list[tuple[Any, Any]] | None = None

    def __contains__(self, weight: Any) -> bool:
        return weight in self.weights

    def add(self, weights: Iterable[Any]) -> None:
        """Exchange more weights; the same ones on every rank, with the same values."""
        self.weights.add(weights)

    @abstractmethod
    def _compare_ranks(self) -> bool:
        """Wait for all ranks; a collective. Return whether their weights differ."""

    @abstractmethod
    def _show_agreed(self) -> None:
        """Set the weights that the ranks would agree on now, for evaluation; a collective."""

    @property
    def shows_agreed(self) -> bool:
        return self._local is not None

    def show(self) -> bool:
        """Show the agreed weights; a collective. Return False if they were shown already."""
        if self.shows_agreed:
            return False
        differ = self._compare_ranks()
        self._local = self.weights.values()
        try:
            if differ:
                self._show_agreed()
        except BaseException:
            self.put_back()
            raise
        return True

    def put_back(self) -> None:
        self._for_callbacks = []
        if self._local is not None:
            self.weights.set_values(self._local)
            self._local = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A context in which the model has the weights that the ranks would agree on now."""
        first = self.show()
        try:
            yield
        finally:
            if first:
                self.put_back()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """A context, inside ``settled``, in which the model has the local weights again."""
        self.keep_what_callbacks_set()
        if self._local is None:
            yield
            return
        local, self._local, agreed = self._local, None, self.weights.values()
        self.weights.set_values(local)
        try:
            yield
        finally:
            self.weights.set_values(agreed)
            self._local = local

    def refuse_step(self) -> None:
        """Raise if the agreed weights are shown: the end of the block discards them."""
        if self.shows_agreed:
            raise ValueError(
                "an optimizer steps inside hvkit.settled, which puts each rank's local weights "
                "back at its end: train outside of the block"
            )

    def show_callbacks(self) -> None:
        """Show the agreed weights to callbacks, which may set others; a collective."""
        self.show()
        self._for_callbacks = self.weights.values()

    def keep_what_callbacks_set(self) -> None:
        """Let weights that callbacks have set, on all ranks, replace local ones; a collective."""
        if self._local is None or not self._for_callbacks:
            return
        shown, now = self._for_callbacks, self.weights.values()
        # Weights that a callback has added come last, and have no local values yet.
        pairs = enumerate(zip(shown, now, strict=False))
        changed = [i for i, ((_, a), (_, b)) in pairs if not self.weights.same(a, b)]
        by_rank = collectives.gather("fit", changed, self.weights.group)
        if (unlike := first_unlike(by_rank, self.weights.group)) is not None:
            i, by, not_by = unlike
            raise RanksDisagreeError(
                f"callbacks have set {self._label(i)} at the end of an epoch on rank {by} "
                f"but not on rank {not_by}: set the same weights on every rank"
            )
        if not changed:
            return
        weights = [i for i in changed if i < len(self.weights)]
        set_values = {i: self.weights.read(i) for i in weights}
        for i, mean in self._without_rounding("fit", ", set by a callback,", set_values, "same"):
            self.weights.write(i, mean)
        if weights != changed:
            self._average_statistics(keep=False)
        now = self.weights.values()
        for i in changed:
            thing, chosen = now[i]
            local = self._local[i][1]
            local = self._replaced(i, local, shown[i][1], chosen) if i in weights else chosen
            self._local[i], shown[i] = (thing, local), (thing, chosen)

    def _label(self, i: int) -> str:
        """The name of what ``Weights.values`` returns at this place."""
        normalisation = "the statistics of normalisation layers"
        return self.weights.label(i) if i < len(self.weights) else normalisation

    def _without_rounding(
        self, call: str, note: str, vectors: Mapping[int, Vector], name: str
    ) -> Iterator[tuple[int, Vector]]:
        """Yield means of vectors that differ by rounding; a collective. Errors contain the note."""
        if not vectors or self.weights.require_close(call, note, vectors):
            return
        for together in pieces(self.weights, vectors):
            joined = self.weights.join([vectors[i] for i in together])
            mean = self.weights.mean(joined, f"{self._name}.{name}.{together[0]}")
            yield from zip(together, self.weights.split(mean, together), strict=True)

    @abstractmethod
    def _replaced(self, i: int, local: Any, agreed: Any, chosen: Any) -> Any:
        """The new local value of a weight that callbacks have set from agreed to chosen."""

    @abstractmethod
    def end_rounds(self) -> None:
        """Give all ranks the same weights, as at the end of training; a collective."""

    def _average_statistics(self, *, keep: bool) -> None:
        self.weights.average_statistics(f"{self._name}.statistics", keep=keep)

    def watch(self, optimizer: HookedOptimizer, adopt: Callable[[], bool]) -> None:
        """Surround the steps of an optimizer, before which ``adopt`` adds its new weights."""
        number = self._add_optimizer(optimizer)

        def before() -> None:
            self.refuse_step()
            adopt()
            self._before_step(number)

        def after() -> None:
            self._steps_ended += 1
            self._end_step(number)

        optimizer.attach(before, after)

    def _add_optimizer(self, optimizer: LocalOptimizer) -> int:
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    @abstractmethod
    def _before_step(self, number: int) -> None:
        """Called before each step of an optimizer."""

    @abstractmethod
    def _end_step(self, number: int) -> None:
        """Called after each step of an optimizer."""


def pieces(weights: Weights, numbers: Iterable[int]) -> list[list[int]]:
    """Numbers of weights of one dtype, some at a time to bound the memory for copies."""
    return [
        [alike[at] for at in run]
        for alike in weights.by_dtype(numbers)
        for run in chunks([weights.nbytes(i) for i in alike])
    ]
