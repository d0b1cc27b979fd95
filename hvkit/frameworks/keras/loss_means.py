"""Losses in ``fit`` that are means over all ranks' samples, tokens or weights.

A loss divides a sum by a count: of samples, of tokens that no mask hides, or a sum of weights. Rank
r knows its own ``S_r`` and ``D_r``, and one process has ``sum S_r / sum D_r``. The mean over ranks
of ``S_r / D_r`` is the same only if all ``D_r`` are equal.

- **Samples.** Gradients of a rank with ``B_r`` rows count ``N B_r / sum B_r`` times before they are
  averaged. These numbers travel with those that ranks exchange before gradients anyway. Rows are
  those of the targets, else of the inputs; in a ``train_step`` of the script's, those of its first
  loss of samples.
- **Masks and weights.** Keras reduces all losses in one function, which hvkit replaces. There a
  loss with a count of its own becomes ``S_r / sum D_r * sum B_r / B_r``: its mean, in which a rank
  counts as often as it has rows, is that of one process. It is the loss that Keras reports, since
  Keras weights what it reports by rows, too. A sum, ``reduction="sum"``, has a count of 1 for all,
  if it is a loss of ``compile``: another may be of weights, or have a factor of the script's.
  Where gradients are those of one such loss, a port may let them count as often as it does (``D_r``
  instead of ``B_r``). No rank then waits for ``sum D_r``; what Keras reports is corrected after it.

This holds inside ``train_step``, which every rank runs. In ``test_step`` ranks may have other
numbers of batches, so none waits there: each notes ``S_r`` and ``D_r`` of its batches, and at the
end the reported losses are corrected (``metric_results``). Elsewhere a loss is that of the rank's
own batch; if it is for gradients, rank 0 warns.

``loss_checks`` names losses that cannot be made right here.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakSet

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as keras_losses
from keras.src.trainers import compile_utils

from hvkit import registry
from hvkit.frameworks.keras.backends import may_be_differentiated
from hvkit.frameworks.keras.loss_checks import (
    compare_with_halves,
    gives_each_sample_its_own,
    is_mean_over_samples,
    note_own_count,
    warn_of_factor,
    warn_of_own_count,
    warn_of_own_means,
)

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class StepTotals(Protocol):
    """What a port does for the losses of a step: sums over ranks.

    Attributes:
        even: returns whether all ranks have as many rows in each step, as they know of arrays.
    """

    even: Callable[[], bool]

    def begin(self, rows_of: Any, final: bool = True) -> None:
        """Note how many rows this rank has in this step.

        Args:
            rows_of: the tensor that has them.
            final: whether there is no second call in the step, with a tensor of other rows.
        """

    def end(self) -> None:
        """The step has ended."""

    def of(self, count: Any, number: int) -> tuple[Any, Any]:
        """How many rows all ranks have for each of this rank, and a count over all ranks.

        A collective.

        Args:
            count: a float64 scalar, this rank's; None for none.
            number: of this call in the step, the same on every rank.

        Returns:
            Two scalars, tensors or numbers. Without a row or a count, the first or the second means
            nothing.
        """

    def start(self, count: Any, number: int) -> bool:
        """Add a count up over ranks while they compute gradients, which count as often.

        A collective, and on all ranks or none. Whoever calls ``of`` afterwards gets the sum, and
        the gradients of this rank then count as often as it has rows.

        Returns:
            Whether it does so.
        """

    def once(self, key: str, values: Sequence[Any], report: Callable[..., None]) -> None:
        """In the first step, pass the values of some tensors to ``report``, as NumPy arrays.

        Args:
            key: of this comparison.
            values: the tensors.
            report: what takes them.
        """

    def note(self, numbers: Sequence[Any]) -> None:
        """Keep a step's scalars until the end of a pass over data."""

    def noted(self) -> list[np.ndarray[Any, Any]]:
        """What was noted since the last call: float64 arrays, one for each step."""


