"""Sharding PyTorch's ``DataLoader``: loaders of a rank's part, and of batches that it requests.

Their workers start without a fork if MPI uses InfiniBand. Such an adapter writes into memory that
MPI registered with it. After a fork, pages of that memory may belong to the child; the parent then
waits for data that arrives elsewhere, or crashes. See ibv_fork_init(3) and Open MPI's FAQ on fork
and OpenFabrics. The forkserver of multiprocessing, a process without MPI, can fork safely.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
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
from hvkit.data.pytorch_datasets import DatasetPart, StreamShard, contents
from hvkit.data.rank_samples import Position, Queue, Split, WithPosition, seed_from
from hvkit.data.sampler_properties import drawn_workers_seed, full_order, length_of
from hvkit.data.samplers import RankSampler, SampledEpoch
from hvkit.errors import LaunchError
from hvkit.frameworks.pytorch.gradients.backward_passes import last_batch
from hvkit.main_rank import warn_once
from hvkit.random_states import FixedRandomness, Generators, begins_an_epoch, from_text

ADAPTERS = Path("/sys/class/infiniband")


def dynamic_loader(
    loader: DataLoader[Any], split: Split, seed: int | None
) -> tuple[DynamicLoader, list[str]]:
    _refuse_others(loader)
    facts = [f"batch size {loader.batch_size}", f"drop_last {loader.drop_last}"]
    part = DynamicLoader(loader, split.size, seed or 0)
    return part, [*facts, *contents(loader.dataset)]


def shard_loader(loader: DataLoader[Any], split: Split, seed: int | None) -> tuple[Any, list[str]]:
    _refuse_others(loader)
    batch, drop_last = loader.batch_size, loader.drop_last and not split.exact
    facts = [f"batch size {batch}", f"drop_last {drop_last}"]
    if isinstance(loader.dataset, IterableDataset):
        if split.size == 1 and seed is None:
            return loader, ["IterableDataset", *facts]
        group = (batch or 1) * split.size
        stream = StreamShard(
            loader.dataset, split, group=group, drop_last=drop_last, seed=seed or 0
        )
        return StreamLoader(loader, stream, seed, drop_last), ["IterableDataset", *facts]
    order = RankSampler(loader, split, seed)
    facts += contents(loader.dataset)
    return ShardedLoader(loader, order, split), [*order.facts(), *facts]


class LoaderLike(DataLoader[Any]):
    """A DataLoader with the options of the user's, and some of its own."""

    def __init__(self, loader: DataLoader[Any], dataset: Any, **options: Any) -> None:
        self._adapter = _adapter_that_forbids_forks(loader)
        names = (
            "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context "
            "prefetch_factor persistent_workers pin_memory_device in_order"
        )
        kept = {name: getattr(loader, name) for name in names.split()}
        if self._adapter:
            kept["multiprocessing_context"] = "forkserver"
        super().__init__(dataset, **kept, **options)

    def _started(self) -> Iterator[Any]:
        """PyTorch's iterator; LaunchError with the fix if forkserver cannot start workers."""
        if self._adapter is None:
            return super().__iter__()
        try:
            batches = super().__iter__()
        except Exception as error:  # from pickling, or from a pipe that the worker closed
            raise _cannot_start(error, self._adapter) from error
        return _with_first(batches, self._adapter)


