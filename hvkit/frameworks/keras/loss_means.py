"""Losses in ``fit`` that are means over all ranks' samples, tokens or weights.

A loss divides a sum by a count: of samples, of tokens that no mask hides, or a sum of weights. Rank
r knows ``S_r`` and ``D_r`` of its batch, and one process has ``sum S_r / sum D_r``. The mean over
ranks of ``S_r / D_r`` is the same only if all ``D_r`` are equal.

- **Samples.** The gradients of a rank with ``B_r`` rows are multiplied by ``N B_r / sum B_r``
  before they are averaged. Ranks exchange these numbers with others that they exchange before
  gradients. Rows are counted in the targets, or in the inputs if there are no targets; in a
  ``train_step`` of the script, in its first loss of samples.
- **Masks and weights.** Keras reduces all losses in one function, which hvkit replaces. A loss with
  its own count becomes ``S_r / sum D_r * sum B_r / B_r``. Its mean over ranks, weighted by rows, is
  the loss of one process. Keras reports this loss, since Keras weights reported losses by rows,
  too. A sum, ``reduction="sum"``, has a count of 1 on all ranks if it is a loss of ``compile``:
  another may be of weights, or have a factor of the script. If a step has only one such loss, a
  port may weight gradients by ``D_r`` instead of ``B_r``. No rank then waits for ``sum D_r``, and
  the reported loss is corrected afterwards.

This holds inside ``train_step``, which every rank runs. In ``test_step`` ranks may have different
numbers of batches, so none waits there: each notes ``S_r`` and ``D_r`` of its batches, and the
reported losses are corrected at the end of the pass (``metric_results``). Elsewhere a loss is
computed from the rank's batch alone; if it is for gradients, rank 0 warns.

``loss_checks`` names losses that cannot be corrected here.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as keras_losses
from keras.src.trainers import compile_utils

from hvkit import registry
from hvkit.frameworks.keras import loss_checks
from hvkit.frameworks.keras.backends import may_be_differentiated

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class StepTotals(Protocol):
    """Sums over ranks in a step; ``even`` returns whether ranks are known to have as many rows."""

    even: Callable[[], bool]

    def begin(self, rows_of: Any, final: bool = True) -> None:
        """Note this rank's rows in this step; a later call may correct them if not ``final``."""

    def end(self) -> None:
        """End the step."""

    def of(self, count: Any, number: int) -> tuple[Any, Any]:
        """The rows of all ranks for each row of this rank, and a count over all ranks.

        A collective. ``count`` is this rank's, a float64 scalar; ``number`` is that of this call in
        the step. Without a row or a count, the first or the second result means nothing.
        """

    def start(self, count: Any, number: int) -> bool:
        """Start to add up a count over ranks, which also weights the gradients of this step.

        A collective, on all ranks or none. Returns whether it has started. A later ``of`` in the
        step returns the sum, and weights the gradients by rows again.
        """

    def once(self, key: str, values: Sequence[Any], report: Callable[..., None]) -> None:
        """In the first step, pass the values of some tensors to ``report``, as NumPy arrays."""

    def note(self, numbers: Sequence[Any]) -> None:
        """Keep a step's scalars until the end of a pass over data."""

    def noted(self) -> list[np.ndarray[Any, Any]]:
        """The numbers noted since the last call: a float64 array for each step."""


@dataclass(eq=False)
class _Step:
    """A ``train_step`` or ``test_step`` of a model under way.

    ``names`` counts its collectives. ``position`` is that of the next loss of ``compile``, while
    these compute. ``called`` are the losses that compute, each inside of the one before. ``late``
    is a loss whose count is being added up, the count, and its number. ``noted`` has, in a
    ``test_step``, five numbers for each loss of ``compile`` with its own count: its position,
    whether it is a mean, whether its tracker counts rows, the sum, and the count.
    """

    model: keras.Model
    totals: StepTotals
    trains: bool
    of_keras: bool
    names: int = 0
    position: int | None = None
    called: list[Any] = field(default_factory=list)
    late: tuple[Any, Any, int] | None = None
    noted: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.has_rows = self.of_keras or not self.trains

    def next_name(self) -> int:
        self.names += 1
        return self.names - 1

    def see(self, values: Any) -> None:
        """Take the rows of a loss's values as the step's, unless it is a penalty on weights."""
        if not (self.called and _of_weights(self.called[-1])):
            self.has_rows = True
            self.totals.begin(values)

    @property
    def position_of_called(self) -> int | None:
        """The position of the loss that computes among the losses of ``compile``; else None."""
        return self.position if len(self.called) == 1 else None

    def has_one_loss(self) -> bool:
        """Whether the loss that computes is the only one of ``compile``, and Keras's own."""
        compiled: Any = getattr(self.model, "_compile_loss", None)
        losses: Any = getattr(compiled, "_flat_losses", None) or ()
        one = self.of_keras and len(losses) == 1 and self.position_of_called == 0
        return one and loss_checks.gives_each_sample_its_own(self.called[0][0])

    def note(self, loss: Any, count: Any, *, by_rows: bool) -> None:
        """Note a loss of a ``test_step``, a sum if ``count`` is None."""
        if (position := self.position_of_called) is not None:
            local = ops.cast(loss, "float64")
            parts = [local, 1.0] if count is None else [local * count, count]
            self.noted += [position, count is not None, by_rows, *parts]
        elif self.position is not None:
            loss_checks.warn_of_own_means()

    def over_all_ranks(self, loss: Any, count: Any) -> Any:
        """A loss of a ``train_step`` as a mean over all ranks' counts, or a sum; a collective."""
        number = self.next_name()
        if count is None:
            loss_checks.warn_of_factor(self.model)
            factor, _ = self.totals.of(None, number)
        else:
            count = ops.stop_gradient(count)
            # Users of ``rows_for_each`` in this step need gradients that are weighted by rows.
            starts = number == 0 and self.has_one_loss() and self.totals.start(count, number)
            if starts and not self.model.losses:
                self.late = ops.stop_gradient(loss), count, number
                return loss
            factor = _factor(self.totals, count, number)
        return loss * ops.convert_to_tensor(factor, loss.dtype)

    def correct_reported(self, rows: int) -> None:
        """Correct the reported loss, which Keras has weighted by ``rows``, by all ranks' counts."""
        assert self.late is not None
        loss, count, number = self.late
        factor = _factor(self.totals, count, number)
        _, _, weight, _ = self.model._compile_loss._flat_losses[0]
        change = loss * ((factor - 1) * (rows if weight is None else rows * weight))
        total: Any = self.model._loss_tracker.total
        total.assign_add(ops.cast(change, total.dtype))