class _Step:
    """A ``train_step`` or ``test_step`` of a model under way.

    Attributes:
        of_keras: whether the method is Keras's own.
        names: how many collectives it has had.
        position: that of the next loss of ``compile``, while these compute; else None.
        called: the losses that compute, each inside of the one before.
        late: a loss whose count is on its way, the count, and its number.
        has_rows: whether the rows of the step are known.
        noted: in a ``test_step``, of each loss of ``compile`` with a count of its own: its
            position, whether it is a mean, whether its tracker counts rows, the sum, and the count.
    """

    def __init__(
        self, model: keras.Model, totals: StepTotals, trains: bool, of_keras: bool = False
    ) -> None:
        self.model = model
        self.totals = totals
        self.trains = trains
        self.of_keras = of_keras
        self.names = 0
        self.position: int | None = None
        self.called: list[Any] = []
        self.late: tuple[Any, Any, int] | None = None
        self.noted: list[Any] = []
        self.has_rows = of_keras or not trains

    def next_name(self) -> int:
        """The number of the next collective, the same on every rank."""
        self.names += 1
        return self.names - 1

    def see(self, values: Any) -> None:
        """Take the rows of a loss's values for those of the step, unless it is one of weights."""
        if not (self.called and _of_weights(self.called[-1])):
            self.has_rows = True
            self.totals.begin(values)

    @property
    def position_of_called(self) -> int | None:
        """That of the loss that computes among those of ``compile``; None if it is none of them."""
        return self.position if len(self.called) == 1 else None

    def has_one_loss(self) -> bool:
        """Whether the loss that computes is the only one of ``compile``, and one of Keras."""
        compiled: Any = getattr(self.model, "_compile_loss", None)
        losses: Any = getattr(compiled, "_flat_losses", None) or ()
        one = self.of_keras and len(losses) == 1 and self.position_of_called == 0
        return one and gives_each_sample_its_own(self.called[0][0])

    def correct_reported(self, rows: int) -> None:
        """Make the reported loss that of all ranks' counts, now that their sum is there.

        Args:
            rows: how often Keras has counted it.
        """
        assert self.late is not None
        loss, count, number = self.late
        factor = _factor(self.totals, count, number)
        _, _, weight, _ = self.model._compile_loss._flat_losses[0]
        change = loss * ((factor - 1) * (rows if weight is None else rows * weight))
        total: Any = self.model._loss_tracker.total
        total.assign_add(ops.cast(change, total.dtype))


_step: ContextVar[_Step | None] = ContextVar("step", default=None)
# On a model: they lead back to it, so that a table would keep it.
_TOTALS, _EVEN = "_hvkit_totals", "_hvkit_even"
# Models whose gradients are averaged in every step.
_averaged: WeakSet[keras.Model] = WeakSet()


def use_counts_of_all_ranks(model: keras.Model, totals: StepTotals, *, trains: bool = True) -> None:
    """Make losses in the model's ``train_step`` and ``test_step`` those of all ranks' samples.

    Args:
        model: a distributed one.
        totals: of its port.
        trains: whether its gradients are averaged in every step, so that ``train_step`` is meant.
    """
    vars(model)[_TOTALS] = totals
    totals.even = vars(model).get(_EVEN, totals.even)
    if trains:
        _averaged.add(model)
        model.train_step = _counted(model, model.train_step, totals, trains=True)
    model.test_step = _counted(model, model.test_step, totals, trains=False)
    _share_reduction()


def know_rows(model: keras.Model, even: Callable[[], bool]) -> None:
    """Let the steps of a model know whether all ranks have as many rows in each."""
    vars(model)[_EVEN] = even
    if _TOTALS in vars(model):
        vars(model)[_TOTALS].even = even


