"""The random numbers of a tensor group: the same for what all hold, others for each rank's part.

Scripts seed each rank by its rank, so that ranks shuffle and drop out differently. The ranks of a
tensor group compute on the same activations: with different dropout they would train different
models. Megatron-LM keeps two streams for the same reason
(https://arxiv.org/abs/1909.08053, appendix B.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist

_LARGEST_SEED = 2**62


class SameRandomNumbers:
    """A context in which all ranks of a group draw the same random numbers.

    The numbers go on where the last context ended. Outside, each rank has its own generators as
    before. They cover the CPU, and the current CUDA device.

    Args:
        group: of ``torch.distributed``; the numbers begin with the generators of its first rank.
            A collective.
        device: of the model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._index = dist.get_rank(group)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(_generator(device))
        self._common = [generator.get_state() for generator in self._generators]
        for state in self._common:
            moved = state.to(device)
            dist.broadcast(moved, group=group, group_src=0)
            state.copy_(moved)
        self._own: list[torch.Tensor] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._own = [generator.get_state() for generator in self._generators]
            self._set(self._common)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._common = [generator.get_state() for generator in self._generators]
            self._set(self._own)

    def begin(self) -> None:
        """Go on from where the generators are now, which must be the same on all ranks."""
        self._common = [generator.get_state() for generator in self._generators]

    @property
    def state(self) -> list[torch.Tensor]:
        """Where the numbers go on: of the CPU, then of the CUDA device. May be set to resume."""
        return [state.clone() for state in self._common]

    @state.setter
    def state(self, states: list[torch.Tensor]) -> None:
        self._common = [state.clone() for state in states]

    @contextmanager
    def different(self, device: torch.device) -> Iterator[None]:
        """Inside, each rank draws other numbers on ``device``: for dropout of its own part.

        They depend on the common generator alone, so that gradient checkpointing, which sets it
        back before it computes a part of the forward again, gets the same ones.
        """
        seed = int(torch.randint(_LARGEST_SEED, (), device="cpu"))
        generator = _generator(device)
        before = generator.get_state()
        generator.manual_seed(seed + self._index)
        try:
            yield
        finally:
            generator.set_state(before)

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
