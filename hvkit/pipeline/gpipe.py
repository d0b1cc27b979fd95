"""GPipe: a model cut into even stages on successive ranks, and the order of their work.

All micro-batches go forward through all stages, and later all backward. Source: Huang et al.,
"GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, TypeVar

from hvkit.errors import HvkitError, RankLostError
from hvkit.pipeline.messages import Channel, TensorSpec

BALANCES = "flops", "bytes"
"""The measures of a stage that cuts can balance."""


@dataclass(frozen=True)
class CutPoint:
    """A module or layer after which a model can be cut.

    ``time`` is when its call ends; ``nbytes`` are what a stage then sends to the next one.
    """

    name: str
    time: int
    nbytes: int

    def __str__(self) -> str:
        return self.name


P = TypeVar("P", bound=CutPoint)


@dataclass(frozen=True)
class Stages:
    """The stages of a model; ``rank_of`` is along the pipeline axis, ``flops`` are fractions."""

    cuts: tuple[Any, ...]
    rank_of: tuple[int, ...]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]
    # The stages that use a weight, in ascending order; a framework chooses the keys.
    of_weight: Mapping[Any, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.rank_of)

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a rank of the pipeline axis holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def holders(self, weight: Hashable) -> list[int]:
        """The ranks of the pipeline axis that hold a weight, in ascending order."""
        return sorted({self.rank_of[stage] for stage in self.of_weight[weight]})

    def described(self) -> str:
        """A line for each stage, for the log."""
        lines = []
        for stage, rank in enumerate(self.rank_of):
            where = "" if rank == stage else f" (rank {rank} of the pipeline)"
            cut = f"; cut after {self.cuts[stage]}" if stage < len(self.cuts) else ""
            lines.append(
                f"stage {stage}{where}: {self.flops[stage]:.0%} of the FLOPs, "
                f"{megabytes(self.nbytes[stage])} MB of weights{cut}"
            )
        return "\n    ".join(lines)


def megabytes(nbytes: int) -> str:
    """Bytes as a number of 10^6 bytes, in three digits: ``0.412``, ``41.2``; from 100 on whole."""
    number = nbytes / 1e6
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def require_places(
    balance: str, stages: int, places: Sequence[CutPoint], part: str, condition: str
) -> None:
    """Raise unless a model can be cut into so many stages; two arguments are for the errors."""
    if balance not in BALANCES:
        raise ValueError(
            f"stages must be {' or '.join(map(repr, BALANCES))}, or a list of the {part}s after "
            f"which to cut, got {balance!r}"
        )
    if len(places) < stages - 1:
        names = ", ".join(place.name for place in places) or f"no {part} at all"
        raise ValueError(
            f"a pipeline of {stages} stages needs {stages - 1} places to cut the model, but there "
            f"are {len(places)}: after {names}. A model can be cut {condition}"
        )


def named_cuts(
    names: Sequence[str], places: Sequence[P], stages: int, reasons: str = ""
) -> list[P]:
    """The cut points with these names; ``reasons`` says why the model cannot be cut elsewhere."""
    by_name = {place.name: place for place in places}
    for name in names:
        if name not in by_name:
            raise ValueError(
                f"stages={list(names)}: the model cannot be cut after {name!r}, only after "
                f"{', '.join(by_name) or 'no layer at all'}{reasons}"
            )
    if len(set(names)) != stages - 1:
        raise ValueError(
            f"stages={list(names)} names {len(set(names))} cuts, but a pipeline of {stages} stages "
            f"has {stages - 1}"
        )
    return sorted((by_name[name] for name in set(names)), key=lambda place: place.time)


def balanced_cuts(
    stages: int, places: Sequence[P], cost: Callable[[int, int], float]
) -> tuple[list[P], float]:
    """The cuts that make the largest stage smallest, by dynamic programming, and its fraction.

    Equally good cuts send the fewest bytes between stages. ``cost`` is that of a stage between two
    places: 0 is the beginning of the model, 1 the first place, and so on to the model's end.
    """
    last = len(places) + 1
    costs = {(i, j): cost(i, j) for j in range(1, last + 1) for i in range(j)}
    crossing = [0, *(place.nbytes for place in places), 0]
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(stages):
        best = {
            j: min(
                (max(worst, costs[i, j]), sent + crossing[j], (*chosen, j))
                for i, (worst, sent, chosen) in best.items()
                if i < j
            )
            for j in range(1, last + 1)
            if any(i < j for i in best)
        }
    largest, _, chosen = best[last]
    return [places[j - 1] for j in chosen[:-1]], largest / max(costs[0, last], 1)


def sizes_of(samples: int, count: int) -> list[int]:
    """The numbers of samples of ``count`` micro-batches; they differ by at most one."""
    return [samples // count + (i < samples % count) for i in range(count)]


Specs = list[TensorSpec]


class StageWork(Protocol):
    """Computes this rank's stages for the micro-batches of one batch."""

    def run(
        self, stage: int, microbatch: int, specs: Specs, tensors: list[Any]
    ) -> tuple[Specs, list[Any]]:
        """Compute a stage for a micro-batch, from the outputs of the stage before."""

    def grad(self, stage: int, microbatch: int, gradients: list[Any]) -> list[Any]:
        """The gradients of the inputs with ``requires_grad``, from those of the outputs with it."""


