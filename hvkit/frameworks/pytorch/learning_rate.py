"""The learning rates of PyTorch's optimizers: multiplied while an update reads them, and compared.

``param_groups[i]["lr"]`` is the user's: scripts, schedulers, loggers and checkpoints read and write
it at any time. It holds the multiplied rate only while ``step()`` updates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.step_hooks import Feature, Order, UpdateHooks
from hvkit.learning_rate import Multiplier
from hvkit.watch.rank_errors import mark_as_shown_by


class RateInStep:
    """Multiplies the rates of one optimizer, and of optimizers inside it, while they update."""

    def __init__(self, multiplier: Multiplier, hooks: UpdateHooks) -> None:
        self.steps_done = 0  # a checkpoint sets it when training resumes
        self._multiplier = multiplier
        # Gives rates the user's value again.
        self._restores = ExitStack()
        begins, ends = self._multiply, self._restores.close
        hooks.add(Feature(Order.RATE, update_begins=begins, update_ends=ends, after=self._count))

    def _count(self, optimizer: Optimizer) -> None:
        self.steps_done += 1

    def _multiply(self, optimizer: Optimizer) -> None:
        if self.steps_done < self._multiplier.warmup_steps:
            _refuse_graph_capture()
        by = self._multiplier.at(self.steps_done)
        if by == 1:
            return
        done: set[int] = set()
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:
                continue
            # Several groups may share a tensor, and compiled steps and CUDA graphs remember its
            # address, so change it in place; but never write to one that gradients flow to.
            in_place = isinstance(rate, torch.Tensor) and not rate.requires_grad
            if in_place and id(rate) not in done:
                done.add(id(rate))
                self._restores.callback(_multiply_in_place(rate, by))
            group["lr"] = multiplied = rate if in_place else rate * by
            self._restores.callback(_restore_group, group, rate, multiplied, by)


def _multiply_in_place(rate: torch.Tensor, by: float) -> Callable[[], None]:
    """Multiply a tensor; return a function that restores the user's value."""
    with torch.no_grad():
        users = rate.clone()
        rate.mul_(by)
    version = rate._version

    def restore() -> None:
        with torch.no_grad():
            if rate._version == version:
                rate.copy_(users)
            else:  # an optimizer that lowers its rate itself
                rate.div_(by)

    return restore


def _restore_group(group: dict[str, Any], rate: Any, multiplied: Any, by: float) -> None:
    # An optimizer that lowers its rate itself has set another rate.
    group["lr"] = rate if group["lr"] is multiplied else group["lr"] / by


def _refuse_graph_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "optimizer.step() was captured into a CUDA graph during the warm-up of the learning "
            "rate; all replays would use the rate of this step: capture it after the warm-up, or "
            "pass warmup_steps=0 to hvkit.distribute"
        )


def checksum_of_rates(optimizers: Sequence[Optimizer]) -> int:
    """A number that differs, in all likelihood, if the learning rates do."""
    return zlib.crc32(repr([rate for _, rate in rates_of(optimizers, fetch=False)]).encode())


def rates_of(optimizers: Sequence[Optimizer], *, fetch: bool) -> list[tuple[str, float]]:
    """The learning rates, with names for messages; ``fetch`` also those that are on a GPU."""
    return [
        (f"parameter group {g} of {type(optimizer).__name__}", float(rate))
        for optimizer in optimizers
        for g, group in enumerate(optimizer.param_groups)
        if isinstance(rate := group.get("lr"), int | float)
        or (isinstance(rate, torch.Tensor) and (fetch or rate.device.type == "cpu"))
    ]


def refuse_other_rates(by_rank: Mapping[int, Sequence[tuple[str, float]]]) -> None:
    """Raise on every rank unless all use the same rates; ``by_rank`` is in ascending order."""
    (shows, rates), *others = by_rank.items()
    for rank, other_rates in others:
        for (name, first), (_, other) in zip(rates, other_rates, strict=True):
            if first != other:
                error = RanksDisagreeError(
                    f"the learning rate of {name} is {first!r} on rank {shows} but {other!r} on "
                    f"rank {rank}: set the same rate on every rank; a scheduler that follows a "
                    "metric needs the mean over ranks: scheduler.step(hvkit.average(loss))"
                )
                raise mark_as_shown_by(error, shows)
