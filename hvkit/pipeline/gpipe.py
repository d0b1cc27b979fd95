"""GPipe's order of work: all micro-batches forward through all stages, and later all backward.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2019).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, Protocol

from hvkit.errors import HvkitError, RankLostError
from hvkit.pipeline.channel import Channel, TensorSpec

Specs = list[TensorSpec]


class StageWork(Protocol):
    """Computes this rank's stages for the micro-batches of a batch."""

    def run(
        self, stage: int, part: int, specs: Specs, tensors: list[Any]
    ) -> tuple[Specs, list[Any]]:
        """What a stage gives for a micro-batch.

        Args:
            stage: its number in the model.
            part: the micro-batch's number in the batch.
            specs, tensors: what the stage before has given; none for the first stage.
        """

    def grad(self, stage: int, part: int, gradients: list[Any]) -> list[Any]:
        """The gradients of those tensors that the stage was given whose spec is ``trained``.

        Args:
            stage, part: as in ``run``, of which no more is needed afterwards.
            gradients: of those that it has given.
        """


class GPipe:
    """One batch through the pipeline.

    Args:
        channel: to the other ranks.
        rank_of: by stage, the rank along the pipeline that holds it.
        keys: by micro-batch, what the shapes depend on that stages give. None if these are sent
            each time: then an error of one stage reaches the ranks of the others, too.
    """

    def __init__(
        self, channel: Channel, rank_of: Sequence[int], keys: Sequence[Hashable | None]
    ) -> None:
        self._channel, self._rank_of, self._keys = channel, rank_of, keys
        self._own = [stage for stage, rank in enumerate(rank_of) if rank == channel.rank]
        self._last = len(rank_of) - 1
        # By stage and micro-batch, what the stage has given.
        self._given: dict[int, list[Specs]] = {}

    def forward(self, work: StageWork) -> None:
        """Run this rank's stages, one after the other, for all micro-batches.

        Args:
            work: computes them. It is not kept: whoever holds it may hold this object.

        Raises:
            HvkitError: another rank could not compute its stage.
        """
        # What a stage gives to the next one on the same rank.
        handed: deque[tuple[Specs, list[Any]]] = deque()
        for stage in self._own:
            given = self._given[stage] = []
            if stage == 0:
                inputs: Iterable[tuple[Specs, list[Any]]] = repeat(([], []))
            elif self._is_own(stage - 1):
                inputs = iter(handed.popleft, None)
            else:
                inputs = self._arriving(stage)
            try:
                for part, (specs, tensors) in zip(range(len(self._keys)), inputs, strict=False):
                    with self._channel.times.computing("forward", part, stage):
                        specs, tensors = work.run(stage, part, specs, tensors)
                    given.append(specs)
                    if self._is_own(stage + 1):
                        handed.append((specs, self._channel.handed_on(tensors)))
                    elif stage < self._last:
                        key = self._key(stage + 1, part)
                        self._channel.send(tensors, self._rank_of[stage + 1], specs, key)
            except RankLostError:
                raise
            except Exception as error:
                if None in self._keys:
                    self._hand_on(error, inputs)
                raise
        self._channel.flush()

    def _is_own(self, stage: int) -> bool:
        return stage in self._own

    def _key(self, stage: int, part: int) -> Hashable | None:
        key = self._keys[part]
        return None if key is None else (stage, key)

    def _arriving(self, stage: int) -> Iterator[tuple[Specs, list[Any]]]:
        """A stage's input for each micro-batch; the next ones begin to arrive meanwhile."""
        source = self._rank_of[stage - 1]
        keys = deque(self._key(stage, part) for part in range(len(self._keys)))
        started: deque[tuple[Specs, Callable[[], list[Any]]]] = deque()
        while keys or started:
            # Shapes that are new come in a message of their own: wait for it when it is due.
            while keys and (not started or self._channel.knows(source, keys[0])):
                started.append(self._channel.receive(source, keys.popleft()))
            specs, wait = started.popleft()
            yield specs, wait()

    def _hand_on(self, error: Exception, inputs: Iterable[Any]) -> None:
        """Have the other ranks raise an error that this rank's stage has raised."""
        channel, text, last = self._channel, str(error), self._rank_of[self._last]
        if not isinstance(error, HvkitError):
            rank = channel.ranks[channel.rank]
            text = f"rank {rank} has raised {type(error).__name__} in its stage: {text}"
        to = range(last) if channel.rank == last else [channel.rank + 1]
        for each in to:
            channel.send_error(text, each)
        if isinstance(inputs, Generator):  # the stage before goes on to send
            with suppress(HvkitError):
                deque(inputs, maxlen=0)
        channel.flush()
        if channel.rank != last:  # which answers with the same, in place of outputs
            with suppress(HvkitError):
                channel.receive(last)

    def require_first_backward(self) -> None:
        """Raise if ``backward`` has run already.

        Raises:
            RuntimeError: it has.
        """
        if not self._given:
            raise RuntimeError(
                "gradients a second time through one forward pass of a pipeline, whose stages have "
                "dropped what they had kept of it, also with retain_graph=True: add the losses, "
                "and call backward(), or take the gradient once"
            )

    def backward(self, work: StageWork, of_outputs: Sequence[Sequence[Any]]) -> None:
        """Run this rank's stages backward for all micro-batches.

        Args:
            work: as in ``forward``.
            of_outputs: by micro-batch, the gradients of what the last stage has given.
        """
        # What a stage gives back to the one before on the same rank.
        handed: deque[list[Any]] = deque()
        for stage in reversed(self._own):
            given = self._given.pop(stage)
            gradients = self._returning(stage, given, of_outputs, handed)
            for part, each in zip(range(len(given)), gradients, strict=False):
                with self._channel.times.computing("backward", part, stage):
                    back = work.grad(stage, part, each)
                if self._is_own(stage - 1):
                    handed.append(back)
                elif stage:
                    self._channel.send_known(back, self._rank_of[stage - 1])
        self._channel.flush()

    def _returning(
        self,
        stage: int,
        given: Sequence[Specs],
        of_outputs: Sequence[Sequence[Any]],
        handed: deque[list[Any]],
    ) -> Iterable[list[Any]]:
        """The gradients of what a stage has given for each micro-batch."""
        if stage == self._last:
            return [_of_trained(specs, row) for specs, row in zip(given, of_outputs, strict=True)]
        if self._is_own(stage + 1):
            return iter(handed.popleft, None)
        source = self._rank_of[stage + 1]
        arriving = [self._channel.receive_known(_of_trained(each, each), source) for each in given]
        return (wait() for wait in arriving)


def _of_trained(specs: Specs, things: Sequence[Any]) -> list[Any]:
    """Those things whose tensors get a gradient."""
    pairs = zip(specs, things, strict=False)  # the model's masks get none
    return [thing for spec, thing in pairs if spec.trained]
