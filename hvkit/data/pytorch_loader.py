"""Sharding PyTorch's ``DataLoader``: loaders of each rank's part, and of batches handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hvkit import runtime
from hvkit.communication.collectives import require_equal
from hvkit.data.order import Queue, Share, seed_from
from hvkit.data.pytorch_datasets import DatasetPart, StreamShard, contents
from hvkit.data.pytorch_workers import adapter_that_forbids_forks, started
from hvkit.data.samplers import Epoch, Order, SampleOrder, order_of


def dynamic_loader(
    loader: DataLoader[Any], share: Share, seed: int
) -> tuple[DynamicLoader, list[str]]:
    """A loader of the batches that this rank takes, and the facts that must be equal on all ranks.

    Raises:
        TypeError: a loader or sampler of this kind cannot be shared so.
        ValueError: the loader is already sharded.
    """
    _refuse_others(loader)
    facts = [f"batch size {loader.batch_size}", f"drop_last {loader.drop_last}"]
    part = DynamicLoader(loader, share.size, seed)
    return part, [*facts, *contents(loader.dataset)]


def shard_loader(loader: DataLoader[Any], share: Share, seed: int) -> tuple[Any, list[str]]:
    """A loader of this rank's samples, and the facts that must be equal on all ranks.

    Raises:
        TypeError: a loader or sampler of this kind cannot be sharded.
        ValueError: the loader is already sharded.
    """
    _refuse_others(loader)
    batch, drop_last = loader.batch_size, loader.drop_last and not share.exact
    facts = [f"batch size {batch}", f"drop_last {drop_last}"]
    if isinstance(loader.dataset, IterableDataset):
        group = (batch or 1) * share.size
        stream = StreamShard(loader.dataset, share, group=group, drop_last=drop_last, seed=seed)
        kept = {"batch_size": batch, "drop_last": drop_last}
        adapter = adapter_that_forbids_forks(loader)
        options = {**_options(loader, adapter), "generator": torch.Generator()}
        return StreamLoader(stream, seed, kept | options, adapter), ["IterableDataset", *facts]
    order = order_of(loader, share, seed)
    facts += contents(loader.dataset)
    return ShardedLoader(loader, order, share, seed), [*order.facts(), *facts]


class ShardedLoader(DataLoader[Any]):
    """A DataLoader that reads one rank's part of another DataLoader's samples.

    Every iteration is a new epoch. ``state_dict`` and ``load_state_dict`` return and set the
    position, counted over all ranks, so another number of ranks can continue from it.

    On several ranks its dataset is this rank's part, see ``DatasetPart``. Another loader made
    from its dataset and its sampler or batch sampler reads what this one would read next. The
    batches of that loader are not counted: the position then moves only at the end of an epoch.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, share: Share, seed: int) -> None:
        self._order, self._share, self._seed = order, share, seed
        self._position = order.position
        self._begun_after = 0
        self._adapter = adapter_that_forbids_forks(loader)
        options: dict[str, Any] = _options(loader, self._adapter)
        if loader.batch_sampler is None:
            options |= {"sampler": order, "batch_size": None}
        elif isinstance(order, SampleOrder):
            options["sampler"] = order
            options |= {"batch_size": order.batch, "drop_last": order.drop_last}
        else:
            options["batch_sampler"] = order
        dataset: Any = loader.dataset
        if share.size > 1 and hasattr(dataset, "__len__"):
            dataset, order.of_part = DatasetPart(dataset, share), True
        # With its own generator, it does not draw the workers' seeds from the global one.
        super().__init__(dataset, generator=torch.Generator(), **options)

    def __iter__(self) -> Any:
        iteration, epoch = self._order.begin()
        self._begun_after = self._position.samples
        self.generator.manual_seed(seed_from(self._seed, epoch.number, self._share.rank))
        with self._order.fixed_to(epoch):
            batches = started(super().__iter__, self._adapter)
        return self._counted(iteration, epoch, self._read(epoch, batches))

    def _read(self, epoch: Epoch, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            # PyTorch's iterator reads the sampler only inside next().
            with self._order.fixed_to(epoch):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _counted(self, iteration: object, epoch: Epoch, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for number, (batch, samples) in enumerate(zip(batches, epoch.steps, strict=False)):
                # Not before the second batch, so one rank alone may look at the first.
                if number == 1 and not self._share.exact and self._share.size > 1:
                    self._require_same_position()
                self._position.advance(iteration, samples)
                yield batch
        except GeneratorExit:
            self._position.leave(iteration)
            raise
        self._position.end(iteration)

    def _require_same_position(self) -> None:
        require_equal(
            "epoch of a sharded DataLoader",
            [f"epoch {self._position.epoch}, begun after {self._begun_after} samples"],
            "iterate over it equally often on every rank, and look at samples in the original "
            "DataLoader",
            "the loop over a sharded DataLoader",
        )

    def end_epoch(self) -> None:
        """Count an epoch that a loop left with ``break`` as done, as the next loop would."""
        self._position.end_if_left()

    def state_dict(self) -> dict[str, int]:
        """The position: epochs done, and samples of this epoch that all ranks have read."""
        return self._position.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration is the rest of its epoch.

        Raises:
            ValueError: ``state_dict`` did not return it.
        """
        self._position.load(state)


class DynamicLoader(DataLoader[Any]):
    """A DataLoader of the batches that this rank takes, of those that no rank has taken yet.

    Every iteration is a new epoch. Its length is the mean over ranks. ``state_dict`` and
    ``load_state_dict`` return and set the position, which counts the batches that ranks have taken.

    Args:
        loader: the user's.
        size: the number of ranks.
        seed: of the order, the same on every rank.
    """

    def __init__(self, loader: DataLoader[Any], size: int, seed: int) -> None:
        self._order = _order_of_all(loader, seed)
        self._size, self._seed, self._queue = size, seed, Queue()
        self._position = self._order.position
        self._iterations = 0
        self._batches: int | None = None  # of the iteration that runs
        self._adapter = adapter_that_forbids_forks(loader)
        options = _options(loader, self._adapter)
        batches = _Taken(self._take)
        super().__init__(
            loader.dataset, batch_sampler=batches, generator=torch.Generator(), **options
        )

    def __len__(self) -> int:
        return -(-len(self._order) // (self._order.batch * self._size))

    def _take(self) -> Iterator[list[Any]]:
        iteration, batch = self._iterations, self._order.batch
        rows = self._order.rest_of(self._position.epoch, self._position.samples)[0]
        self._batches = -(-len(rows) // batch)
        while (number := self._queue.take(iteration)) < self._batches:
            yield rows[number * batch : (number + 1) * batch]

    def __iter__(self) -> Any:
        iteration = self._position.begin()
        self._iterations += 1
        self.generator.manual_seed(seed_from(self._seed, self._position.epoch, runtime.rank()))
        return self._counted(iteration, started(super().__iter__, self._adapter))

    def _counted(self, iteration: object, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except GeneratorExit:
            self._position.leave(iteration)
            raise
        self._position.end(iteration)
        self._batches = None

    def _taken(self) -> int:
        assert self._batches is not None
        return min(self._queue.next(self._iterations), self._batches)

    def end_epoch(self) -> None:
        """Count an epoch that a loop left with ``break`` as done, as the next loop would."""
        self._position.end_if_left()
        self._batches = None

    def state_dict(self) -> dict[str, int]:
        """The position: epochs done, and samples of this epoch that ranks have taken."""
        position = self._position.save()
        if self._batches is not None:
            position["samples"] += self._taken() * self._order.batch
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration is the rest of its epoch.

        Raises:
            ValueError: ``state_dict`` did not return it.
        """
        self._position.load(state)
        self._batches = None


class _Taken(Sampler[list[Any]]):
    """A batch sampler: the batches that this rank takes."""

    def __init__(self, take: Callable[[], Iterator[list[Any]]]) -> None:
        self._take = take

    def __iter__(self) -> Iterator[list[Any]]:
        return self._take()


def _order_of_all(loader: DataLoader[Any], seed: int) -> SampleOrder:
    """The order of all samples, which every rank draws alike.

    Raises:
        TypeError: the loader has a sampler of the user's own, or none.
    """
    fix = "leave dynamic out, and each rank gets its part"
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(batches) is not BatchSampler:
        raise TypeError(
            "dynamic=True needs a DataLoader with a batch_size, of a dataset with an index; got "
            f"one of {type(loader.dataset).__qualname__} with the batch sampler "
            f"{type(batches).__qualname__}: {fix}"
        )
    if type(batches.sampler) not in (RandomSampler, SequentialSampler):
        raise TypeError(
            "dynamic=True needs shuffle=True or False, because every rank draws the whole order, "
            f"got the sampler {type(batches.sampler).__qualname__}: {fix}"
        )
    alone = Share(0, 1)
    return SampleOrder(batches.sampler, alone, seed, batches.batch_size, batches.drop_last)


class StreamLoader(DataLoader[Any]):
    """A DataLoader of one rank's part of a stream; workers get the same seeds on every rank.

    Args:
        stream: the rank's part.
        seed: the seed of the workers' seeds.
        options: the options of the user's loader.
        adapter: the result of ``adapter_that_forbids_forks``.
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


def _options(loader: DataLoader[Any], adapter: str | None) -> dict[str, Any]:
    names = (
        "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context "
        "prefetch_factor persistent_workers pin_memory_device in_order"
    )
    options = {name: getattr(loader, name) for name in names.split() if hasattr(loader, name)}
    return options | {"multiprocessing_context": "forkserver"} if adapter else options


def _refuse_others(loader: DataLoader[Any]) -> None:
    name = type(loader).__qualname__
    if isinstance(loader, ShardedLoader | DynamicLoader | StreamLoader):
        raise ValueError("this DataLoader was returned by hvkit.shard: shard the original once")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(f"{name} has its own __iter__: pass a plain DataLoader")
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"the DataLoader has a {type(sampler).__qualname__}, which already takes a part: "
                "leave it out (use shuffle=True) and let hvkit.shard take the part"
            )