_step: ContextVar[_Step | None] = ContextVar("step", default=None)


@contextmanager
def _as_current(step: _Step | None) -> Iterator[None]:
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


# Attributes of a model: they refer to it, so that a table would keep it.
_TOTALS, _EVEN = "_hvkit_totals", "_hvkit_even"


def use_counts_of_all_ranks(model: keras.Model, totals: StepTotals, *, trains: bool = True) -> None:
    """Make losses means over all ranks' samples, in ``train_step`` if ranks average each step."""
    vars(model)[_TOTALS] = totals
    totals.even = vars(model).get(_EVEN, totals.even)
    if trains:
        loss_checks.watch_losses(model)
        model.train_step = _counted(model, model.train_step, totals, trains=True)
    model.test_step = _counted(model, model.test_step, totals, trains=False)
    _replace_reduction()


def know_rows(model: keras.Model, even: Callable[[], bool]) -> None:
    """Set a function that returns whether all ranks have equally many rows in each step."""
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
        with _as_current(step):
            logs = method(data)
        if trains:
            if step.late is not None:
                step.correct_reported(_first_tensor(x).shape[0])
            totals.end()
        elif step.noted:
            totals.note([ops.shape(rows_of)[0], _reported(model) - before, *step.noted])
        return logs

    return counted


def _reported(model: keras.Model) -> Any:
    """The sum of weights of the loss that a model reports so far."""
    tracker: Any = getattr(model, "_loss_tracker", None)
    return 0.0 if tracker is None else tracker.count + 0.0


def _first_tensor(tree: Any) -> Any:
    """The first tensor or array of some data, which has rows; None if the first thing has none."""
    leaves = [tree] if ops.is_tensor(tree) else keras.tree.flatten(tree)
    first = next((each for each in leaves if each is not None), None)
    return first if _has_rows(first) else None


def _has_rows(value: Any) -> bool:
    """Whether a tensor or array is known to have a first dimension."""
    shape = getattr(value, "shape", ())
    return bool(getattr(shape, "rank", None) if hasattr(shape, "rank") else len(shape))


def rows_for_each() -> Any:
    """The rows of all ranks for each of this one, in a ``train_step``; else None. A collective.

    Times a rank's gradient, which is weighted by its rows later, it is the gradient of one process.
    """
    registry.note_script_call()
    step = _step.get()
    if step is None or not step.trains:
        return None
    return step.totals.of(None, step.next_name())[0]


def rows_in_step() -> Any:
    """This rank's rows in a ``train_step`` on TensorFlow; else None."""
    step = _step.get()
    return getattr(step.totals, "rows", None) if step is not None and step.trains else None


def noted_of(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    """The numbers that a model's ``test_step`` has noted on this rank since the last call."""
    totals: StepTotals | None = vars(model).get(_TOTALS)
    return totals.noted() if totals else []


@functools.cache
def _replace_reduction() -> None:
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
            if loss_checks.watches_losses() and may_be_differentiated(loss):
                loss_checks.note_own_count(
                    _count(values, sample_weight, mask, reduction) is not None
                )
            return loss
        if not ops.is_tensor(values) or not _has_rows(values):
            return loss
        if values.shape[0] == 0:  # in eager code; the mean is NaN
            loss = ops.cast(ops.sum(values), loss.dtype)
        if not step.has_rows:
            step.see(values)
        count = None if reduction == "sum" else _count(values, sample_weight, mask, reduction)
        if count is None and (reduction != "sum" or step.position_of_called is None):
            return loss
        if step.trains:
            return step.over_all_ranks(loss, count)
        # Keras gives batches equal weights in an output's loss if their size is unknown.
        step.note(loss, count, by_rows=values.shape[0] is not None)
        return loss

    keras_losses.reduce_weighted_values = over_all_ranks


def _factor(totals: StepTotals, count: Any, number: int) -> Any:
    """The factor from a rank's mean to the mean of all ranks, weighted by rows."""
    rows_for_each, total = totals.of(count, number)
    if isinstance(total, float):
        return rows_for_each * float(count) / total if total else 0.0
    return rows_for_each * ops.divide_no_nan(count, total)


@functools.cache
def _follow_losses() -> None:
    """Know which losses compute; in the first step, check that each is a mean over samples."""
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
        is_local = outermost and step.trains and calls == registry.script_calls
        if is_local and not loss_checks.is_mean_over_samples(self):
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
    with _as_current(None):
        loss_checks.compare_with_halves(loss, data, *values)


def _of_weights(called: tuple[Any, Any]) -> bool:
    _, y_pred = called
    torch = sys.modules.get("torch")
    return isinstance(y_pred, (keras.Variable, *([torch.nn.Parameter] if torch else [])))


def _count(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """The divisor of a loss, as float64; None for the batch's size, or if nothing divides yet."""
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