class GPipe:
    """One batch through the pipeline.

    By micro-batch, ``keys`` is what the shapes of all outputs depend on. With None shapes are sent
    each time: then an error of one stage reaches the ranks of the others, too.
    """

    def __init__(
        self, channel: Channel, rank_of: Sequence[int], keys: Sequence[Hashable | None]
    ) -> None:
        self._channel, self._rank_of, self._keys = channel, rank_of, keys
        self._local_stages = [stage for stage, rank in enumerate(rank_of) if rank == channel.rank]
        self._last = len(rank_of) - 1
        # By stage and micro-batch, the specs of its outputs.
        self._outputs: dict[int, list[Specs]] = {}

    def forward(self, work: StageWork) -> None:
        """Run this rank's stages for all micro-batches."""
        # Outputs of a stage for the next one on the same rank.
        local: deque[tuple[Specs, list[Any]]] = deque()
        for stage in self._local_stages:
            outputs = self._outputs[stage] = []
            if stage == 0:
                inputs: Iterable[tuple[Specs, list[Any]]] = repeat(([], []))
            elif self._is_here(stage - 1):
                inputs = iter(local.popleft, None)
            else:
                inputs = self._inputs_from_before(stage)
            try:
                for microbatch, (specs, tensors) in zip(
                    range(len(self._keys)), inputs, strict=False
                ):
                    with self._channel.times.computing("forward", microbatch, stage):
                        specs, tensors = work.run(stage, microbatch, specs, tensors)
                    outputs.append(specs)
                    if self._is_here(stage + 1):
                        local.append((specs, self._channel.detached(tensors)))
                    elif stage < self._last:
                        key = self._key(stage + 1, microbatch)
                        self._channel.send(tensors, self._rank_of[stage + 1], specs, key)
            except RankLostError:
                raise
            except Exception as error:
                if None in self._keys:
                    self._report(error, inputs)
                raise
        self._channel.flush()

    def _is_here(self, stage: int) -> bool:
        return stage in self._local_stages

    def _key(self, stage: int, microbatch: int) -> Hashable | None:
        key = self._keys[microbatch]
        return None if key is None else (stage, key)

    def _inputs_from_before(self, stage: int) -> Iterator[tuple[Specs, list[Any]]]:
        """The inputs of a stage, one after the other, while later ones are received."""
        source = self._rank_of[stage - 1]
        keys = deque(self._key(stage, microbatch) for microbatch in range(len(self._keys)))
        started: deque[tuple[Specs, Callable[[], list[Any]]]] = deque()
        while keys or started:
            # New shapes come in a message of their own: wait for it only when its turn has come.
            while keys and (not started or self._channel.knows(source, keys[0])):
                started.append(self._channel.receive(source, keys.popleft()))
            specs, wait = started.popleft()
            yield specs, wait()

    def _report(self, error: Exception, inputs: Iterable[Any]) -> None:
        """Let the other ranks raise an error that this rank's stage has raised."""
        channel, text, last = self._channel, str(error), self._rank_of[self._last]
        if not isinstance(error, HvkitError):
            rank = channel.ranks[channel.rank]
            text = f"rank {rank} has raised {type(error).__name__} in its stage: {text}"
        to = range(last) if channel.rank == last else [channel.rank + 1]
        for each in to:
            channel.send_error(text, each)
        if isinstance(inputs, Generator):  # the stage before goes on sending
            with suppress(HvkitError):
                deque(inputs, maxlen=0)
        channel.flush()
        if channel.rank != last:  # the last rank answers with this error instead of outputs
            with suppress(HvkitError):
                channel.receive(last)

    def require_first_backward(self) -> None:
        if not self._outputs:
            raise RuntimeError(
                "gradients a second time through one forward pass of a pipeline, whose stages drop "
                "what they have computed after the first time, also with retain_graph=True: add "
                "the losses, and call backward(), or take the gradient once"
            )

    def backward(self, work: StageWork, of_outputs: Sequence[Sequence[Any]]) -> None:
        """Run this rank's stages backward, from the gradients of the last stage's outputs."""
        # Gradients of a stage's inputs for the stage before on the same rank.
        local: deque[list[Any]] = deque()
        for stage in reversed(self._local_stages):
            outputs = self._outputs.pop(stage)
            gradients = self._returning(stage, outputs, of_outputs, local)
            for microbatch, each in zip(range(len(outputs)), gradients, strict=False):
                with self._channel.times.computing("backward", microbatch, stage):
                    back = work.grad(stage, microbatch, each)
                if self._is_here(stage - 1):
                    local.append(back)
                elif stage:
                    self._channel.send_known(back, self._rank_of[stage - 1])
        self._channel.flush()

    def _returning(
        self,
        stage: int,
        outputs: Sequence[Specs],
        of_outputs: Sequence[Sequence[Any]],
        local: deque[list[Any]],
    ) -> Iterable[list[Any]]:
        """The gradients of a stage's outputs, one micro-batch after the other."""
        if stage == self._last:
            pairs = zip(outputs, of_outputs, strict=True)
            return [_with_gradient(specs, row) for specs, row in pairs]
        if self._is_here(stage + 1):
            return iter(local.popleft, None)
        source = self._rank_of[stage + 1]
        specs = [_with_gradient(each, each) for each in outputs]
        waits = [self._channel.receive_known(each, source) for each in specs]
        return (wait() for wait in waits)


def _with_gradient(specs: Specs, items: Sequence[Any]) -> list[Any]:
    """The items of those tensors that get a gradient."""
    pairs = zip(specs, items, strict=False)  # the masks of a model get none
    return [item for spec, item in pairs if spec.requires_grad]
