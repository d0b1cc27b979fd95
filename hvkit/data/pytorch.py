"""PyTorch's DataLoader and Dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvkit.agreement import require_equal
from hvkit.data.arrays import digest_of_rows
from hvkit.data.order import Share, seed_from
from hvkit.data.position import Position
from hvkit.data.samplers import Order, SampleOrder, order_of
from hvkit.data.stream import StreamLoader, StreamShard


def shard_dataset(dataset: Dataset[Any], share: Share, seed: int) -> tuple[Any, list[str]]:
    """This rank's samples of a Dataset, and what the ranks have to have alike.

    Raises:
        TypeError: a map-style dataset without ``__len__``.
    """
    if isinstance(dataset, IterableDataset):
        stream = StreamShard(dataset, share, group=share.size, drop_last=False, seed=seed)
        return stream, ["IterableDataset"]
    length = _length(dataset)
    whole = share.exact or length % share.size == 0
    mine = range(share.rank, length, share.size) if whole else share.of(length).tolist()
    return Subset(dataset, mine), [f"Dataset of {length} samples", *_contents(dataset)]


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
        options = {**_options(loader), "generator": torch.Generator()}
        return StreamLoader(stream, seed, kept | options), ["IterableDataset", *facts]
    order = order_of(loader, share, seed)
    facts += _contents(loader.dataset)
    return ShardedLoader(loader, order, share, seed), [*order.facts(), *facts]


class ShardedLoader(DataLoader[Any]):
    """A DataLoader that reads one rank's part of another's samples.

    Every iteration is a new epoch. ``state_dict`` and ``load_state_dict`` give and take the
    position, counted over all ranks, so that another number of ranks can go on from it.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, share: Share, seed: int) -> None:
        self._order, self._share, self._seed = order, share, seed
        self._position = Position()
        self._begun_after = 0
        options: dict[str, Any] = _options(loader)
        if loader.batch_sampler is None:
            options |= {"sampler": order, "batch_size": None}
        elif isinstance(order, SampleOrder):
            options["sampler"] = order
            options |= {"batch_size": order.batch, "drop_last": order.drop_last}
        else:
            options["batch_sampler"] = order
        # With a generator of its own, it does not draw from the global one for its workers.
        super().__init__(loader.dataset, generator=torch.Generator(), **options)

    def __iter__(self) -> Any:
        iteration = self._position.begin()
        epoch = 0 if self._share.exact else self._position.epoch
        self._begun_after = self._position.samples
        self._order.begin(epoch, self._begun_after)
        self.generator.manual_seed(seed_from(self._seed, epoch, self._share.rank))
        return self._counted(iteration, super().__iter__(), self._order.steps())

    def _counted(
        self, iteration: object, batches: Iterator[Any], steps: Iterator[int]
    ) -> Iterator[Any]:
        try:
            for number, (batch, samples) in enumerate(zip(batches, steps, strict=False)):
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
            "shard",
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


def _contents(dataset: Any) -> list[str]:
    """What tells apart datasets of one length, as far as it costs nothing to know."""
    facts = []
    while isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices).tobytes()
        facts.append(f"Subset with indices of sha256 {hashlib.sha256(indices).hexdigest()}")
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        facts.append(f"tensors whose rows have sha256 {digest_of_rows(dataset.tensors)}")
    return facts


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    names = (
        "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context "
        "prefetch_factor persistent_workers pin_memory_device in_order"
    )
    return {name: getattr(loader, name) for name in names.split() if hasattr(loader, name)}


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__qualname__} has no __len__, so that no equal parts can be made: "
            "give it one, or make it an IterableDataset"
        )
    return len(dataset)


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