def _counted(
    model: keras.Model, method: Callable[[Any], Any], totals: StepTotals, *, trains: bool
) -> Callable[[Any], Any]:
    of_keras = getattr(inspect.unwrap(method), "__func__", None) is keras.Model.train_step
    of_keras = of_keras and type(model).compute_loss is keras.Model.compute_loss

    @functools.wraps(method)
    def counted(data: Any) -> Any:
        x, *targets = data if isinstance(data, tuple | list) and data else (data,)
        rows_of = _first_tensor(targets[0]) if targets and trains else None
        if rows_of is None:
            rows_of = _first_tensor(x)
        if rows_of is None:
            return method(data)
        if trains:
            totals.begin(rows_of, final=of_keras)
        step = _Step(model, totals, trains, of_keras)
        before = None if trains else _reported(model)
        token = _step.set(step)
        try:
            logs = method(data)
        finally:
            _step.reset(token)
        if trains:
            if step.late is not None:
                step.correct_reported(_first_tensor(x).shape[0])
            totals.end()
        elif step.noted:
            totals.note([ops.shape(rows_of)[0], _reported(model) - before, *step.noted])
        return logs

    return counted


def _reported(model: keras.Model) -> Any:
    """How often the losses have counted that a model reports so far: by rows, or as it likes."""
    tracker: Any = getattr(model, "_loss_tracker", None)
    return 0.0 if tracker is None else tracker.count + 0.0


def _first_tensor(tree: Any) -> Any:
    """The first tensor or array of some data, which has rows; None if the first thing has none."""
    found = [tree]
    if not ops.is_tensor(tree):
        found = [each for each in keras.tree.flatten(tree) if each is not None]
    return found[0] if found and _has_rows(found[0]) else None


def _has_rows(value: Any) -> bool:
    """Whether a tensor or array is known to have a first dimension."""
    shape = getattr(value, "shape", ())
    return bool(getattr(shape, "rank", None) if hasattr(shape, "rank") else len(shape))


def rows_for_each() -> Any:
    """How many rows all ranks have for each of this rank, in a ``train_step``; else None.

    A collective. A gradient that is to be that of one process must be so many times as large as a
    rank's own, since gradients count as often as the rank has rows.
    """
    registry.note_script_call()
    step = _step.get()
    if step is None or not step.trains:
        return None
    return step.totals.of(None, step.next_name())[0]


def rows_in_step() -> Any:
    """How many rows this rank has in a ``train_step`` on TensorFlow; else None."""
    step = _step.get()
    return getattr(step.totals, "rows", None) if step is not None and step.trains else None


