"""PyTorch's IterableDataset: a stream that every rank reads, keeping its part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hvkit.data.order import Share, seed_from
from hvkit.data.randomness import FixedRandomness
from hvkit.data.workers import started

_OWN = frozenset({"_inner", "_share", "_group", "_drop_last", "_seed", "_epoch"})


class StreamShard(IterableDataset[Any]):
    """One rank's samples of a stream.

    Attributes other than its own are those of the stream, so that a ``worker_init_fn`` that
    splits ``get_worker_info().dataset`` does as before.

    Args:
        inner: the stream, the same on every rank.
        share: rank and size.
        group: samples of one step on all ranks together.
        drop_last: leave out the last step if it is not complete.
        seed: what random numbers of the stream start from.
    """

    def __init__(
        self, inner: IterableDataset[Any], share: Share, *, group: int, drop_last: bool, seed: int
    ) -> None:
        self._inner, self._share, self._group = inner, share, group
        self._drop_last, self._seed, self._epoch = drop_last, seed, 0

    @property
    def exact(self) -> bool:
        """Whether it is for evaluation."""
        return self._share.exact

    def __iter__(self) -> Iterator[Any]:
        # In a worker, the seeds are the worker's, which its loader has made alike on every rank.
        alone = get_worker_info() is None
        epoch = 0 if self._share.exact else self._epoch
        fixed = FixedRandomness(seed_from(self._seed, epoch)) if alone else nullcontext()
        self._epoch += 1
        with fixed:
            stream = iter(self._inner)
        while True:
            with fixed:
                mine, length = self._read(stream)
            yield from mine
            if length < self._group:
                return

    def _read(self, stream: Iterator[Any]) -> tuple[list[Any], int]:
        """This rank's samples of the next step, and how many there were for all ranks."""
        share, mine, first, length = self._share, [], [], 0
        for sample in islice(stream, self._group):
            if length < share.size:
                first.append(sample)
            if length % share.size == share.rank:
                mine.append(sample)
            length += 1
        if length < self._group and self._drop_last:
            return [], length
        if not share.exact and len(mine) < share.count(length):
            mine.append(first[share.of(length)[-1]])
        return mine, length

    def __len__(self) -> int:
        length = len(self._inner)  # type: ignore[arg-type]
        return self._share.count(length, group=self._group, drop_last=self._drop_last)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)


class StreamLoader(DataLoader[Any]):
    """A DataLoader of one rank's part of a stream; workers get the same seeds on every rank.

    Args:
        stream: the part.
        seed: what the workers' seeds start from.
        options: of the user's loader.
        adapter: what :func:`adapter_that_forbids_forks` gave.
    """

    def __init__(
        self, stream: StreamShard, seed: int, options: dict[str, Any], adapter: str | None
    ) -> None:
        self._seed, self._epoch, self._exact = seed, 0, stream.exact
        self._adapter = adapter
        super().__init__(stream, **options)

    def __iter__(self) -> Any:
        epoch = 0 if self._exact else self._epoch
        self.generator.manual_seed(seed_from(self._seed, epoch))
        self._epoch += 1
        return started(super().__iter__, self._adapter)
