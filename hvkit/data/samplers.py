"""The order of an epoch's samples, from a DataLoader's sampler, and one rank's part of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
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

from hvkit.communication.collectives import raise_together, require_equal
from hvkit.data.order import FixedRandomness, Position, Share, seed_from, steps
from hvkit.data.pytorch_datasets import in_whole

# A rank draws the order of a whole epoch, 8 bytes a sample and more.
_LONGEST = 2**30


def order_of(loader: DataLoader[Any], share: Share, seed: int) -> Order:
    """The order in which this loader reads.

    Raises:
        TypeError: the loader's sampler has no length.
        ValueError: its epoch is too long for an order in memory.
    """
    batches = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        # Without automatic batching, a sampler may pass whole lists of indices to the dataset.
        batches = loader.sampler
    if batches is None:
        return SampleOrder(loader.sampler, share, seed, batch=1, drop_last=False)
    if type(batches) is BatchSampler and loader.batch_sampler is not None:
        return SampleOrder(batches.sampler, share, seed, batches.batch_size, batches.drop_last)
    return BatchOrder(batches, share, seed)


class Epoch(NamedTuple):
    """One rank's reading list for an epoch, or for the rest of one.

    Attributes:
        number: the epoch's number.
        mine: this rank's indices, or lists of them for whole batches.
        steps: for each step, the number of samples on all ranks together.
    """

    number: int
    mine: list[Any]
    steps: list[int]


class Order(Sampler[Any], ABC):
    """A sampler of one rank's indices, epoch after epoch.

    Its own loader begins an epoch with ``begin`` and iterates over it inside ``fixed_to``.
    In any other loader, each iteration is the next epoch and moves the position at its end.

    Args:
        source: the user's sampler or batch sampler.
        share: rank and size.
        seed: the seed of an epoch's random numbers, together with the epoch's number.
    """

    def __init__(self, source: Any, share: Share, seed: int) -> None:
        self._source, self._share, self._seed = source, share, seed
        self._fixed: Epoch | None = None
        self.position = Position()
        self.of_part = False
        """Whether the loader's dataset is a ``DatasetPart``."""
        if not hasattr(source, "__len__"):
            raise TypeError(
                f"{type(source).__qualname__} has no __len__, so its order cannot be divided into "
                "equal parts: add __len__"
            )
        if (length := len(source)) > _LONGEST:
            raise ValueError(
                f"an epoch of {type(source).__qualname__} has {length} {_unit(source)}, and "
                f"hvkit.shard keeps the order of at most {_LONGEST} in memory: set a smaller "
                "num_samples, and loop over as many epochs as needed"
            )

    def begin(self) -> tuple[object, Epoch]:
        """Begin an epoch: the position's identifier for it, and this rank's reading list.

        A collective in training, if the sampler is not one of PyTorch's own.
        """
        iteration = self.position.begin()
        number = 0 if self._share.exact else self.position.epoch
        return iteration, Epoch(number, *self.rest_of(number, self.position.samples))

    @abstractmethod
    def rest_of(self, epoch: int, done: int) -> tuple[list[Any], list[int]]:
        """This rank's indices and the steps after the first ``done`` samples of an epoch."""

    @contextmanager
    def fixed_to(self, epoch: Epoch) -> Iterator[None]:
        """Inside it, each iteration reads this epoch."""
        self._fixed = epoch
        try:
            yield
        finally:
            self._fixed = None

    def __iter__(self) -> Iterator[Any]:
        mine = self._next() if self._fixed is None else iter(self._fixed.mine)
        return map(self._mark, mine) if self.of_part else mine

    def _next(self) -> Iterator[Any]:
        iteration, epoch = self.begin()
        try:
            yield from epoch.mine
        except GeneratorExit:
            self.position.leave(iteration)
            raise
        self.position.end(iteration)

    def _mark(self, key: Any) -> Any:
        """Mark the key as an index, or indices, in the whole dataset."""
        return in_whole(key)

    def facts(self) -> list[str]:
        """The facts that must be equal on all ranks."""
        kind, unit = type(self._source).__qualname__, _unit(self._source)
        return [f"DataLoader with a {kind} of {len(self._source)} {unit}"]

    def _whole_order(self, epoch: int) -> list[Any]:
        """The source's whole epoch, drawn with the same random numbers on every rank."""
        problem: Exception | None = None
        order: list[Any] = []
        try:
            order = _draw(self._source, epoch, seed_from(self._seed, epoch))
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
            f"order of {kind} in epoch {epoch}",
            [f"{len(order)} {_unit(self._source)} that begin with {str(order[:4])[:100]}", digest],
            "use a fixed seed for the sampler's random numbers, or draw them from torch's, numpy's "
            "or Python's global generator, which hvkit.shard seeds alike on every rank",
            "the loop over a sharded DataLoader",
        )
        return order


class SampleOrder(Order):
    """An order of single samples, which the loader batches.

    Args:
        source: a sampler.
        share: rank and size.
        seed: the seed of the order.
        batch: the batch size of one rank.
        drop_last: leave out an incomplete last step.
    """

    def __init__(self, source: Any, share: Share, seed: int, batch: int, drop_last: bool) -> None:
        super().__init__(source, share, seed)
        # In exact parts the last batch of some ranks is smaller and must be kept.
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
            return self._whole_order(epoch)
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
    """An order of whole batches, from a batch sampler.

    Step k has the N batches from k*N on. If they have one size, each rank takes one; otherwise
    their samples are divided evenly.
    """

    def rest_of(self, epoch: int, done: int) -> tuple[list[Any], list[int]]:
        return self._divided(list(_after(self._batches(epoch), done)))

    def _mark(self, key: Any) -> Any:
        return [in_whole(index) for index in key]

    def _batches(self, epoch: int) -> list[list[Any]]:
        return [list(batch) for batch in self._whole_order(epoch)]

    def _divided(self, batches: list[list[Any]]) -> tuple[list[list[Any]], list[int]]:
        """This rank's batches, and for each step the number of samples on all ranks."""
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
        if self._share.exact:  # some ranks may have no part of the last batches
            return len(self._divided(self._batches(0))[0])
        return -(-len(self._source) // self._share.size)


def _part(group: list[list[Any]], share: Share, seen: int) -> list[Any]:
    """One rank's samples of the batches of a step, which follows ``seen`` samples."""
    samples = [index for batch in group for index in batch]
    if share.exact:
        return samples[(share.rank - seen) % share.size :: share.size]
    if len(group) == share.size and len(set(map(len, group))) == 1:
        return group[share.rank]
    return [samples[position] for position in share.of(len(samples))]


def _after(batches: list[list[Any]], done: int) -> Iterator[list[Any]]:
    """The batches, without their first ``done`` samples."""
    for batch in batches:
        if done < len(batch):
            yield batch[done:]
        done = max(0, done - len(batch))


def _draw(source: Any, epoch: int, seed: int) -> list[Any]:
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
