"""Properties of a DataLoader's samplers: how batches are made, and when numbers are drawn."""

from __future__ import annotations

from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# PyTorch's samplers that hold indices or weights.
_HOLDING = (SubsetRandomSampler, WeightedRandomSampler)


class LoaderBatching(NamedTuple):
    """How the items of a sampler or a batch sampler become a loader's batches."""

    source: Any
    """The sampler to read from, or a batch sampler whose batches stay undivided."""
    samples: int | None
    """The number of samples in a rank's batch; None if batches stay undivided."""
    drop_last: bool
    batched: bool
    """Whether a rank's batches are read as lists; else sample by sample."""
    lazy: bool
    """Whether the loader calls the source's ``__iter__`` only when it needs a batch."""


def length_of(data: Any) -> int | None:
    """The length of a sampler or dataset; None if it, or the sampler of its batches, has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def loader_batching(loader: DataLoader[Any]) -> LoaderBatching:
    batches = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        # Without automatic batching, a sampler may pass whole lists of indices to the dataset.
        batches = loader.sampler
    if batches is None:
        return LoaderBatching(loader.sampler, 1, drop_last=False, batched=False, lazy=False)
    # Also a subclass that only adds methods, and leaves __iter__ to PyTorch.
    if isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__:
        batched = loader.batch_size is None
        return LoaderBatching(
            batches.sampler, batches.batch_size, batches.drop_last, batched, lazy=True
        )
    return LoaderBatching(batches, None, drop_last=False, batched=True, lazy=False)


def drawn_workers_seed(generator: torch.Generator | None) -> int:
    """A number that seeds workers, drawn as a DataLoader draws it when an iteration begins."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def reads_each_once(source: Any) -> bool:
    """Whether it is PyTorch's own sampler of each sample once, in order or shuffled."""
    if type(source) is RandomSampler:
        return not source.replacement and len(source) == len(source.data_source)
    return type(source) is SequentialSampler


def needs_comparison(source: Any, *, exact: bool) -> bool:
    """Whether ranks must compare what a sampler, or a batch sampler of the user's own, returns.

    PyTorch's samplers draw from generators that begin in the same state on all ranks, but two kinds
    have indices or weights, which may differ. In evaluation these are not compared, so that a
    single rank may evaluate.
    """
    unequal = not exact and type(source) in _HOLDING
    return unequal or type(source) not in (RandomSampler, SequentialSampler, *_HOLDING)


def draws_at_once(source: Any) -> bool:
    """Whether it is a sampler of PyTorch's that draws all numbers before its first index."""
    return reads_each_once(source) or type(source) in _HOLDING


_PYTHONS: tuple[type, ...] = (type(iter([0])), type(iter((0,))), type(iter(range(0))))


def only_reads_a_list(items: Any, count: int) -> bool:
    """Whether the next ``count`` items come from a list, tuple or range, so no code draws.

    Also if they come from a generator that is at ``yield from`` such a list.
    """
    if (inner := getattr(items, "gi_yieldfrom", None)) is not None:
        return isinstance(inner, _PYTHONS) and length_hint(inner) >= count
    return isinstance(items, _PYTHONS)


def draws_at_end(source: Any) -> bool:
    """Whether the sampler draws another order after its last index, which it does not use.

    PyTorch's does so if the number of samples is a multiple of the dataset's length. It matters
    only if the generator is the user's, from which the next epoch draws, too.
    """
    return type(source) is RandomSampler and source.generator is not None


def full_order(source: Any, *, original: bool = False) -> Any:
    """The order of an epoch, from PyTorch's samplers of each sample once; None for other samplers.

    A range, or an int64 array of shape (n,); with ``original`` in the order of the dataset. It
    draws the same numbers as the sampler, whose own lists would take 5 times the memory.
    """
    if not reads_each_once(source):
        return None
    if type(source) is SequentialSampler:
        return range(len(source))
    generator = source.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator().manual_seed(seed)
    if original:
        return range(len(source))
    return torch.randperm(len(source), generator=generator).cpu().numpy()
