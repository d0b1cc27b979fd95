"""Losses in ``fit`` that are means over all ranks' samples, tokens or weights.

A loss divides a sum by a count: of samples, of tokens that no mask hides, or a sum of weights. Rank
r knows its own ``S_r`` and ``D_r``, and one process has ``sum S_r / sum D_r``. The mean over ranks
of ``S_r / D_r`` is the same only if all ``D_r`` are equal.

- **Samples.** Gradients of a rank with ``B_r`` rows count ``N B_r / sum B_r`` times before they are
  averaged. These numbers travel with those that ranks exchange before gradients anyway.
- **Masks and weights.** Keras reduces all losses in one function, which hvkit replaces. There a
  loss with a count of its own becomes ``S_r / sum D_r * sum B_r / B_r``: its mean, in which a rank
  counts as often as it has rows, is that of one process. It is the loss that Keras reports, since
  Keras weights what it reports by rows, too. A sum, ``reduction="sum"``, has a count of 1 for all.

This holds inside ``train_step``, which every rank runs; everywhere else, as in ``evaluate``, a loss
is that of the rank's own batch.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, Protocol

import keras
from keras import ops
from keras.src.losses import loss as keras_losses

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Totals(Protocol):
    """What a port does for the losses of a step: sums over ranks."""

    def begin(self, inputs: Any) -> None:
        """Note how many rows this rank has in this step, those of a tensor of inputs."""

    def end(self) -> None:
        """The step has ended, or failed."""

    def of(self, count: Any, number: int) -> tuple[Any, Any, Any]:
        """The rows of this rank and of all ranks, and a count over all ranks; a collective.

        Args:
            count: a float64 scalar, this rank's.
            number: of this call in the step, the same on every rank.

        Returns:
            Three float64 scalars.
        """


class _Step:
    """A ``train_step`` under way."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self._calls = 0

    def next_number(self) -> int:
        """Of a loss in this step."""
        self._calls += 1
        return self._calls


_step: ContextVar[_Step | None] = ContextVar("step", default=None)


def use_counts_of_all_ranks(model: keras.Model, totals: Totals) -> None:
    """Make losses in the model's ``train_step`` those of all ranks' samples.

    Args:
        model: a distributed one, whose gradients are averaged in every step.
        totals: of its port.
    """
    train_step = model.train_step

    @functools.wraps(train_step)
    def over_all_ranks(data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        tensors = [each for each in keras.tree.flatten(x) if each is not None]
        if not tensors or not ops.is_tensor(tensors[0]) or not tensors[0].shape:
            return train_step(data)
        totals.begin(tensors[0])
        token = _step.set(_Step(totals))
        try:
            return train_step(data)
        finally:
            _step.reset(token)
            totals.end()

    model.train_step = over_all_ranks
    _share_reduction()


@functools.cache
def _share_reduction() -> None:
    """Replace the function in which losses of Keras are reduced."""
    reduce = keras_losses.reduce_weighted_values

    @functools.wraps(reduce)
    def over_all_ranks(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce(values, sample_weight, mask, reduction, dtype)
        step = _step.get()
        if step is None or not ops.is_tensor(values) or not values.shape:
            return loss
        if reduction == "sum":
            own, everyone, _ = step.totals.of(ops.ones((), "float64"), step.next_number())
            factor = ops.divide_no_nan(everyone, own)
        elif (count := _count(values, sample_weight, mask, reduction)) is not None:
            own, everyone, total = step.totals.of(ops.stop_gradient(count), step.next_number())
            factor = ops.divide_no_nan(count * everyone, total * own)
        else:
            return loss
        return loss * ops.cast(ops.stop_gradient(factor), loss.dtype)

    keras_losses.reduce_weighted_values = over_all_ranks


def _count(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """By what a loss is divided, as float64; None if by the batch's size, or by nothing yet."""
    if reduction not in _MEANS:
        return None
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = keras_losses.apply_mask(
            None if sample_weight is None else ops.cast(sample_weight, "float64"),
            mask,
            dtype="float64",
            reduction=reduction,
        )
        return ops.sum(weights)
    if mask is None:
        return None
    # Keras lets samples that no mask hides count as often as if they were all.
    shown = ops.sum(ops.cast(mask, "float64"))
    return shown * (_elements(values) / _elements(mask))


def _elements(tensor: Any) -> Any:
    return ops.cast(ops.prod(ops.convert_to_tensor(ops.shape(tensor), dtype="int32")), "float64")
