"""Finds gradients that are NaN or infinite before they become means, and skips the step or stops.

Each rank looks at its gradients once they are in a bucket, while they are in a cache. The report of
the step shows whether any rank has found some, so all ranks make the same decision without a
further message. Only then do they exchange the indices of these parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence, Set

import torch
from torch.optim import Optimizer

from hvkit.communication import collectives
from hvkit.frameworks.pytorch.buffers import LastStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.gradients.buckets import Bucket
from hvkit.frameworks.pytorch.optimizers import parameters_of, refuse_grad_scaler
from hvkit.frameworks.pytorch.step_hooks import Feature, HiddenGradients, Order, UpdateHooks
from hvkit.log import logger
from hvkit.sync.port import describe_nonfinite, skipped_steps
from hvkit.watch.calls import of_run
from hvkit.watch.rank_errors import mark_as_shown_by

_LEFT = (
    "the gradients still hold NaN or infinite values of an earlier step: call zero_grad() in each "
    "step"
)

# Of all models. If they are of several classes, messages name them.
_all: weakref.WeakSet[NonFinite] = weakref.WeakSet()


class NonFinite:
    """Finds a rank's gradients of one model that are not finite; skips the step or stops."""

    def __init__(self, action: str, model: torch.nn.Module, checks: Checks) -> None:
        self._action = action
        self._checks, self._group = checks, checks.group
        self._model = type(model).__name__
        # Statistics of batch norm must survive a step that is skipped.
        self._statistics = LastStatistics(model) if action == "skip" else None
        self._found: set[int] = set()
        # Without gradients that are merely left over from an earlier backward pass.
        self._new: list[int] = []
        # The means that the last reduction has spoilt, by parameter, with the tensor's version.
        self._spoilt: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # The sentence for a step that is skipped.
        self._text = ""
        self._skips = False
        # On a GPU: the indices of parameters with their largest values, read at the end.
        self._unread: list[tuple[Sequence[int], torch.Tensor]] = []
        _all.add(self)

    def look(self, bucket: Bucket) -> None:
        """Look at this rank's gradients in a bucket that is not sent yet."""
        indices, views = bucket.indices, bucket.views
        self._found.difference_update(indices)
        if bucket.flat.device.type != "cpu":
            largest = torch._foreach_norm(views, float("inf"))
            self._unread.append((indices, torch.stack(list(largest))))
            return
        # One pass over all of them. A sum may overflow although each value is finite.
        length = sum(view.numel() for view in views)
        if not torch.isfinite(bucket.flat[:length].sum()):
            pairs = zip(indices, views, strict=True)
            self._found.update(i for i, view in pairs if not torch.isfinite(view).all())

    def found(self, sparse: Set[int]) -> bool:
        """Whether this rank has any, before the means; row-sparse gradients are in no bucket."""
        parameters = self._checks.parameters
        for i in sparse:
            gradient = parameters[i].grad
            assert gradient is not None
            if not torch.isfinite(gradient._values()).all():
                self._found.add(i)
        for indices, largest in self._unread:
            finite = torch.isfinite(largest).tolist()
            self._found.update(i for i, fine in zip(indices, finite, strict=True) if not fine)
        self._unread.clear()
        self._new = [i for i in sorted(self._found) if not self._is_left(i, parameters[i].grad)]
        return bool(self._found)

    def _is_left(self, i: int, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is the mean of an earlier pass, to which this one has added."""
        if i not in self._spoilt or gradient is None:
            return False
        before, version = self._spoilt[i]
        return before() is gradient and gradient._version <= version + 1

    def end(self, on_any_rank: bool) -> None:
        """End a reduction: skip the step, counted in the run, or stop; then a collective."""
        self._skips = on_any_rank
        if not on_any_rank:
            self._text = ""
            self._spoilt.clear()
            if self._statistics is not None:
                self._statistics.keep()
            return
        self._found.clear()
        by_rank = collectives.gather("backward()", self._new, self._group)
        label, parameters = self._checks.label, self._checks.parameters
        named = [[label(i).removeprefix("parameter ") for i in indices] for indices in by_rank]
        of_model = f" of {self._model}" if len({each._model for each in _all}) > 1 else ""
        what = describe_nonfinite(named, self._group.members)
        if what or not self._text:
            self._text = f"step {of_run(self._checks.steps + 1)}{of_model}: {what or _LEFT}"
        if self._statistics is None:
            raise mark_as_shown_by(FloatingPointError(f"in {self._text}"), self._group.first)
        self._statistics.put_back()
        for i in {*self._spoilt, *itertools.chain(*by_rank)}:
            if (mean := parameters[i].grad) is not None:
                self._spoilt[i] = weakref.ref(mean), mean._version

    def attach(self, optimizers: Sequence[Optimizer], hooks: UpdateHooks) -> None:
        """Let a step that is skipped find no gradients."""
        skip_steps(self._action, optimizers, hooks, self._skips_step)

    def _skips_step(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's step that begins now changes nothing; rank 0 logs that it does.

        A loss may also leave gradients that no optimizer uses, as a generator's in a discriminator.
        """
        if self._skips and self._text:
            skipped_steps.number += 1
            if not self._group.rank:
                logger.warning("skipped %s", self._text)
            self._text = ""
        return self._skips


def skip_steps(
    action: str,
    optimizers: Sequence[Optimizer],
    hooks: UpdateHooks,
    skips: Callable[[Optimizer], bool],
) -> None:
    """Let steps that are skipped find no gradients, of an optimizer and the ones inside it."""
    gradients = HiddenGradients()

    def take_away(optimizer: Optimizer) -> None:
        if skips(optimizer):
            gradients.hide(parameters_of(*optimizers))

    show = gradients.show
    hooks.add(Feature(Order.NONFINITE, gradients=take_away, after=show, failed=show))
    for each in optimizers:
        refuse_grad_scaler(
            each,
            f'on_nonfinite="{action}": GradScaler skips steps whose gradients overflow, and needs '
            'them to set its scale: use on_nonfinite="ignore"',
        )
