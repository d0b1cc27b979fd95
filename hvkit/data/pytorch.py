"""PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hvkit.collectives import require_equal
from hvkit.data.dataset import DatasetPart, contents
from hvkit.data.order import Share, seed_from
from hvkit.data.samplers import Epoch, Order, SampleOrder, order_of
from hvkit.data.stream import StreamLoader, StreamShard
from hvkit.data.workers import adapter_that_forbids_forks, started


def shard_loader(loader: DataLoader[Any], share: Share, seed: int) -> tuple[Any, list[str]]:
    """A loader of this rank's samples, and what the ranks have to have alike.

    Raises:
        TypeError: the loader or its sampler is of a kind that cannot be shared.
        ValueError: it is shared already.
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
    """A DataLoader that reads one rank's part of another's samples.

    Every iteration is a new epoch. ``state_dict`` and ``load_state_dict`` give and take the
    position, counted over all ranks, so that another number of ranks can go on from it.

    On several ranks its dataset is this rank's part, see :class:`DatasetPart`. Another loader of
    its dataset and its sampler or batch sampler reads what this one would read next. Batches of
    that are not counted: the position is then known at the ends of epochs only.
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
        # With a generator of its own, it does not draw from the global one for its workers.
        super().__init__(dataset, generator=torch.Generator(), **options)

    def __iter__(self) -> Any:
        iteration, epoch = self._order.begin()
        self._begun_after = self._position.samples
        self.generator.manual_seed(seed_from(self._seed, epoch.number, self._share.rank))
        with self._order.giving(epoch):
            batches = started(super().__iter__, self._adapter)
        return self._counted(iteration, epoch, self._read(epoch, batches))

    def _read(self, epoch: Epoch, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            # Only then does PyTorch's iterator look at the sampler.
            with self._order.giving(epoch):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _counted(self, iteration: object, epoch: Epoch, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for number, (batch, samples) in enumerate(zip(batches, epoch.steps, strict=False)):
                # After one batch, so that a rank alone may look at the first.
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
        """Take an epoch that a loop has left with ``break`` for done, as the next loop will."""
        self._position.end_if_left()

    def state_dict(self) -> dict[str, int]:
        """The position: epochs done, and samples of this epoch that all ranks were given."""
        return self._position.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration is the rest of its epoch.

        Raises:
            ValueError: it is not what ``state_dict`` returned.
        """
        self._position.load(state)


def _options(loader: DataLoader[Any], adapter: str | None) -> dict[str, Any]:
    names = (
        "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context "
        "prefetch_factor persistent_workers pin_memory_device in_order"
    )
    options = {name: getattr(loader, name) for name in names.split() if hasattr(loader, name)}
    return options | {"multiprocessing_context": "forkserver"} if adapter else options


def _refuse_others(loader: DataLoader[Any]) -> None:
    name = type(loader).__qualname__
    if isinstance(loader, ShardedLoader | StreamLoader):
        raise ValueError("this DataLoader was returned by hvkit.shard: shard the original once")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(f"{name} has an __iter__ of its own: pass a plain DataLoader")
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"the DataLoader has a {type(sampler).__qualname__}, which takes a part already: "
                "leave it out (shuffle=True instead) and let hvkit.shard take the part"
            )