def noted_of(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    """What the ``test_step`` of a model has noted on this rank since the last call."""
    totals: StepTotals | None = vars(model).get(_TOTALS)
    return totals.noted() if totals else []


@functools.cache
def _share_reduction() -> None:
    """Replace the function in which losses of Keras are reduced, and know which one computes."""
    _follow_losses()
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
        if step is None:
            if (_averaged or _in_loops) and may_be_differentiated(loss):
                note_own_count(_count(values, sample_weight, mask, reduction) is not None)
                if _in_loops:  # whose updates do not come here
                    warn_of_own_count(averaged=True)
            return loss
        if not ops.is_tensor(values) or not _has_rows(values):
            return loss
        if values.shape[0] == 0:  # in eager code; the mean is NaN
            loss = ops.cast(ops.sum(values), loss.dtype)
        if not step.has_rows:
            step.see(values)
        position = step.position_of_called
        count = None if reduction == "sum" else _count(values, sample_weight, mask, reduction)
        if count is None and (reduction != "sum" or position is None):
            return loss
        if not step.trains and position is None:
            if step.position is not None:
                warn_of_own_means()
            return loss
        if not step.trains:
            own = ops.cast(loss, "float64")
            parts = [own, 1.0] if count is None else [own * count, count]
            # Keras counts batches alike in an output's loss if the graph does not know their size.
            by_rows = values.shape[0] is not None
            step.noted += [position, count is not None, by_rows, *parts]
            return loss
        number = step.next_name()
        if count is None:
            warn_of_factor(step.model)
            factor, _ = step.totals.of(None, number)
        else:
            count = ops.stop_gradient(count)
            # What has used ``rows_for_each`` in this step expects gradients that count by rows.
            starts = number == 0 and step.has_one_loss() and step.totals.start(count, number)
            if starts and not step.model.losses:
                step.late = ops.stop_gradient(loss), count, number
                return loss
            factor = _factor(step.totals, count, number)
        return loss * ops.convert_to_tensor(factor, loss.dtype)

    keras_losses.reduce_weighted_values = over_all_ranks


def _factor(totals: StepTotals, count: Any, number: int) -> Any:
    """What makes a rank's mean that of all ranks, where a rank counts as often as it has rows."""
    share, total = totals.of(count, number)
    if isinstance(total, float):
        return share * float(count) / total if total else 0.0
    return share * ops.divide_no_nan(count, total)


# Models of loops with optimizers of PyTorch.
_in_loops: WeakSet[keras.Model] = WeakSet()


def watch_loops(model: keras.Model) -> None:
    """Warn of losses with a count of their own in loops that train this model."""
    _in_loops.add(model)
    _share_reduction()


@functools.cache
def _follow_losses() -> None:
    """Know which losses compute, and let the first step look whether one is a mean over samples."""
    call, of_compile = keras_losses.Loss.__call__, compile_utils.CompileLoss.call

    @functools.wraps(call)
    def followed(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = _step.get()
        if step is None:
            return call(self, y_true, y_pred, sample_weight)
        step.called.append((self, y_pred))
        calls = registry.script_calls
        try:
            loss = call(self, y_true, y_pred, sample_weight)
        finally:
            step.called.pop()
        outermost = not step.called
        if outermost and step.position is not None:
            step.position += 1
        own = outermost and step.trains and calls == registry.script_calls
        if own and not is_mean_over_samples(self):
            data = y_true, y_pred
            values = [ops.convert_to_tensor(each) for each in keras.tree.flatten(data)]
            compare = functools.partial(_compare_outside_step, self, data)
            step.totals.once(self.name, values, compare)
        return loss

    @functools.wraps(of_compile)
    def in_order(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step.get()
        if step is None or self is not getattr(step.model, "_compile_loss", None):
            return of_compile(self, *args, **kwargs)
        step.position = 0
        try:
            return of_compile(self, *args, **kwargs)
        finally:
            step.position = None

    keras_losses.Loss.__call__ = followed
    compile_utils.CompileLoss.call = in_order


def _compare_outside_step(loss: Any, data: Any, *values: Any) -> None:
    """Compare a loss with those of halves, which count for nothing in the step."""
    token = _step.set(None)
    try:
        compare_with_halves(loss, data, *values)
    finally:
        _step.reset(token)


def _of_weights(called: tuple[Any, Any]) -> bool:
    """Whether a loss is one of weights, such as a penalty."""
    _, y_pred = called
    kinds = (keras.Variable, *([torch.nn.Parameter] if (torch := sys.modules.get("torch")) else []))
    return isinstance(y_pred, kinds)


def _count(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """By what a loss is divided, as float64; None if by the batch's size, or by nothing yet."""
    if reduction not in _MEANS:
        return None
    shown = None if mask is None else ops.cast(mask, "float64")
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = ops.cast(sample_weight, "float64")
        if shown is not None:
            shown, weights = keras_losses.squeeze_or_expand_to_same_rank(shown, weights)
            weights = weights * shown
        return ops.sum(weights)
    if shown is None:
        return None
    if reduction == "mean_with_sample_weight":
        return ops.sum(shown)
    # Keras lets samples that no mask hides count as often as if they were all.
    return ops.sum(shown) * (_elements(values) / _elements(mask))


def _elements(tensor: Any) -> Any:
    shape = ops.shape(tensor)
    if all(isinstance(each, int) for each in shape):
        return float(math.prod(shape))
    return ops.cast(ops.prod(ops.convert_to_tensor(shape, dtype="int32")), "float64")
