"""Reads one rank's part of an epoch, step by step, from a DataLoader's sampler or batch sampler.

Every rank runs the user's sampler, and keeps its part of each step. A step is read when its batch
is needed, so a sampler may be long, or have no end and no length.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from hvkit.communication.collectives import from_rank, gather, raise_together, require_equal
from hvkit.data.pytorch_datasets import in_full
from hvkit.data.rank_samples import Position, Split, seed_from
from hvkit.data.sampler_properties import (
    drawn_workers_seed,
    draws_at_end,
    draws_at_once,
    full_order,
    length_of,
    loader_batching,
    needs_comparison,
    only_reads_a_list,
    reads_each_once,
)
from hvkit.random_states import (
    FixedRandomness,
    Generators,
    as_text,
    begins_an_epoch,
    from_text,
    states_of_data,
)

_LOOP = "the loop over a sharded DataLoader"
_END = -1  # The key for the comparison at the end of an epoch.


@dataclass
class SampledEpoch:
    """One rank's iteration over an epoch, or the rest of one."""

    number: int
    randomness: AbstractContextManager[None]
    """The context in which the sampler draws."""
    workers_seed: int = 0
    """A seed from which the seeds of a loader's workers are computed."""
    steps: deque[int] = field(default_factory=deque)
    """For each step that was read and not yet delivered, the samples on all ranks together."""
    keys: Iterator[Any] | None = None
    """The indices that this rank reads, once that has begun."""
    digests: dict[int, list[str]] = field(default_factory=dict)
    """By step: facts about what the sampler has returned so far, which ranks then compare."""