class ShardedLoader(WithPosition, LoaderLike):
    """A DataLoader that reads one rank's part of another DataLoader's samples.

    Every iteration is a new epoch. The position is counted over all ranks, so another number of
    ranks can continue from it. On several ranks its dataset is a ``DatasetPart``. Another loader of
    its dataset and its sampler or batch sampler reads what this one would read next, and the
    position changes only at the end of an epoch.
    """

    def __init__(self, loader: DataLoader[Any], order: RankSampler, split: Split) -> None:
        self._order, self._split = order, split
        self._position = order.position
        options: dict[str, Any] = {"sampler": order, "batch_size": None}
        if loader.batch_sampler is not None and order.batched:
            options = {"batch_sampler": order}
        elif loader.batch_sampler is not None:
            options |= {"batch_size": loader.batch_size, "drop_last": order.drop_last}
        dataset: Any = loader.dataset
        if split.size > 1 and length_of(dataset) is not None:
            dataset, order.of_part = DatasetPart(dataset, split), True
        super().__init__(loader, dataset, generator=loader.generator, **options)

    def __iter__(self) -> Any:
        iteration, epoch = self._order.begin()
        begun_after = self._position.samples
        with self._order.fixed_to(epoch):
            # In a run that has resumed, persistent workers start in a later epoch than the first.
            resumed = self._iterator is None and not self._order.draws_workers_seed
            if self._order.as_without_hvkit and not resumed:
                with epoch.randomness:
                    batches = self._started()
            else:
                # Workers of different ranks get different seeds.
                of_user = self.generator
                self.generator = torch.Generator().manual_seed(
                    seed_from(epoch.workers_seed, self._split.rank)
                )
                try:
                    batches = self._started()
                finally:
                    self.generator = of_user
        return self._counted(iteration, epoch, begun_after, self._read(epoch, batches))

    def _read(self, epoch: SampledEpoch, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            # PyTorch's iterator reads the sampler only inside next().
            with self._order.fixed_to(epoch):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _counted(
        self, iteration: object, epoch: SampledEpoch, begun_after: int, batches: Iterator[Any]
    ) -> Iterator[Any]:
        trains = self._split.size > 1 and not self._split.exact
        steps = self._order.steps_after(begun_after) if trains else None
        with self._position.reading(iteration):
            for number, batch in enumerate(batches, 1):
                # Ranks that agree at the beginning may still take different numbers of steps.
                if number == 2 and trains:
                    self._order.require_same_position(begun_after)
                self._order.compare(epoch, number)
                self._position.advance(iteration, epoch.steps.popleft())
                # A single rank may read just the first batch of an epoch.
                is_last = number == steps and (number > 1 or begun_after > 0)
                with last_batch() if is_last else nullcontext():
                    yield batch
            self._order.compare(epoch)

    def load_before_last_step(self) -> bool:
        """Go back by a step, if ranks have read all samples of an epoch; whether they have."""
        samples = self._position.samples
        at_end = samples > 0 and self._order.steps_after(samples) == 0
        if at_end:
            step = (self._order.samples_in_batch or 1) * self._split.size
            self._order.load_state_dict(
                self.state_dict() | {"samples": (samples - 1) // step * step}
            )
        return at_end

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)


class DynamicLoader(WithPosition, LoaderLike):
    """A DataLoader whose next batch is the next one that no rank has taken yet.

    Every iteration is a new epoch. Its length is the mean over ranks, and its position counts the
    batches that ranks have taken.
    """

    def __init__(self, loader: DataLoader[Any], size: int, seed: int) -> None:
        self._of_user = _pytorchs_batches(loader)
        self._source: Any = self._of_user.sampler
        self._size, self._seed, self._queue = size, seed, Queue()
        self._position = Position()
        self._iterations = 0
        self._batches: int | None = None  # in the current iteration
        batches = _TakenBatches(self)
        super().__init__(loader, loader.dataset, batch_sampler=batches, generator=torch.Generator())

    def __len__(self) -> int:
        return -(-len(self._of_user) // self._size)

    def take_batches(self) -> Iterator[list[Any]]:
        iteration, batch = self._iterations, self._of_user.batch_size
        rows = self._rows()
        whole = len(rows) // batch
        self._batches = whole if self._of_user.drop_last else -(-len(rows) // batch)
        while (number := self._queue.take(iteration)) < self._batches:
            yield [int(row) for row in rows[number * batch : (number + 1) * batch]]

    def _rows(self) -> Sequence[int]:
        position = self._position
        begun: Any = seed_from(self._seed, position.epoch)
        if begins_an_epoch(position.random):  # the run has resumed in the middle of an epoch
            begun = from_text(position.random)
        own = getattr(self._source, "generator", None)
        with FixedRandomness(begun, Generators([own] if own else [])):
            order = full_order(self._source)
            return (list(self._source) if order is None else order)[position.samples :]

    def __iter__(self) -> Any:
        iteration = self._position.begin()
        self._iterations += 1
        self.generator.manual_seed(seed_from(self._seed, self._position.epoch, runtime.rank()))
        return self._counted(iteration, self._started())

    def _counted(self, iteration: object, batches: Iterator[Any]) -> Iterator[Any]:
        with self._position.reading(iteration):
            yield from batches
        self._batches = None

    def end_epoch(self) -> None:
        super().end_epoch()
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """The position: epochs done, and samples of this epoch that ranks have taken."""
        position = super().state_dict()
        if self._batches is not None:
            taken = min(self._queue.take(self._iterations, 0), self._batches)
            position["samples"] += taken * self._of_user.batch_size
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if not begins_an_epoch(self._position.random):
            self._position.random = {}
        self._batches = None


class _TakenBatches(Sampler[list[Any]]):
    def __init__(self, loader: DynamicLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Any]]:
        return self._loader.take_batches()


def _pytorchs_batches(loader: DataLoader[Any]) -> BatchSampler:
    """PyTorch's own batch sampler of a loader, whose order is the same on every rank."""
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
    return batches


class StreamLoader(LoaderLike):
    """A DataLoader of one rank's part of a stream; workers get the same seeds on every rank."""

    def __init__(
        self, loader: DataLoader[Any], stream: StreamShard, seed: int | None, drop_last: bool
    ) -> None:
        self._seed, self._epoch, self._exact = seed, 0, stream.exact
        self._drawn_from = loader.generator
        sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": drop_last}
        super().__init__(loader, stream, generator=torch.Generator(), **sizes)

    def __iter__(self) -> Any:
        epoch = 0 if self._exact else self._epoch
        # Draw as a loader without hvkit does, for the numbers that follow.
        if self._seed is None and not (self.persistent_workers and self._epoch):
            drawn_workers_seed(self._drawn_from)
        self.generator.manual_seed(seed_from(self._seed or 0, epoch))
        self._epoch += 1
        return self._started()


def _refuse_others(loader: DataLoader[Any]) -> None:
    name = type(loader).__qualname__
    if isinstance(loader, LoaderLike):
        raise ValueError("this DataLoader was returned by hvkit.shard: shard the original once")
    for method in ("__iter__", "_get_iterator"):
        if getattr(type(loader), method) is not getattr(DataLoader, method):
            raise TypeError(f"{name} has its own {method}: pass a plain DataLoader")
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"the DataLoader has a {type(sampler).__qualname__}, which already takes a part: "
                "leave it out (use shuffle=True) and let hvkit.shard take the part"
            )


def _adapter_that_forbids_forks(loader: DataLoader[Any]) -> str | None:
    """The InfiniBand adapter that makes it unsafe to fork this loader's workers; None if none.

    None also if the workers would not be forked anyway, or the user chose how they start.
    """
    default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True) or default
    if loader.num_workers == 0 or loader.multiprocessing_context or method != "fork":
        return None
    adapter = _active_adapter(ADAPTERS) if runtime.uses_mpi() else None
    if adapter is not None:
        # Otherwise each worker would import PyTorch in every epoch, which takes seconds. Not
        # __main__, since a script without a guard would run there.
        multiprocessing.set_forkserver_preload(["torch"])
        warn_once(
            "forkserver",
            f"MPI may use the InfiniBand adapter {adapter}, so forks are not safe: "
            "multiprocessing's forkserver starts the workers of DataLoaders; to fork them, pass "
            'multiprocessing_context="fork" to the DataLoader',
        )
    return adapter


def _active_adapter(adapters: Path) -> str | None:
    """An InfiniBand (or RoCE) adapter with a port in use, in the kernel's folder of them."""
    for port in sorted(adapters.glob("*/ports/*/state")):
        try:
            state = port.read_text()  # "4: ACTIVE"
        except OSError:  # someone is removing the adapter
            continue
        if state.split()[-1:] == ["ACTIVE"]:
            return port.parents[2].name
    return None


def _with_first(batches: Iterator[Any], adapter: str) -> Iterator[Any]:
    try:
        first = list(islice(batches, 1))
    except RuntimeError as error:
        # PyTorch's message for a worker that ended. Errors of the dataset pass unchanged.
        if "exited unexpectedly" not in str(error):
            raise
        raise _cannot_start(error, adapter) from error
    yield from first
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
