"""Compressions that send a part of each gradient, and keep the rest, the residual, for later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvkit.argument_checks import check_count, check_number
from hvkit.communication.exchanges import Gather, Mean, Ranks, Tensor
from hvkit.compression.compression import Compression, Ops, Reduction, Shape, State, byte_row


@dataclass(frozen=True)
class TopK(Compression):
    """Each rank sends the values that are largest in absolute value, and keeps the rest for later.

    With rank w's gradient g_w and its residual e_w, what it has not sent yet:

        m_w <- e_w + g_w
        s_w <- the largest values of m_w, zero elsewhere
        e_w <- m_w - s_w
        the mean is 1/N sum_w s_w

    Nothing is lost: what was sent and the residuals add up to the gradients. Values are chosen
    among those of a message, which holds several layers. A rank sends position and value, 8 bytes,
    for each of them to each other rank: at 1% and 4 ranks a 25th of a ring allreduce. With more
    ranks the gain shrinks, and with a constant ratio it is gone beyond 1 / (4 ratio) ranks.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent" (2017); Stich,
    Cordonnier and Jaggi, "Sparsified SGD with memory" (2018).

    Args:
        ratio: the part of the values to send, above 0 and up to 1.
    """

    ratio: float

    per_rank: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, above=0, up_to=1)

    def begin(self, shape: Shape) -> dict[str, NDArray[np.float32]]:
        return {"residual": np.zeros(math.prod(shape), np.float32)}

    def reduce(
        self, vector: Tensor, shapes: Sequence[Shape], state: State, ops: Ops, group: Ranks
    ) -> Reduction:
        length = vector.shape[0]
        count = max(1, math.ceil(self.ratio * length))
        waiting = vector + ops.concat(state["residual"])
        at = ops.largest_at(waiting, count)
        sent = ops.join(byte_row(ops, at), byte_row(ops, ops.take(waiting, at)))
        gathered = yield Gather(sent)
        positions = ops.reshape(ops.bits(gathered[:, : 4 * count], "int32"), (-1,))
        values = ops.reshape(ops.bits(gathered[:, 4 * count :], "float32"), (-1,))
        mean = ops.sum_at(length, positions, values) / group.size
        residual = ops.split(ops.without(waiting, at), [math.prod(shape) for shape in shapes])
        return mean, {"residual": residual}


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Each gradient is sent as two thin matrices, whose product approximates it.

    A tensor of shape (m, ...) counts as a matrix of m rows. With rank w's gradient G_w, its
    residual E_w, and the matrix Q that the step before has left, of ``rank`` columns:

        M_w <- E_w + G_w
        P <- orthonormal columns of 1/N sum_w M_w Q
        Q <- 1/N sum_w M_w^T P
        E_w <- M_w - P P^T M_w
        the mean is P Q^T; where a column of Q is zero, the next step begins with the one before

    That is one step of a power iteration for the largest singular vectors of the mean; they hardly
    change from step to step. The residual is what the rank's own projection has left out, so that
    residuals and means add up to the gradients. Tensors that this would not make smaller, such as
    biases, are sent as they are.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization" (2019).

    Args:
        rank: the number of columns, from 1.
    """

    rank: int = 4

    common: ClassVar[tuple[str, ...]] = ("factor",)
    per_rank: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    def begin(self, shape: Shape) -> dict[str, NDArray[np.float32]]:
        rows, columns = _as_matrix(shape) if self._shrinks(shape) else (0, 0)
        # The same on every rank.
        factor = np.random.default_rng(rows).normal(size=columns * self.rank).astype(np.float32)
        return {"factor": factor, "residual": np.zeros(rows * columns, np.float32)}

    def _shrinks(self, shape: Shape) -> bool:
        rows, columns = _as_matrix(shape)
        return self.rank * (rows + columns) < rows * columns

    def reduce(
        self, vector: Tensor, shapes: Sequence[Shape], state: State, ops: Ops, group: Ranks
    ) -> Reduction:
        pieces = ops.split(vector, [math.prod(shape) for shape in shapes])
        thin = [i for i, shape in enumerate(shapes) if self._shrinks(shape)]
        plain = [i for i in range(len(shapes)) if i not in thin]
        matrices, lefts = [], []
        for i in thin:
            waiting = pieces[i] + state["residual"][i]
            matrices.append(ops.reshape(waiting, _as_matrix(shapes[i])))
            factor = ops.reshape(state["factor"][i], (-1, self.rank))
            lefts.append(matrices[-1] @ factor)
        sent = [ops.reshape(left, (-1,)) for left in lefts] + [pieces[i] for i in plain]
        means = ops.split((yield Mean(ops.concat(sent))), [each.shape[0] for each in sent])
        for at, i in enumerate(plain, start=len(thin)):
            pieces[i] = means[at]
        kept: State = {name: list(values) for name, values in state.items()}
        if thin:
            bases = [
                ops.orthonormal(ops.reshape(mean, (-1, self.rank))) for mean in means[: len(thin)]
            ]
            rights = [
                ops.transpose(matrix) @ basis for matrix, basis in zip(matrices, bases, strict=True)
            ]
            sent = [ops.reshape(right, (-1,)) for right in rights]
            factors = ops.split((yield Mean(ops.concat(sent))), [each.shape[0] for each in sent])
            for at, i in enumerate(thin):
                basis = bases[at]
                factor = ops.reshape(factors[at], (-1, self.rank))
                before = ops.reshape(state["factor"][i], (-1, self.rank))
                left_out = matrices[at] - basis @ ops.transpose(rights[at])
                pieces[i] = ops.reshape(basis @ ops.transpose(factor), (-1,))
                # A column of zeros would stay one, and later gradients in the residual.
                used = ops.transpose(ops.largest(ops.transpose(factor))) > 0
                kept["factor"][i] = ops.reshape(ops.where(used, factor, before), (-1,))
                kept["residual"][i] = ops.reshape(left_out, (-1,))
        return ops.concat(pieces), kept


def _as_matrix(shape: Shape) -> tuple[int, int]:
    if not shape:
        return 1, 1
    return shape[0], math.prod(shape[1:])
