"""The order of an epoch's samples in a DataLoader, and one rank's part of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from hvkit.collectives import raise_together, require_equal
from hvkit.data.dataset import in_whole
from hvkit.data.order import Share, seed_from, steps
from hvkit.data.position import Position
from hvkit.data.randomness import FixedRandomness


def order_of(loader: DataLoader[Any], share: Share, seed: int) -> Order:
    """The order in which this loader reads.

    Raises:
        TypeError: its sampler has no length.
    """
    batches = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        # Without automatic batching, a sampler may give the dataset whole lists of indices.
        batches = loader.sampler
    if batches is None:
        return SampleOrder(loader.sampler, share, seed, batch=1, drop_last=False)
    if type(batches) is BatchSampler and loader.batch_sampler is not None:
        return SampleOrder(batches.sampler, share, seed, batches.batch_size, batches.drop_last)
    return BatchOrder(batches, share, seed)


class Epoch(NamedTuple):
    """What one rank reads of an epoch, from where it is begun.

    Attributes:
        number: of the epoch.
        mine: this rank's indices, or lists of them for whole batches.
        steps: the samples of each step on all ranks together.
    """

    number: int
    mine: list[Any]
    steps: list[int]


class Order(Sampler[Any], ABC):
    """What one rank reads, epoch after epoch.

    Its loader takes an epoch by :meth:`begin` and has it given out by :meth:`giving`. To any other
    loader every iteration gives the epoch that is next, and moves the position at its end.

    Args:
        source: the user's sampler or batch sampler.
        share: rank and size.
        seed: what the random numbers of an epoch start from, together with its number.
    """

    def __init__(self, source: Any, share: Share, seed: int) -> None:
        self._source, self._share, self._seed = source, share, seed
        self._given: Epoch | None = None
        self.position = Position()
        self.of_part = False
        """Whether the loader's dataset is a :class:`DatasetPart`."""
        if not hasattr(source, "__len__"):
            raise TypeError(
                f"{type(source).__qualname__} has no __len__, so that no equal parts can be made "
                "of its order: give it one"
            )

    def begin(self) -> tuple[object, Epoch]:
        """The iteration that the position now counts, and what this rank reads in it.

        In training a collective, if the order comes from a sampler that is not PyTorch's own.
        """
        iteration = self.position.begin()
        number = 0 if self._share.exact else self.position.epoch
        return iteration, Epoch(number, *self.rest_of(number, self.position.samples))

    @abstractmethod
    def rest_of(self, epoch: int, done: int) -> tuple[list[Any], list[int]]:
        """What is after the first ``done`` samples of an epoch: see :class:`Epoch`."""

    @contextmanager
    def giving(self, epoch: Epoch) -> Iterator[None]:
        """Within it, an iteration gives this epoch."""
        self._given = epoch
        try:
            yield
        finally:
            self._given = None

    def __iter__(self) -> Iterator[Any]:
        mine = self._next() if self._given is None else iter(self._given.mine)
        return map(self._of_whole, mine) if self.of_part else mine

    def _next(self) -> Iterator[Any]:
        iteration, epoch = self.begin()
        try:
            yield from epoch.mine
        except GeneratorExit:
            self.position.leave(iteration)
            raise
        self.position.end(iteration)

    def _of_whole(self, key: Any) -> Any:
        return in_whole(key)

    def facts(self) -> list[str]:
        """What the ranks have to have alike."""
        kind, unit = type(self._source).__qualname__, _unit(self._source)
        return [f"DataLoader with a {kind} of {len(self._source)} {unit}"]

    def _run(self, epoch: int, *draw: Callable[[], Iterable[Any]]) -> list[Any]:
        """The source's whole epoch, with the same random numbers on every rank."""
        problem: Exception | None = None
        order: list[Any] = []
        try:
            order = _drawn(self._source, epoch, seed_from(self._seed, epoch))
        except Exception as error:
            problem = error
        if self._share.exact or self._share.size == 1:
            if problem is not None:
                raise problem
            return order
        raise_together(problem, "the loop over a sharded DataLoader")
        text = "\n".join(map(str, order))
        digest = hashlib.sha256(text.encode()).hexdigest()
        kind = type(self._source).__qualname__
        require_equal(
            f"order that {kind} gave for epoch {epoch}",
            [f"{len(order)} {_unit(self._source)} that begin with {str(order[:4])[:100]}", digest],
            "give the sampler's random numbers a fixed seed, or draw them from torch's, numpy's "
            "or Python's global generator, which hvkit.shard seeds alike on every rank",
            "the loop over a sharded DataLoader",
        )
        return order


