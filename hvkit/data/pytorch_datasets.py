"""Sharding PyTorch's ``Dataset`` and ``IterableDataset``.

Every rank reads the whole stream of an ``IterableDataset``, and keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from hvkit.data.arrays import digest_of_rows
from hvkit.data.rank_samples import Split, seed_from
from hvkit.data.sampler_properties import length_of
from hvkit.random_states import FixedRandomness


def shard_dataset(dataset: Dataset[Any], split: Split, seed: int | None) -> tuple[Any, list[str]]:
    if isinstance(dataset, IterableDataset):
        if split.size == 1 and seed is None:
            return dataset, ["IterableDataset"]
        stream = StreamShard(dataset, split, group=split.size, drop_last=False, seed=seed or 0)
        return stream, ["IterableDataset"]
    length = length_of(dataset)
    if length is None:
        raise TypeError(
            f"{type(dataset).__qualname__} has no __len__, so it cannot be divided into equal "
            "parts: add __len__, or make it an IterableDataset"
        )
    facts = [f"Dataset of {length} samples", *contents(dataset)]
    return DatasetPart(dataset, split), facts


class IndexInFull(int):
    """An index in the whole dataset; a plain int is an index in this rank's part."""

    __slots__ = ()


class KeyInFull(NamedTuple):
    """A sampler's key that is not a plain int, for the whole dataset."""

    key: Any


def in_full(key: Any) -> IndexInFull | KeyInFull:
    """Mark a sampler's index as an index in the whole dataset, for ``DatasetPart``."""
    return IndexInFull(key) if type(key) is int else KeyInFull(key)


class _AttributesOf:
    """Reads and sets other attributes than its own on another object.

    The first name in ``_own`` is that of the object.
    """

    _own: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):  # while it is being unpickled, or copied
            raise AttributeError(name)
        return getattr(getattr(self, self._own[0]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(getattr(self, self._own[0]), name, value)


class DatasetPart(_AttributesOf, Subset[Any]):
    """Every N-th sample of a dataset, repeated to equal length unless the split is exact.

    ``part[i]`` and ``len(part)`` refer to the part, so a script that divides by the length,
    splits or shuffles it works on this rank's samples. The samplers of a sharded loader return
    indices in the whole dataset, marked by ``in_full``. The dataset has all other attributes.
    """

    _own = ("dataset", "_split", "_known")

    def __init__(self, dataset: Any, split: Split) -> None:
        self._split, self._known = split, (-1, range(0))
        self.dataset = dataset

    @property
    def indices(self) -> Sequence[int]:  # type: ignore[override]
        """The indices of this part's samples in the whole dataset, which may have grown."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if self._known[0] != length:
            positions = self._split.of(length)
            indices = (
                range(length)[positions] if isinstance(positions, slice) else positions.tolist()
            )
            self._known = (length, indices)
        return self._known[1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return self.dataset[[*map(self._key, index)]]
        return self.dataset[self._key(index)]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        keys = [*map(self._key, indices)]
        if callable(several := getattr(self.dataset, "__getitems__", None)):
            return several(keys)  # type: ignore[no-any-return]
        return [self.dataset[key] for key in keys]

    def _key(self, key: Any) -> Any:
        if type(key) is IndexInFull:
            return int(key)
        return key.key if type(key) is KeyInFull else self.indices[key]


def contents(dataset: Any) -> list[str]:
    """Facts that may differ between datasets of one length, if they are cheap to compute."""
    facts = []
    while isinstance(dataset, Subset):
        if isinstance(dataset, DatasetPart):
            raise ValueError(
                "the dataset is one rank's part, returned by hvkit.shard: shard the dataset or its "
                "DataLoader, not both"
            )
        indices = np.asarray(dataset.indices).tobytes()
        facts.append(f"Subset with indices of sha256 {hashlib.sha256(indices).hexdigest()}")
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        facts.append(f"tensors whose rows have sha256 {digest_of_rows(dataset.tensors)}")
    return facts


class StreamShard(_AttributesOf, IterableDataset[Any]):
    """One rank's samples of a stream, of which all ranks together read ``group`` in a step.

    The stream has all other attributes, so a ``worker_init_fn`` that splits
    ``get_worker_info().dataset`` works as before.
    """

    _own = ("_inner", "_split", "_group", "_drop_last", "_seed", "_epoch")

    def __init__(
        self, inner: IterableDataset[Any], split: Split, *, group: int, drop_last: bool, seed: int
    ) -> None:
        self._inner, self._split, self._group = inner, split, group
        self._drop_last, self._seed, self._epoch = drop_last, seed, 0

    @property
    def exact(self) -> bool:
        return self._split.exact

    def __iter__(self) -> Iterator[Any]:
        # The loader has already given a worker's generators the same seed on every rank.
        in_main_process = get_worker_info() is None
        epoch = 0 if self._split.exact else self._epoch
        fixed = FixedRandomness(seed_from(self._seed, epoch)) if in_main_process else nullcontext()
        self._epoch += 1
        with fixed:
            stream = iter(self._inner)
        while True:
            with fixed:
                own, length = self._read(stream)
            yield from own
            if length < self._group:
                return

    def _read(self, stream: Iterator[Any]) -> tuple[list[Any], int]:
        """This rank's samples of the next step, and the number of samples for all ranks."""
        split, own, first, length = self._split, [], [], 0
        for sample in islice(stream, self._group):
            if length < split.size:
                first.append(sample)
            if length % split.size == split.rank:
                own.append(sample)
            length += 1
        if length < self._group and self._drop_last:
            return [], length
        if not split.exact and len(own) < split.count(length):
            own.append(first[np.arange(length)[split.of(length)][-1]])
        return own, length

    def __len__(self) -> int:
        length = len(self._inner)  # type: ignore[arg-type]
        return self._split.count(length, group=self._group, drop_last=self._drop_last)
