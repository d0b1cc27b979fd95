"""``shard``: each rank's part of the data, of one kind with what was passed in."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeVar

from hvkit import runtime
from hvkit.collectives import raise_together, require_equal
from hvkit.data.arrays import digest_of_rows, is_arrays, rows_of, shard_arrays
from hvkit.data.order import Share
from hvkit.watch.calls import named

D = TypeVar("D")

__all__ = ["shard"]

_ACCEPTED = (
    "a torch DataLoader or Dataset, a tf.data.Dataset, a keras.utils.PyDataset, or arrays: one, or "
    "a tuple, list or dict of them"
)


@named("hvkit.shard")
def shard(data: D, *, exact: bool = False, seed: int = 0) -> D:
    """This rank's part of the data, as an object of the same kind.

    For training, all ranks get the same number of batches, of the same sizes in each step, and
    together all samples. A batch size is that of one rank: step k of N ranks is what one process
    with the N times larger batch would read in step k. Where the last step has not enough samples
    for equal parts, fewer than N of them come twice; with ``drop_last`` it is left out instead.

    For evaluation, pass ``exact=True``: every sample is on exactly one rank, in the original
    order, also with a DataLoader's ``drop_last`` (what ``drop_remainder`` has dropped in tf.data
    stays dropped). Parts may differ by one sample, or by one element of tf.data, and be empty.

    - **DataLoader**: collate function, workers, pinning and ``drop_last`` stay. With
      ``shuffle=True`` every iteration is a new epoch, whose order depends on ``seed``, the epoch
      and the number of samples only. A sampler or batch sampler of your own is run on every rank
      with the same random numbers (and ``set_epoch``, if it has that) and has to give the same
      order there. Batches of a batch sampler stay whole where those of a step have one size. The
      loader has ``state_dict()`` and ``load_state_dict()``: its position, to resume on any number
      of ranks. Every rank has to iterate over it equally often. ``loader.dataset`` is this rank's
      part, as of a Dataset below: ``correct / len(loader.dataset)`` is the accuracy on it, to be
      averaged with ``weight=len(loader.dataset)``. Another loader that is made of
      ``loader.dataset`` and ``loader.batch_sampler`` reads the same batches; the position then
      moves at the ends of epochs.
      Where MPI may use InfiniBand, workers are not forked, which that can break, but started by
      ``forkserver``, unless the loader has a ``multiprocessing_context``: what the script runs
      stands under ``if __name__ == "__main__"`` then, and the dataset and functions pickle.
    - **Loader of an IterableDataset**: every rank reads the whole stream, which has to be the same
      everywhere, and keeps its part. With workers, the dataset has to split itself among them, as
      without hvkit. It has no position to resume from.
    - **Dataset**: every N-th sample, repeated to equal length: a ``Subset`` that has the
      attributes of the dataset.
    - **Arrays** of shape (n, ...): every N-th row, repeated to equal length; views where nothing
      is repeated.
    - **tf.data.Dataset**: a pipeline that ends in batches is regrouped into the batches of N
      ranks. Where a ``map``, ``filter`` or another function comes after the last batch, elements
      stay whole (a batch, or a sequence cut by ``batch``) and every N-th is taken, as of a pipeline
      without batches; that is cheapest right after the source. Where ``batch`` cuts sequences,
      call shard after the ``map`` that follows it, not between the two. Shuffles need a seed, and
      the same ``tf.random.set_seed`` on every rank. Infinite ones stay so.
    - **PyDataset**: batch i of this rank is batch i*N + rank; the last N are divided evenly.
      ``on_epoch_end`` runs with the same random numbers on every rank. It has ``state_dict()`` and
      ``load_state_dict()``, which run it as often as the saved epochs did. ``fit`` shuffles the
      batches by Python's ``random`` unless ``shuffle=False``: each rank then still sees its part
      once in an epoch, but steps are as in one process only if ``random`` is seeded alike.

    For training it is a call that every rank has to make, with the same data in the same order:
    split and permute data with a seed that the ranks share. Ranks compare lengths, rows of arrays,
    indices of a ``Subset`` and the labels of a PyDataset's first batch. They have to iterate
    equally often, too: look at samples in the original data.

    Args:
        data: see above.
        exact: for evaluation.
        seed: of the order in which a DataLoader shuffles; not negative, the same on every rank.

    Raises:
        TypeError: ``data`` is of another kind, or an argument of another type.
        ValueError: a negative seed, arrays of different lengths, a ``DistributedSampler``, a
            shuffle without seed, or another thing that leaves ranks without a common order; a
            part that was returned before, unless it is arrays.
        RanksDisagreeError: the ranks passed different data or arguments.
    """
    share = Share(runtime.rank(), runtime.size(), exact is True)
    problem: Exception | None = None
    part: Any = None
    facts: list[str] = []
    try:
        part, facts = shard_for(data, share, _checked(exact, seed))
    except Exception as error:
        problem = error
    if exact is True and not facts:
        if problem is not None:
            raise problem
        return part  # type: ignore[no-any-return]
    raise_together(problem, "shard")
    fix = (
        "pass the same data and arguments to hvkit.shard on every rank; where the data is split or "
        "permuted, by the same seed"
    )
    require_equal("data", facts, fix, "shard")
    return part  # type: ignore[no-any-return]


class Part(NamedTuple):
    """What is handed out, and what of it the ranks have to have alike.

    For evaluation there are facts only where ranks could disagree about the order: code for it
    should need no other rank.
    """

    data: Any
    facts: list[str]


def shard_for(data: Any, share: Share, seed: int) -> Part:
    """The part of one rank; no collective.

    Raises:
        TypeError, ValueError: as :func:`shard`.
    """
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    keras = sys.modules.get("keras")
    if torch is not None and isinstance(data, torch.utils.data.DataLoader):
        from hvkit.data.pytorch import shard_loader

        part = Part(*shard_loader(data, share, seed))
    elif torch is not None and isinstance(data, torch.utils.data.Dataset):
        from hvkit.data.dataset import shard_dataset

        part = Part(*shard_dataset(data, share, seed))
    elif tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        from hvkit.data.tfdata import shard_tfdata

        return Part(*shard_tfdata(data, share))
    elif keras is not None and isinstance(data, keras.utils.PyDataset):
        from hvkit.data.pydataset import ShardedPyDataset, facts_of

        part = Part(ShardedPyDataset(data, share, seed), facts_of(data, share, seed))
    elif is_arrays(data):
        facts = [f"arrays of {rows_of(data)} rows", f"rows of sha256 {digest_of_rows(data)}"]
        part = Part(shard_arrays(data, share), facts)
    else:
        raise TypeError(_refusal(data))
    return Part(part.data, [] if share.exact else [*part.facts, f"seed {seed}"])


def _checked(exact: object, seed: object) -> int:
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be True or False, got {exact!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return seed


def _refusal(data: object) -> str:
    text = f"data must be {_ACCEPTED}; got {type(data).__module__}.{type(data).__qualname__}"
    if hasattr(data, "__next__"):
        return f"{text}, which can be read only once and has no known end: make one of these of it"
    if hasattr(data, "to_numpy"):
        return f"{text}: pass data.to_numpy()"
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return f"{text}: pass a DataLoader of it"
    return text
