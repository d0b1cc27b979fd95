"""Finds gradients that are NaN or infinite before they become means, and skips or stops then.

Each rank looks at its own gradients once they are in a bucket, while they are in a cache. Whether
any rank has found something travels in the report of the step, so ranks decide alike without a
further message; only then do they tell each other what they have found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.adapters.nonfinite import describe, skipped_steps
from hvkit.adapters.pytorch.gradients.buckets import Bucket
from hvkit.communication import collectives
from hvkit.log import logger
from hvkit.watch.calls import of_run
from hvkit.watch.rank_errors import mark_as_shown_by


class NonFinite:
    """What a rank has found in the gradients of one model.

    Args:
        action: ``"skip"`` or ``"stop"``.
        name: gives the name of a parameter from its number.

    Attributes:
        skips: whether the optimizers' next steps change nothing.
    """

    def __init__(self, action: str, name: Callable[[int], str]) -> None:
        self._action = action
        self._name = name
        self._found: set[int] = set()
        # On a GPU: the numbers of parameters with their largest values, read at the end.
        self._unread: list[tuple[Sequence[int], torch.Tensor]] = []
        self.skips = False

    def look(self, bucket: Bucket) -> None:
        """Look at this rank's gradients in a bucket that is not sent yet."""
        numbers, views = bucket.numbers, bucket.views
        self._found.difference_update(numbers)
        if bucket.flat.device.type != "cpu":
            largest = torch._foreach_norm(views, float("inf"))
            self._unread.append((numbers, torch.stack(list(largest))))
            return
        # One pass over all of them. A sum may overflow although each value is finite.
        length = sum(view.numel() for view in views)
        if not torch.isfinite(bucket.flat[:length].sum()):
            pairs = zip(numbers, views, strict=True)
            self._found.update(i for i, view in pairs if not torch.isfinite(view).all())

    def look_at_rows(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Look at this rank's row-sparse gradients, which are in no bucket.

        Args:
            parameters: those with such a gradient, by number.
        """
        for i, p in parameters.items():
            assert p.grad is not None
            if not torch.isfinite(p.grad._values()).all():
                self._found.add(i)

    def found(self) -> bool:
        """Whether this rank has any."""
        for numbers, largest in self._unread:
            finite = torch.isfinite(largest).tolist()
            self._found.update(i for i, fine in zip(numbers, finite, strict=True) if not fine)
        self._unread.clear()
        return bool(self._found)

    def end(self, on_any_rank: bool, step: int) -> None:
        """End a reduction: skip the step or stop if a rank has found some; then a collective.

        Args:
            on_any_rank: whether one has.
            step: the number of the optimizer's step since the script began.

        Raises:
            FloatingPointError: on every rank, with ``"stop"``.
        """
        self.skips = False
        if not on_any_rank:
            return
        mine = [self._name(i).removeprefix("parameter ") for i in sorted(self._found)]
        self._found.clear()
        text = f"step {of_run(step)}: {describe(collectives.gather('backward()', mine))}"
        if self._action == "stop":
            raise mark_as_shown_by(FloatingPointError(f"in {text}"), 0)
        self.skips = True
        skipped_steps.add()
        if not runtime.rank():
            logger.warning("skipped %s", text)

    def refuse_scaled_step(self, scaler: Any, step: Callable[[], Any]) -> Any:
        """Raise if gradients overflow on purpose; otherwise step.

        Raises:
            ValueError: a ``GradScaler`` finds the largest scale by overflows.
        """
        if scaler.is_enabled():
            raise ValueError(
                f'on_nonfinite="{self._action}": GradScaler skips steps whose gradients overflow, '
                'and needs them to set its scale: use on_nonfinite="ignore"'
            )
        return step()


class WithoutGradients:
    """Takes the gradients of an optimizer away for one step, so that the step changes nothing."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, optimizer: Optimizer) -> None:
        """Before the step."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._held.append((p, p.grad))
                    p.grad = None

    def end(self) -> None:
        """After the step."""
        for p, gradient in self._held:
            p.grad = gradient
        self._held.clear()
