"""Random numbers that all stages of a pipeline draw alike, such as noise that a forward adds.

Each rank runs the model's forward, but computes only its own stage. What the forward itself draws
must be the same on all of them, although modules, whose dropout draws too, compute on one rank
only. So a pass begins with a seed that the ranks share, and each call of a module takes one number
of that stream, from which its own numbers follow. Gradient checkpointing gets the same ones again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_LARGEST_SEED = 2**62


class SharedNumbers:
    """The random numbers of one rank's forward passes.

    Args:
        device: of the model; the numbers cover it, the CPU, and Python's ``random``.
        modules: those that compute on one rank only, none inside another.
        seeded: called when a pass has got its seed.
    """

    def __init__(
        self,
        device: torch.device,
        modules: Iterable[nn.Module],
        seeded: Callable[[], None],
    ) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._seeded = seeded
        # What was before each call that is running: a module may be called for its shapes inside.
        self._before: list[list[torch.Tensor]] = []
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            # Also after an error: checkpoints leave modules by one.
            module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def drawn(self, seed: int) -> Iterator[None]:
        """Surrounds a pass; afterwards the rank's own generators go on."""
        own = self._states()
        of_python = random.getstate()
        self._seed(seed)
        random.seed(seed)
        self._seeded()
        try:
            yield
        finally:
            self._set(own)
            random.setstate(of_python)

    def _enter(self, module: nn.Module, args: Any) -> None:
        seed = int(torch.randint(_LARGEST_SEED, (), device="cpu"))
        self._before.append(self._states())
        self._seed(seed)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._set(self._before.pop())

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


def new_seed() -> int:
    """A seed from this rank's generator."""
    return int(torch.randint(_LARGEST_SEED, (), device="cpu"))
