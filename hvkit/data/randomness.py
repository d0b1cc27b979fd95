"""Code that draws random numbers, made to draw the same ones on every rank."""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import Any

import numpy as np


class FixedRandomness:
    """Within it, the global generators of Python, NumPy and PyTorch start from a seed.

    Afterwards they are what they were before. Entering again goes on where it was left.

    Args:
        seed: of 63 bits.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: Any = None

    def __enter__(self) -> None:
        self._outside = _state()
        if self._inside is None:
            _start(self._seed)
        else:
            _restore(self._inside)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = _state()
        _restore(self._outside)


def _start(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


def _state() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    return random.getstate(), np.random.get_state(), of_torch


def _restore(state: tuple[Any, Any, Any]) -> None:
    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if of_torch is not None:
        sys.modules["torch"].set_rng_state(of_torch)