class SampleOrder(Order):
    """An order of single samples, batched later.

    Args:
        source: a sampler.
        share: rank and size.
        seed: of the order.
        batch: batch size of one rank.
        drop_last: leave out the last step if it is not complete.
    """

    def __init__(self, source: Any, share: Share, seed: int, batch: int, drop_last: bool) -> None:
        super().__init__(source, share, seed)
        # In exact parts the last batch of some ranks is smaller, and has to be kept.
        self.batch, self.drop_last = batch, drop_last and not share.exact

    def rest_of(self, epoch: int, done: int) -> tuple[list[Any], list[int]]:
        order = self._order(epoch)
        group, rest = self.batch * self._share.size, max(0, len(order) - done)
        mine = done + self._share.of(rest, group=group, drop_last=self.drop_last)
        if isinstance(order, list):
            indices = [order[position] for position in mine]
        else:
            indices = np.asarray(order)[mine].tolist()
        return indices, list(steps(rest, group, drop_last=self.drop_last))

    def _order(self, epoch: int) -> list[Any] | range | np.ndarray[Any, Any]:
        kind, source = type(self._source), self._source
        if kind is SequentialSampler:
            return np.arange(len(source))
        if kind is not RandomSampler:
            return self._run(epoch)
        whole = not source.replacement and source._num_samples in (None, len(source.data_source))
        if whole and self._share.exact:
            return np.arange(len(source))
        generator = torch.Generator().manual_seed(seed_from(self._seed, epoch))
        if whole:
            return torch.randperm(len(source), generator=generator).numpy()
        again = RandomSampler(source.data_source, source.replacement, len(source), generator)
        return list(again)

    def __len__(self) -> int:
        group = self.batch * self._share.size
        return self._share.count(len(self._source), group=group, drop_last=self.drop_last)


class BatchOrder(Order):
    """An order of whole batches, as a batch sampler gives it.

    Step k is made of the N batches from k*N on. If they have one size, each rank takes one;
    otherwise their samples are divided evenly.
    """

    def rest_of(self, epoch: int, done: int) -> tuple[list[Any], list[int]]:
        return self._divided(list(_after(self._batches(epoch), done)))

    def _of_whole(self, key: Any) -> Any:
        return [in_whole(index) for index in key]

    def _batches(self, epoch: int) -> list[list[Any]]:
        return [list(batch) for batch in self._run(epoch)]

    def _divided(self, batches: list[list[Any]]) -> tuple[list[list[Any]], list[int]]:
        """This rank's batches, and of each step the number of samples on all ranks."""
        parts: list[list[Any]] = []
        samples: list[int] = []
        seen = 0
        for start in range(0, len(batches), self._share.size):
            group = batches[start : start + self._share.size]
            length = sum(map(len, group))
            if part := _part(group, self._share, seen):
                parts.append(part)
                samples.append(length)
            seen += length
        return parts, samples

    def __len__(self) -> int:
        if self._share.exact:  # some ranks may have nothing of the last batches
            return len(self._divided(self._batches(0))[0])
        return -(-len(self._source) // self._share.size)


def _part(group: list[list[Any]], share: Share, seen: int) -> list[Any]:
    """One rank's samples of some batches that come after ``seen`` samples."""
    samples = [index for batch in group for index in batch]
    if share.exact:
        return samples[(share.rank - seen) % share.size :: share.size]
    if len(group) == share.size and len(set(map(len, group))) == 1:
        return group[share.rank]
    return [samples[position] for position in share.of(len(samples))]


def _after(batches: list[list[Any]], done: int) -> Iterator[list[Any]]:
    """The batches without their first ``done`` samples."""
    for batch in batches:
        if done < len(batch):
            yield batch[done:]
        done = max(0, done - len(batch))


def _drawn(source: Any, epoch: int, seed: int) -> list[Any]:
    inner = getattr(source, "sampler", None)
    for sampler in (source, inner):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
    generators = [getattr(sampler, "generator", None) for sampler in (source, inner)]
    own = [each for each in generators if isinstance(each, torch.Generator)]
    before = [generator.get_state() for generator in own]
    try:
        for generator in own:
            generator.manual_seed(seed)
        with FixedRandomness(seed):
            return list(source)
    finally:
        for generator, state in zip(own, before, strict=True):
            generator.set_state(state)


def _unit(source: Any) -> str:
    return "batches" if hasattr(source, "batch_size") else "samples"
