"""The base classes of compressions, and what a compression may use of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any
"""A tensor of PyTorch or TensorFlow: it has ``+ - * /``, comparisons and slices."""


class Ops(Protocol):
    """The functions on tensors that compressions use, for one framework."""

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The elements in another shape."""

    def pad(self, x: Tensor, zeros: int) -> Tensor:
        """A vector with some zeros appended."""

    def join(self, *columns: Tensor) -> Tensor:
        """Matrices with the same number of rows, side by side."""

    def largest(self, x: Tensor) -> Tensor:
        """The largest absolute value in each row of a matrix, in a column; not finite for NaN."""

    def where(self, condition: Tensor, x: Tensor, y: Tensor | float) -> Tensor:
        """``x`` where the condition holds, else ``y``."""

    def finite(self, x: Tensor) -> Tensor:
        """Which elements are neither infinite nor NaN."""

    def rounded(self, x: Tensor) -> Tensor:
        """The nearest whole numbers; halves to even."""

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """The values in another dtype."""

    def bits(self, x: Tensor, dtype: str) -> Tensor:
        """The same bits in another dtype, of a matrix whose rows stay rows."""

    def mean_of_rows(self, x: Tensor) -> Tensor:
        """The mean row of a matrix."""


@dataclass(frozen=True)
class Mean:
    """Asks for the mean over ranks of a float vector."""

    vector: Tensor


@dataclass(frozen=True)
class Gather:
    """Asks for all ranks' rows below each other, in rank order."""

    rows: Tensor


@dataclass(frozen=True)
class Shares:
    """Asks for this rank's share of every rank's rows, in rank order.

    The number of rows is a multiple of the number of ranks.
    """

    rows: Tensor


Exchange = Mean | Gather | Shares
"""A collective: a compression yields it, and gets the result."""


@dataclass(frozen=True)
class Compression(ABC):
    """How float32 vectors travel between ranks. All ranks must pass an equal one."""

    @abstractmethod
    def reduce(self, vector: Tensor, ops: Ops, ranks: int) -> Generator[Exchange, Tensor, Tensor]:
        """Average a vector over ranks.

        A generator: it yields the collectives that it needs, one after the other, and is sent
        their results. So the caller may do other work while one runs.

        Args:
            vector: float32, of shape (n,), with the same n on every rank.
            ops: the framework's functions on tensors.
            ranks: how many there are.

        Returns:
            The mean over ranks, up to what the compression loses; the same on every rank.
        """
