"""Random numbers that are the same on several ranks: those of a tensor group, or of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_LARGEST_SEED = 2**62


def new_seed() -> int:
    """A seed from this rank's generator."""
    return int(torch.randint(_LARGEST_SEED, (), device="cpu"))


class _Generators:
    """Those of the CPU and of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._all.append(torch.cuda.default_generators[index])

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._all]

    def set(self, states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(self._all, states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        for generator in self._all:
            generator.manual_seed(seed)


class SameRandomNumbers:
    """A context in which all ranks of a group draw the same random numbers.

    Scripts seed each rank by its rank. But the ranks of a tensor group compute on the same
    activations: with different dropout they would train different models. Megatron-LM keeps two
    generators for the same reason (https://arxiv.org/abs/1909.08053, appendix B.2).

    The context continues the numbers of the last one, on the CPU and the current CUDA device.
    Outside of it each rank draws from its own generators as before. To make one is a collective:
    all start from the generators of the group's first rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._index = dist.get_rank(group)
        self._generators = _Generators(device)
        self.begin()
        for state in self._common:
            moved = state.to(device)
            dist.broadcast(moved, group=group, group_src=0)
            state.copy_(moved)
        self._outside: list[torch.Tensor] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._outside = self._generators.states()
            self._generators.set(self._common)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.begin()
            self._generators.set(self._outside)

    def begin(self) -> None:
        """Continue from the generators' present states, which must be the same on all ranks."""
        self._common = self._generators.states()

    @property
    def state(self) -> list[torch.Tensor]:
        """States of the generators of the CPU and the CUDA device; may be set to resume."""
        return [state.clone() for state in self._common]

    @state.setter
    def state(self, states: list[torch.Tensor]) -> None:
        self._common = [state.clone() for state in states]

    @contextmanager
    def different(self, device: torch.device) -> Iterator[None]:
        """A context in which each rank draws other numbers on ``device``: dropout of its part.

        They depend on the common generator alone. So gradient checkpointing, which sets that one
        back before it recomputes, gets the same numbers.
        """
        seed = new_seed()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _Generators(device).seed(seed + self._index)
            yield


class SharedNumbers:
    """Random numbers that are the same in all stages of a pipeline, such as noise in a forward.

    Each rank runs the model's forward, but computes only its own stage. The forward itself must
    draw the same numbers on all ranks, although modules, whose dropout draws too, compute on one
    rank only: these ``modules``, of which none is inside another. So a pass begins with a seed that
    the ranks share, and each call of a module takes one number of that stream to seed its own
    numbers. Gradient checkpointing draws the same ones again. ``seeded`` is called when a pass has
    set its seed.
    """

    def __init__(
        self, device: torch.device, modules: Iterable[nn.Module], seeded: Callable[[], None]
    ) -> None:
        self._generators, self._seeded = _Generators(device), seeded
        # The states before each running call: computing shapes may call a module inside of one.
        self._before: list[list[torch.Tensor]] = []
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            # Also after an error: checkpoints leave modules by an exception.
            module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def drawn(self, seed: int) -> Iterator[None]:
        """Surrounds a pass; afterwards the rank's own generators continue."""
        states, of_python = self._generators.states(), random.getstate()
        self._generators.seed(seed)
        random.seed(seed)
        self._seeded()
        try:
            yield
        finally:
            self._generators.set(states)
            random.setstate(of_python)

    def _enter(self, module: nn.Module, args: Any) -> None:
        seed = new_seed()
        self._before.append(self._generators.states())
        self._generators.seed(seed)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._generators.set(self._before.pop())
