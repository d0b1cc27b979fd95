"""PyTorch's Dataset: one rank's part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hvkit.data.arrays import digest_of_rows
from hvkit.data.order import Share
from hvkit.data.stream import StreamShard

_OWN = frozenset({"dataset", "_share", "_known"})


def shard_dataset(dataset: Dataset[Any], share: Share, seed: int) -> tuple[Any, list[str]]:
    """This rank's samples of a Dataset, and what the ranks have to have alike.

    Raises:
        TypeError: a map-style dataset without ``__len__``.
        ValueError: it is a rank's part already.
    """
    if isinstance(dataset, IterableDataset):
        stream = StreamShard(dataset, share, group=share.size, drop_last=False, seed=seed)
        return stream, ["IterableDataset"]
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__qualname__} has no __len__, so that no equal parts can be made: "
            "give it one, or make it an IterableDataset"
        )
    facts = [f"Dataset of {len(dataset)} samples", *contents(dataset)]
    return DatasetPart(dataset, share), facts


class InWhole(int):
    """An index in the whole dataset, where a plain int is one in this rank's part."""

    __slots__ = ()


class KeyInWhole(NamedTuple):
    """What a sampler gives that is no plain int, for the whole dataset as it is."""

    key: Any


def in_whole(key: Any) -> InWhole | KeyInWhole:
    """A sampler's index as one of the whole dataset, for :class:`DatasetPart`."""
    return InWhole(key) if type(key) is int else KeyInWhole(key)


class DatasetPart(Subset[Any]):
    """Every N-th sample of a dataset, repeated to equal length unless the share is exact.

    ``part[i]`` and ``len(part)`` are those of the part, so that what a script divides by the
    length, splits or shuffles is this rank's. Since an epoch's order goes over all samples, the
    samplers of a sharded loader give what :func:`in_whole` marks. Attributes are those of the
    dataset, to be read and set.

    Args:
        dataset: the whole, with a length.
        share: rank and size.
    """

    def __init__(self, dataset: Any, share: Share) -> None:
        self._share, self._known = share, (-1, range(0))
        self.dataset = dataset

    @property
    def indices(self) -> Sequence[int]:  # type: ignore[override]
        """Of this part's samples in the whole dataset, which may have grown."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if self._known[0] != length:
            share = self._share
            whole = share.exact or length % share.size == 0
            mine = range(share.rank, length, share.size) if whole else share.of(length).tolist()
            self._known = (length, mine)
        return self._known[1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return self.dataset[self._in_whole(index)]
        return self.dataset[self._key(index)]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        indices = self._in_whole(indices)
        if callable(several := getattr(self.dataset, "__getitems__", None)):
            return several(indices)  # type: ignore[no-any-return]
        return [self.dataset[index] for index in indices]

    def _in_whole(self, keys: list[Any]) -> list[Any]:
        return [self._key(key) for key in keys]

    def _key(self, key: Any) -> Any:
        if type(key) is InWhole:
            return int(key)
        return key.key if type(key) is KeyInWhole else self.indices[key]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):  # while it is being unpickled, or copied
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)


def contents(dataset: Any) -> list[str]:
    """What tells apart datasets of one length, as far as it costs nothing to know.

    Raises:
        ValueError: it is a rank's part already.
    """
    facts = []
    while isinstance(dataset, Subset):
        if isinstance(dataset, DatasetPart):
            raise ValueError(
                "the dataset is one rank's part, which hvkit.shard returned: shard the dataset or "
                "its DataLoader, not both"
            )
        indices = np.asarray(dataset.indices).tobytes()
        facts.append(f"Subset with indices of sha256 {hashlib.sha256(indices).hexdigest()}")
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        facts.append(f"tensors whose rows have sha256 {digest_of_rows(dataset.tensors)}")
    return facts