class RankSampler(Sampler[Any]):
    """A sampler of one rank's indices, epoch after epoch.

    Its own loader begins an epoch with ``begin`` and iterates over it inside ``fixed_to``.
    In any other loader, each iteration is the next epoch and moves the position at its end.
    Other attributes are read and set on the user's sampler or batch sampler.

    Without a seed, one process draws the same numbers as without hvkit, and N ranks draw rank 0's.
    With one, the seed and the number of an epoch determine its random numbers.
    """

    def __init__(self, loader: DataLoader[Any], split: Split, seed: int | None) -> None:
        self._batching, self._split, self._seed = loader_batching(loader), split, seed
        self.batched = self._batching.batched
        batches = loader.batch_sampler if loader.batch_size is None else None
        of_user: Any = loader.sampler if batches is None else batches
        several = (of_user, self._batching.source, getattr(of_user, "sampler", None))
        self._samplers = list({id(each): each for each in several if each is not None}.values())
        self._loaders_generator = loader.generator
        self._persistent = loader.persistent_workers
        own = (loader.generator, *(getattr(each, "generator", None) for each in self._samplers))
        self._generators = Generators(each for each in own if isinstance(each, torch.Generator))
        self.as_without_hvkit = split.size == 1 and seed is None
        """Whether this is one process that draws the user's own random numbers."""
        # In exact parts the last batch of some ranks is smaller and must be kept.
        all_kept = split.exact and not self.as_without_hvkit
        self.drop_last = self._batching.drop_last and not all_kept
        compared = needs_comparison(self._batching.source, exact=split.exact)
        self._compared = split.size > 1 and compared
        self._fixed: SampledEpoch | None = None
        self.position = Position()
        self.of_part = False
        """Whether the loader's dataset is a ``DatasetPart``."""
        self._of_user = of_user  # at the end: from here on it gets what is set

    @property
    def draws_workers_seed(self) -> bool:
        """Whether PyTorch draws a number for workers in this epoch, in a run that never stops."""
        return not (self._persistent and self.position.epoch)

    def begin(self) -> tuple[object, SampledEpoch]:
        """Begin an epoch; return the position's identifier for it, and the iteration.

        In training a collective, unless the order needs no random numbers. In evaluation a
        collective only with a sampler of the user's own.
        """
        iteration = self.position.begin()
        number = 0 if self._split.exact else self.position.epoch
        epoch = SampledEpoch(number, self._randomness(number))
        if self._seed is not None:
            epoch.workers_seed = seed_from(self._seed, number)
            for sampler in self._samplers:
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(number)
        if not self.as_without_hvkit:
            self._read_first_step(epoch)
        return iteration, epoch

    def _randomness(self, number: int) -> AbstractContextManager[None]:
        position, exact = self.position, self._split.exact
        if begins_an_epoch(position.random):  # the run has resumed in the middle of an epoch
            return FixedRandomness(from_text(position.random), self._generators)
        # In evaluation ranks exchange no states, so that a single one may evaluate.
        by_code = exact and not self.as_without_hvkit and not reads_each_once(self._batching.source)
        if self._seed is not None or position.samples or by_code:
            return FixedRandomness(seed_from(self._seed or 0, number), self._generators)
        states = self._generators.states()
        position.random = as_text(states)
        if self._split.size == 1 or exact or type(self._batching.source) is SequentialSampler:
            return nullcontext()
        if not self.require_same_position(0, str(position.random)):
            position.random = from_rank(0, position.random)
            states = from_text(position.random)
        return FixedRandomness(states, self._generators)

    def _read_first_step(self, epoch: SampledEpoch) -> None:
        problem: Exception | None = None
        keys, first = iter(()), []
        try:
            with epoch.randomness:
                keys = self._keys_of_rank(epoch)
                if self._seed is None:
                    drawn = self.draws_workers_seed
                    seed = drawn_workers_seed(self._loaders_generator) if drawn else epoch.number
                    epoch.workers_seed = seed
                first = list(islice(keys, 1))
        except Exception as error:
            problem = error
        if self._compared:
            raise_together(problem, _LOOP)
            self.compare(epoch, 1 if first else _END)
        elif problem is not None:
            raise problem
        epoch.keys = chain(first, keys)

    def require_same_position(self, begun_after: int, random: str = "") -> bool:
        """Raise on every rank unless all are in the same epoch; a collective.

        This iteration began after so many samples of the epoch. Returns whether ``random``, the
        states of the generators, is equal on all ranks.
        """
        begun = f"epoch {self.position.epoch}, begun after {begun_after} samples"
        digest = hashlib.sha256(random.encode()).hexdigest()
        by_rank: list[Any] = gather(_LOOP, [begun, digest])
        if len({begun for begun, _ in by_rank}) > 1:
            require_equal(
                "epoch of a sharded DataLoader",
                [begun],
                "iterate over it equally often on every rank, and inspect samples in the original "
                "DataLoader",
                _LOOP,
            )
        return len({digest for _, digest in by_rank}) == 1

    def compare(self, epoch: SampledEpoch, steps: int = _END) -> None:
        """Raise on every rank if the ranks' samplers have returned different indices.

        A collective after 1, 2, 4, 8, ... steps and at the epoch's end; does nothing otherwise.
        """
        if (facts := epoch.digests.pop(steps, None)) is None:
            return
        kind = type(self._batching.source).__qualname__
        require_equal(
            f"order of {kind} in epoch {epoch.number}",
            facts,
            "use a fixed seed for the sampler's random numbers, or draw them from torch's, numpy's "
            "or Python's global generator, whose state hvkit.shard takes from rank 0",
            _LOOP,
        )

    @contextmanager
    def fixed_to(self, epoch: SampledEpoch) -> Iterator[None]:
        """Within: each iteration over this sampler reads this epoch."""
        self._fixed = epoch
        try:
            yield
        finally:
            self._fixed = None

    def __iter__(self) -> Iterator[Any]:
        keys = self._next() if self._fixed is None else self._keys_of_rank(self._fixed)
        return map(self._mark, keys) if self.of_part else keys

    def _next(self) -> Iterator[Any]:
        iteration, epoch = self.begin()
        with self.position.reading(iteration):
            yield from self._keys_of_rank(epoch)

    def _mark(self, key: Any) -> Any:
        return [in_full(index) for index in key] if self.batched else in_full(key)

    def _keys_of_rank(self, epoch: SampledEpoch) -> Iterator[Any]:
        """The indices, or lists of them, that this rank reads after the samples that are done."""
        if epoch.keys is not None:  # ``begin`` has read the first step
            return epoch.keys
        # In one process the sampler's iteration begins here, exactly when PyTorch begins it.
        with epoch.randomness:
            source = None if self._batching.lazy else iter(self._batching.source)
        return self._keys(epoch, self._steps(epoch, source, self.position.samples))

    def _keys(self, epoch: SampledEpoch, steps: Iterator[Sequence[Any]]) -> Iterator[Any]:
        digest, number, seen, ended = hashlib.sha256(), 0, 0, False
        epoch.steps.clear()
        for step in steps:
            samples = len(step) if self._batching.samples else sum(map(len, step))
            number, seen = number + 1, seen + samples
            own = self._part(step)
            # Ranks without a part of the last step compare it at their end, the others before they
            # deliver it, since a loop may end there.
            ended = self._split.exact and len(step) < self._split.size
            if self._compared:
                digest.update(str(step).encode())
                if ended or number.bit_count() == 1:
                    begin = f"{seen} samples, the last step's begin with {str(step)[:100]}"
                    epoch.digests[number if own else _END] = [begin, digest.hexdigest()]
            if own:
                epoch.steps.append(samples)
                yield from own
        if self._compared and not ended:
            epoch.digests[_END] = [f"{seen} samples in all", digest.hexdigest()]

    def _steps(
        self, epoch: SampledEpoch, source: Iterator[Any] | None, done: int
    ) -> Iterator[Sequence[Any]]:
        """The samples of each step on all ranks together, or the batches if they stay whole."""
        group = self._split.size * (self._batching.samples or 1)
        order = None
        if not self.as_without_hvkit:
            with epoch.randomness:
                order = full_order(self._batching.source, original=self._split.exact)
        steps: Iterator[Sequence[Any]]
        if order is not None:
            steps = (order[start : start + group] for start in range(done, len(order), group))
        else:
            steps = self._drawn(epoch, source, done, group)
        for step in steps:
            if len(step) == group or not self.drop_last:
                yield step
        if order is not None and draws_at_end(self._batching.source):
            with epoch.randomness:
                full_order(self._batching.source)

    def _drawn(
        self, epoch: SampledEpoch, source: Iterator[Any] | None, done: int, group: int
    ) -> Iterator[list[Any]]:
        """The steps as the sampler's code returns them, drawing the epoch's random numbers."""
        batching, randomness = self._batching, epoch.randomness
        with randomness:
            items = read = iter(batching.source) if source is None else source
            if batching.samples is None:
                # In one process the dataset gets exactly what the user's sampler returns; several
                # ranks need lists to compare.
                items = _after(map(_sized if self.as_without_hvkit else list, read), done)
            else:
                deque(islice(items, done), maxlen=0)
        while True:
            # Entering the epoch's randomness takes longer than reading a step from a list.
            with nullcontext() if only_reads_a_list(read, group) else randomness:
                step = list(islice(items, group))
            if not step:
                return
            yield step
            if draws_at_once(batching.source):
                randomness = nullcontext()

    def _part(self, step: Sequence[Any]) -> list[Any]:
        """This rank's part of a step: samples, or at most one batch."""
        split, length = self._split, len(step)
        if self._batching.samples is None:
            if split.exact:
                return list(step[split.rank : split.rank + 1])
            return [step[split.rank % length]]
        positions = split.of(length)
        part = step[positions] if isinstance(positions, slice) else [step[p] for p in positions]
        own = np.asarray(part).tolist() if isinstance(step, np.ndarray) else list(part)
        return [own] if self.batched and own else own

    def __len__(self) -> int:
        if self.as_without_hvkit:
            return len(self._of_user)
        length, split, samples = len(self._batching.source), self._split, self._batching.samples
        if samples is None:
            return split.count(length)
        own = split.count(length, group=samples * split.size, drop_last=self.drop_last)
        return -(-own // samples) if self.batched else own

    @property
    def samples_in_batch(self) -> int | None:
        """A rank's samples in a step; None if the position counts whole batches."""
        return self._batching.samples

    def steps_after(self, done: int) -> int | None:
        """How many steps follow the first ``done`` samples of an epoch; None if that is unknown."""
        length, samples = length_of(self._batching.source), self._batching.samples
        if length is None or (samples is None and done):
            return None
        if samples is None:
            return self._split.count(length)
        group, rest = samples * self._split.size, max(0, length - done)
        return rest // group if self.drop_last else -(-rest // group)

    def facts(self) -> list[str]:
        source, unit = self._batching.source, "samples" if self._batching.samples else "batches"
        length = length_of(source)
        text = "unknown length" if length is None else f"{length} {unit}"
        return [f"DataLoader with a {type(source).__qualname__} of {text}"]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of the generators that the order of samples needs."""
        state = self.position.save()
        if self._seed is None and "random" not in state and self._generators.own:
            states = self._generators.states()
            state["random"] = as_text({name: states[name] for name in self._generators.own})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load(state)
        self._generators.set(states_of_data(self.position.random))
        if not begins_an_epoch(self.position.random):
            self.position.random = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is being unpickled, or copied
            raise AttributeError(name)
        return getattr(self._of_user, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "of_part" or "_of_user" not in vars(self):
            super().__setattr__(name, value)
            return
        batched_by_pytorch = self._of_user is not self._batching.source
        if batched_by_pytorch and name in ("batch_size", "drop_last", "sampler"):
            raise ValueError(
                f"{name} of {type(self._of_user).__qualname__} cannot change after hvkit.shard, "
                f"which has read it; got {value!r}: set it before"
            )
        setattr(self._of_user, name, value)


def _after(batches: Iterator[list[Any]], done: int) -> Iterator[list[Any]]:
    for batch in batches:
        if done < len(batch) or not done:
            yield batch[done:] if done else batch
        done = max(0, done - len(batch))


def _sized(batch: Any) -> Any:
    return list(batch) if length_of(batch) is None else batch
