"""Sharding PyTorch's ``DataLoader``: the loaders, and how their workers start.

If MPI uses InfiniBand, workers are not forked. An InfiniBand adapter writes into memory that MPI
registered with it. After a fork, pages of that memory may belong to the child; the parent then
waits for data that arrives elsewhere, or crashes. See ibv_fork_init(3) and Open MPI's FAQ on fork
and OpenFabrics. The forkserver of multiprocessing, a process without MPI, can fork safely.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hvkit import runtime
from hvkit.collectives import require_equal
from hvkit.data.order import Share, seed_from
from hvkit.data.pytorch_datasets import DatasetPart, StreamShard, contents
from hvkit.data.samplers import Epoch, Order, SampleOrder, order_of
from hvkit.errors import LaunchError
from hvkit.main_rank import warn_once

ADAPTERS = Path("/sys/class/infiniband")

_NONE = object()


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
        adapter = _adapter_that_forbids_forks(loader)
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
        self._adapter = _adapter_that_forbids_forks(loader)
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
            batches = _started(super().__iter__, self._adapter)
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


class StreamLoader(DataLoader[Any]):
    """A DataLoader of one rank's part of a stream; workers get the same seeds on every rank.

    Args:
        stream: the rank's part.
        seed: the seed of the workers' seeds.
        options: the options of the user's loader.
        adapter: the result of ``_adapter_that_forbids_forks``.
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
        return _started(super().__iter__, self._adapter)


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
        raise TypeError(f"{name} has its own __iter__: pass a plain DataLoader")
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"the DataLoader has a {type(sampler).__qualname__}, which already takes a part: "
                "leave it out (use shuffle=True) and let hvkit.shard take the part"
            )


def _active_adapter(adapters: Path) -> str | None:
    """An InfiniBand (or RoCE) adapter with a port that is in use; None if there is none.

    Args:
        adapters: the kernel's folder, which holds a folder for each adapter.
    """
    for port in sorted(adapters.glob("*/ports/*/state")):
        try:
            state = port.read_text()  # "4: ACTIVE"
        except OSError:  # someone is removing the adapter
            continue
        if state.split()[-1:] == ["ACTIVE"]:
            return port.parents[2].name
    return None


def _adapter_that_forbids_forks(loader: Any) -> str | None:
    """The InfiniBand adapter that makes it unsafe to fork this loader's workers; None if none.

    None also if the workers would not be forked anyway, or the user chose how they start.
    """
    default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True) or default
    if loader.num_workers == 0 or loader.multiprocessing_context or method != "fork":
        return None
    adapter = _active_adapter(ADAPTERS) if runtime.uses_mpi() else None
    if adapter is not None:
        _prepare_forkserver(adapter)
    return adapter


def _prepare_forkserver(adapter: str) -> None:
    # Otherwise each worker imports PyTorch, which takes seconds, in every epoch. Without __main__:
    # a script without a guard would run there.
    multiprocessing.set_forkserver_preload(["torch"])
    warn_once(
        "forkserver",
        f"MPI may use the InfiniBand adapter {adapter}, so forks are not safe: multiprocessing's "
        "forkserver starts the workers of DataLoaders; to fork them, pass "
        'multiprocessing_context="fork" to the DataLoader',
    )


def _started(begin: Callable[[], Iterator[Any]], adapter: str | None) -> Iterator[Any]:
    """The iterator that ``begin`` returns, with a clear error if forkserver cannot start workers.

    Args:
        begin: starts the workers.
        adapter: the adapter that forbids forks; None if the workers start as the user chose.

    Raises:
        LaunchError: the workers cannot start; the message gives the fix.
    """
    if adapter is None:
        return begin()
    try:
        batches = begin()
    except Exception as error:  # from pickling, or from a pipe that the worker closed
        raise _cannot_start(error, adapter) from error
    return _with_first(batches, adapter)


def _with_first(batches: Iterator[Any], adapter: str) -> Iterator[Any]:
    try:
        first = next(batches, _NONE)
    except RuntimeError as error:
        # PyTorch's message for a worker that ended. Errors of the dataset pass unchanged.
        if "exited unexpectedly" not in str(error):
            raise
        raise _cannot_start(error, adapter) from error
    if first is not _NONE:
        yield first
        yield from batches


def _cannot_start(error: Exception, adapter: str) -> LaunchError:
    return LaunchError(
        f"the DataLoader's workers could not start: {type(error).__name__}: {error}. They start by "
        "multiprocessing's forkserver instead of a fork, because MPI may use the InfiniBand "
        f'adapter {adapter}: put the script\'s main code under if __name__ == "__main__", and use '
        "a dataset, collate_fn and worker_init_fn that pickle: classes and functions of a module, "
        "not lambdas or anything defined inside a function. If forks are safe on this network, "
        'pass multiprocessing_context="fork" to the DataLoader'
    )
