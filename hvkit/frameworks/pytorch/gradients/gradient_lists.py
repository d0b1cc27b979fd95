"""What a step does with every gradient of a model, as loops over lists.

hvkit's build of Horovod brings these functions compiled (``29-loops-over-gradients.patch``), which
take a fraction of the time. Another build has those below, with the same results. ``lists`` returns
one or the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from sys import getrefcount
from types import NoneType
from typing import Any

import numpy as np
import torch

running_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Autograd's id of the pass that this thread is in; -1 outside of any."""

_gradient, _version = attrgetter("grad"), attrgetter("_version")
_requires_grad, _is_sparse = attrgetter("requires_grad"), attrgetter("is_sparse")


class Number:
    """An integer, 0 at first, that compiled code changes, too."""

    def __init__(self) -> None:
        self.value = 0


class Lists:
    """The functions, for lists of tensors as long as each other."""

    def number(self) -> Number:
        """A new number."""
        return Number()

    def hook(
        self,
        running: Number,
        full: Number,
        left: Number,
        otherwise: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """A hook of a parameter that takes 1 from ``left``.

        It calls ``otherwise`` instead in another pass than ``running``, if ``full`` is not 0, and
        for the last gradient that is left.
        """

        def count(parameter: torch.Tensor) -> None:
            if running_pass() == running.value and not full.value and left.value > 1:
                left.value -= 1
            else:
                otherwise(parameter)

        return count

    def present(self, parameters: list[Any]) -> list[int]:
        """Where gradients are not None."""
        return [i for i, p in enumerate(parameters) if p.grad is not None]

    def dense(self, parameters: list[Any]) -> bool:
        """Whether all gradients are there, and none is sparse."""
        return _are_dense(list(map(_gradient, parameters)))

    def pack(self, parameters: list[Any], views: list[Any]) -> bool:
        """Copy the gradients into views of their shapes if they are dense; return whether."""
        gradients = list(map(_gradient, parameters))
        if not _are_dense(gradients):
            return False
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)
        return True

    def give(self, parameters: list[Any], means: list[Any]) -> None:
        """Make means the parameters' gradients."""
        for p, mean in zip(parameters, means, strict=True):
            p.grad = mean

    def unused(self, means: list[Any], addresses: list[int], references: int) -> bool:
        """Whether each mean has only so many references, needs no gradient, and has not moved."""
        return (
            max(map(getrefcount, means)) <= references
            and list(map(torch.Tensor.data_ptr, means)) == addresses
            and not any(map(_requires_grad, means))
        )

    def versions(self, parameters: list[Any]) -> bytes:
        """For each gradient, as int64, which object it is, and how often it changed; -1 if None."""
        gradients = list(map(_gradient, parameters))
        try:
            versions = list(map(_version, gradients))
        # None has none, and nor have tensors that inference mode has made.
        except (AttributeError, RuntimeError):
            versions = [-1 if g is None or g.is_inference() else g._version for g in gradients]
        return np.array([list(map(id, gradients)), versions], np.int64).T.tobytes()

    def properties(self, parameters: list[Any]) -> Any:
        """The dtype, the device, whether it is contiguous and trained, of each; to be compared."""
        return (
            [p.dtype for p in parameters],
            list(map(torch.Tensor.get_device, parameters)),  # an index takes half of the time
            list(map(torch.Tensor.is_contiguous, parameters)),
            [p.requires_grad for p in parameters],
        )


def _are_dense(gradients: Sequence[torch.Tensor | None]) -> bool:
    return NoneType not in set(map(type, gradients)) and not any(map(_is_sparse, gradients))


@functools.cache
def lists() -> Lists:
    """The compiled functions, or those of ``Lists``."""
    from horovod.torch import mpi_lib_v2

    found: Lists = getattr(mpi_lib_v2, "hvkit", None) or Lists()
    return found
