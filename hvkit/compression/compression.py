"""The base classes of compressions, and what a compression may use of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from hvkit.communication.exchanges import Exchange, Ranks, Tensor

Shape = tuple[int, ...]

# A compression's state from one mean to the next, by name: a vector for each tensor.
State = dict[str, list[Tensor]]

Reduction = Generator[Exchange, Tensor, tuple[Tensor, State]]


class Ops(Protocol):
    """The functions on tensors that compressions use, for one framework."""

    def reshape(self, x: Tensor, shape: Shape, /) -> Tensor:
        """The elements in another shape."""

    def pad(self, x: Tensor, zeros: int) -> Tensor:
        """A vector with some zeros appended."""

    def join(self, *columns: Tensor) -> Tensor:
        """Matrices with the same number of rows, side by side."""

    def largest(self, x: Tensor) -> Tensor:
        """The largest absolute value in each row of a matrix, in a column; not finite for NaN."""

    def where(self, condition: Tensor, x: Tensor, y: Tensor | float, /) -> Tensor:
        """``x`` where the condition holds, else ``y``."""

    def finite(self, x: Tensor, /) -> Tensor:
        """Which elements are neither infinite nor NaN."""

    def rounded(self, x: Tensor, /) -> Tensor:
        """The nearest whole numbers; halves to even."""

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """The values in another dtype."""

    def bits(self, x: Tensor, dtype: str) -> Tensor:
        """The same bits in another dtype, of a matrix whose rows stay rows."""

    def mean_of_rows(self, x: Tensor) -> Tensor:
        """The mean row of a matrix."""

    def constant(self, array: NDArray[Any], like: Tensor) -> Tensor:
        """An array as a tensor, where another one is."""

    def to_numpy(self, x: Tensor) -> NDArray[Any]:
        """The elements in host memory."""

    def concat(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors, or matrices of equally long rows, one after the other."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A vector, cut into vectors of these sizes."""

    def largest_at(self, x: Tensor, count: int) -> Tensor:
        """Positions of the largest absolute values of a vector, or of each row; int32."""

    def take(self, x: Tensor, at: Tensor) -> Tensor:
        """The elements of a vector at some positions."""

    def without(self, x: Tensor, at: Tensor) -> Tensor:
        """A vector with zeros at some positions."""

    def sum_at(self, length: int, at: Tensor, values: Tensor) -> Tensor:
        """A vector of zeros to which values are added; positions may occur several times."""

    def permute(self, x: Tensor, axes: Shape, /) -> Tensor:
        """The tensor with its axes in another order."""

    def transpose(self, x: Tensor, /) -> Tensor:
        """A matrix with rows as columns."""

    def orthonormal(self, x: Tensor) -> Tensor:
        """An orthonormal basis that spans the columns of a matrix, as many columns."""


@dataclass(frozen=True)
class Compression(ABC):
    """How ranks average float32 vectors with fewer bytes. All ranks must pass an equal one."""

    common: ClassVar[tuple[str, ...]] = ()  # names of the state that is the same on every rank
    # Names of the state that differs between ranks: residuals.
    per_rank: ClassVar[tuple[str, ...]] = ()
    # Whether all gradients must use it, so that row-sparse ones and other dtypes are refused.
    exclusive: ClassVar[bool] = False

    @property
    def float32_only(self) -> bool:
        """Whether vectors of other dtypes are averaged without it."""
        return True

    @property
    def keeps_state(self) -> bool:
        """Whether a mean depends on those before it."""
        return bool(self.common or self.per_rank)

    def begin(self, shape: Shape) -> dict[str, NDArray[np.float32]]:
        """The state of a tensor of this shape before the first mean, as vectors."""
        return {}

    @abstractmethod
    def reduce(
        self, vector: Tensor, shapes: Sequence[Shape], state: State, ops: Ops, group: Ranks
    ) -> Reduction:
        """Average tensors over ranks; return their mean, the same on every rank, and the state.

        A generator: it yields the collectives that it needs, one after the other, and is sent
        their results. So the caller may do other work while one runs. It must not change its
        arguments: the caller keeps the old state until an update has used the mean.

        The vector, float32 of shape (n,), has the tensors one after the other; their shapes are the
        same on every rank. ``state`` is from ``begin`` or the mean before.
        """


def byte_row(ops: Ops, vector: Tensor) -> Tensor:
    """The bytes of a vector, as a matrix of one row."""
    return ops.bits(ops.reshape(vector, (1, -1)), "uint8")
