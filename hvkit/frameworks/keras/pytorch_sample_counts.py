"""How many samples, tokens or weights the ranks' losses are means over, on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvkit.communication.group import Group
from hvkit.frameworks.pytorch.collectives.wire import Wire


class PyTorchSampleCounts:
    """The counts of a model's steps; it is a ``hvkit.frameworks.keras.loss_means.StepTotals``.

    The sum of rows travels while the model computes. Whoever needs it first waits for it: the first
    gradients that are sent, in general. Nothing travels where ranks know that all have as many.

    So does the sum of a count that gradients are weighted by. Nobody knows it while gradients are
    sent: they are weighted by this rank's count over the mean of the last step's, and all that
    have arrived by ``correction()``.

    Args:
        name: the same on every rank, and no other model's.
        group: the ranks that train the model.

    Attributes:
        weighs: whether gradients may count as often as a loss does: nothing of them is kept for
            steps of other counts.
    """

    def __init__(self, name: str, group: Group) -> None:
        self.even: Callable[[], bool] = lambda: False
        self.weighs = False
        self._name = name
        self._wire = Wire("checks", group)
        self._rows = 0
        self._total = torch.zeros(1, dtype=torch.float64, device="cpu")
        # Of the sums on their way.
        self._handles: list[int] = []
        self._in_step = self._of_script = self._may_change = False
        # The count of a loss, over all ranks; as a mean over ranks in the last step, if any.
        self._sum = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._usual = 0.0
        # Of this step, where gradients count as often; None if they count by rows.
        self._count: float | None = None
        self._started = False
        # Which comparisons have been made.
        self._reported: set[str] = set()
        self._noted: list[Sequence[Any]] = []

    def begin(self, rows_of: torch.Tensor, final: bool = True) -> None:
        """Note how many rows this rank has in this step."""
        self._may_change = False
        self._arrive()  # of a step that failed
        self._may_change = not final
        self._of_script = self._of_script or not final
        self._rows = rows_of.shape[0]
        # A step of the script's may compute with some of the rows.
        self._in_step = self._of_script or not self.even()
        if self._in_step and final:
            self._send_rows()

    def _send_rows(self) -> None:
        self._total.fill_(self._rows)
        self._handles.append(self._wire.start_sum(self._total, f"{self._name}.rows"))

    def end(self) -> None:
        """The step has ended."""
        self._may_change = self._of_script = False
        self._arrive()
        if self._started:
            self._usual = self._sum.item() / self._wire.size
        self._in_step = self._started = False
        self._count = None

    def _arrive(self) -> None:
        if self._may_change:
            self._may_change = False
            self._send_rows()
        while self._handles:
            self._wire.wait(self._handles.pop(0))

    def weight(self) -> float:
        """How often the gradients of this rank count, if all are multiplied by ``correction()``."""
        if self._count is not None:
            return self._count / self._usual
        self._arrive()
        by_rows = 1.0
        if self._in_step:
            by_rows = self._rows * self._wire.size / (self._total.item() or 1.0)
        return by_rows / self.correction()

    def correction(self) -> float:
        """By what all ranks multiply the gradients that have arrived."""
        if not self._started:
            return 1.0
        self._arrive()
        return self._usual * self._wire.size / (self._sum.item() or 1.0)

    def of(self, count: torch.Tensor | None, number: int) -> tuple[float, float]:
        """The rows of all ranks for each of this rank, and a count over all ranks."""
        self._arrive()
        share = float(self._wire.size)
        if self._in_step:
            share = self._total.item() / self._rows if self._rows else 0.0
        if count is None:
            return share, 0.0
        if self._started:
            self._count = None
            return share, self._sum.item()
        total = self._wire.sum(count.reshape(1), f"{self._name}.{number}").item()
        self._usual = total / self._wire.size
        return share, total

    def start(self, count: torch.Tensor, number: int) -> bool:
        """Add a count up while ranks compute gradients, which count as often."""
        if not self.weighs or not self._usual:
            return False
        self._started, self._count = True, count.item()
        self._sum.fill_(self._count)
        self._handles.append(self._wire.start_sum(self._sum, f"{self._name}.{number}"))
        return True

    def once(self, key: str, values: Sequence[torch.Tensor], report: Callable[..., None]) -> None:
        """In the first step, pass the values of some tensors to ``report``, as NumPy arrays."""
        if key not in self._reported:
            self._reported.add(key)
            with torch.no_grad():
                report(*(each.detach().cpu().numpy() for each in values))

    def note(self, numbers: Sequence[Any]) -> None:
        """Keep a step's scalars until the end of a pass over data."""
        self._noted.append([n.detach() if isinstance(n, torch.Tensor) else n for n in numbers])

    def noted(self) -> list[np.ndarray[Any, Any]]:
        """What was noted since the last call."""
        noted, self._noted = self._noted, []
        return [np.array(list(map(float, each))) for each in noted]
