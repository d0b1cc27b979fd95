"""``shard``: each rank's part of the data, as an object of the same kind."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeVar

from hvkit import runtime
from hvkit.communication.collectives import raise_together, require_equal
from hvkit.data.arrays import digest_of_rows, is_arrays, rows_of, shard_arrays
from hvkit.data.order import Share
from hvkit.watch.calls import named

Data = TypeVar("Data")

_ACCEPTED = (
    "a torch DataLoader or Dataset, a tf.data.Dataset, a keras.utils.PyDataset, or arrays: one, or "
    "a tuple, list or dict of them"
)


@named("hvkit.shard")
def shard(
    data: Data, *, exact: bool = False, seed: int | None = None, dynamic: bool = False
) -> Data:
    """This rank's part of the data, as an object of the same kind.

    For training, all ranks get the same number of batches, with equal sizes in each step, and
    together all samples. A batch size is that of one rank: step k of N ranks reads what one
    process with an N times larger batch would read in step k. If the samples of the last step
    cannot be divided evenly, fewer than N of them are repeated; with ``drop_last`` the step is
    left out instead.

    For evaluation, pass ``exact=True``: every sample is on exactly one rank, in the original
    order, even with a DataLoader's ``drop_last`` (samples that ``drop_remainder`` dropped in
    tf.data stay dropped). Parts may differ by one sample, by one element of tf.data, or by one
    batch of a batch sampler, and may be empty. One rank may evaluate alone, but not with a sampler
    of your own, since ranks compare what it returns.

    With one rank the result reads what ``data`` reads, bit for bit, unless there is a ``seed``.

    - **DataLoader**: keeps its collate function, workers, pinning and ``drop_last``. Every
      iteration is a new epoch. Your sampler or batch sampler, or that of ``shuffle=True``, runs on
      every rank. It begins with the states of rank 0's random generators (Python's, NumPy's,
      PyTorch's, and its ``generator``), so N ranks read what rank 0 would read in one process, and
      must return the same order everywhere. It is read step by step, and may have no end and no
      length. The batches of a batch sampler of your own stay whole, whatever their sizes: each
      rank takes one of N. If fewer than N are left for the last step, some ranks repeat one.
      The loader has ``state_dict()`` and ``load_state_dict()`` for its position, to resume on any
      number of ranks. Every rank must iterate over it equally often. ``loader.dataset`` is this
      rank's part, as for a Dataset below: ``correct / len(loader.dataset)`` is the accuracy on it;
      average it with ``weight=len(loader.dataset)``. Another loader made from ``loader.dataset``
      and ``loader.batch_sampler`` reads the same batches; the position then moves only when an
      epoch ends.
      If MPI may use InfiniBand, where forks are not safe, ``forkserver`` starts the workers unless
      the loader has a ``multiprocessing_context``. The script then needs
      ``if __name__ == "__main__"``, and the dataset and functions must pickle.
    - **DataLoader of an IterableDataset**: every rank reads the whole stream, which must be the
      same everywhere, and keeps its part. With workers, the dataset must split itself among them,
      as without hvkit. It has no position to resume from.
    - **Dataset**: every N-th sample, repeated to equal length: a ``Subset`` that has the
      attributes of the dataset.
    - **Arrays** of shape (n, ...): every N-th row, repeated to equal length; views if nothing is
      repeated.
    - **tf.data.Dataset**: a pipeline that ends in batches is regrouped into the batches of N
      ranks. If a ``map``, ``filter`` or other function follows the last batch, elements stay whole
      (a batch, or a sequence cut by ``batch``), and this rank takes every N-th element, as from a
      pipeline without batches; that is cheapest right after the source. If ``batch`` cuts
      sequences, call shard after the ``map`` that follows it, not between the two. Shuffles need a
      seed, and the same ``tf.random.set_seed`` on every rank. Infinite pipelines stay infinite.
    - **PyDataset**: batch i of this rank is batch i*N + rank; the last N are divided evenly, or if
      their samples have different shapes, stay whole, and some are repeated. ``on_epoch_end`` runs
      on every rank with the states of rank 0's random generators. It has ``state_dict()`` and
      ``load_state_dict()``, which call ``on_epoch_end`` once for each saved epoch. ``fit`` shuffles
      the batches with Python's ``random`` unless ``shuffle=False``: each rank still sees its part
      once in an epoch, but steps match those of one process only if all ranks seed ``random``
      alike.

    For training, every rank must call it with the same data in the same order: split and permute
    data with a seed that all ranks share. Ranks compare lengths, rows of arrays, the indices of a
    ``Subset`` and the labels of a PyDataset's first batch. They must also iterate equally often, so
    look at samples in the original data.

    With ``dynamic=True`` a rank gets no part: each batch goes to the rank that wants one next, so
    fast ranks take more, and together they read each sample once in an epoch. This is for training
    with ``hvkit.ParameterServer``, whose ranks may take different numbers of steps, and which hands
    out the batches; ``staleness=None`` lets fast ranks go ahead. It takes a DataLoader with a
    ``batch_size`` and PyTorch's own samplers, whose length is then the mean over ranks, or a
    ``tf.data.Dataset``, whose elements every rank reads and skips. Workers take batches ahead: a
    run that is resumed in the middle of an epoch leaves out those that they had not delivered.

    Args:
        data: one of the kinds above.
        exact: True for evaluation.
        seed: None for the order that rank 0 would read in one process. With a number, not
            negative and the same on every rank, the random numbers of an epoch (of samplers and of
            ``on_epoch_end``) begin with a seed computed from ``seed`` and the epoch, also with one
            rank, and draw none from the global generators; ``set_epoch`` of your sampler is called.
            An ``IterableDataset`` on several ranks, and ``dynamic=True``, use 0 for None.
        dynamic: whether each batch goes to the rank that wants one next; not with ``exact``.

    Raises:
        TypeError: ``data`` is of another kind, or an argument of another type.
        ValueError: a negative seed, arrays of different lengths, a ``DistributedSampler``, a
            shuffle without seed, or anything else that leaves ranks without a common order; or
            ``data`` is already a part, unless it is arrays.
        RanksDisagreeError: the ranks passed different data or arguments.
    """
    share = Share(runtime.rank(), runtime.size(), exact is True)
    if share.size > 1 and "tensorflow" in sys.modules:
        from hvkit.data.tfdata_files import give_ranks_files_of_their_own

        give_ranks_files_of_their_own()
    problem: Exception | None = None
    part: Any = None
    facts: list[str] = []
    try:
        checked = _checked(exact, seed)
        if _is_dynamic(dynamic, share):
            part, facts = _dynamic(data, share, checked)
        if not dynamic or share.size == 1:
            part, facts = shard_for(data, share, checked)
    except Exception as error:
        problem = error
    if exact is True and not facts:
        if problem is not None:
            raise problem
        return part  # type: ignore[no-any-return]
    raise_together(problem, "shard")
    fix = (
        "pass the same data and arguments to hvkit.shard on every rank; if the script splits or "
        "permutes the data, use the same seed on all ranks"
    )
    require_equal("data", facts, fix, "shard")
    return part  # type: ignore[no-any-return]


class Part(NamedTuple):
    """One rank's part of the data, and the facts that must be equal on all ranks.

    For evaluation there are facts only if ranks could disagree about the order: evaluation on one
    rank alone must not wait for the others.
    """

    data: Any
    facts: list[str]


def shard_for(data: Any, share: Share, seed: int | None) -> Part:
    """The part of one rank; not a collective.

    Raises:
        TypeError, ValueError: as ``shard``.
    """
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    keras = sys.modules.get("keras")
    if torch is not None and isinstance(data, torch.utils.data.DataLoader):
        from hvkit.data.pytorch_loader import shard_loader

        part = Part(*shard_loader(data, share, seed))
    elif torch is not None and isinstance(data, torch.utils.data.Dataset):
        from hvkit.data.pytorch_datasets import shard_dataset

        part = Part(*shard_dataset(data, share, seed))
    elif tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        from hvkit.data.tfdata import shard_tfdata

        return Part(*shard_tfdata(data, share))
    elif keras is not None and isinstance(data, keras.utils.PyDataset):
        from hvkit.data.keras_pydataset import ShardedPyDataset, facts_of

        part = Part(ShardedPyDataset(data, share, seed), facts_of(data, share, seed))
    elif is_arrays(data):
        facts = [f"arrays of {rows_of(data)} rows", f"rows of sha256 {digest_of_rows(data)}"]
        part = Part(shard_arrays(data, share), facts)
    else:
        raise TypeError(_refusal(data))
    return Part(part.data, [] if share.exact else [*part.facts, f"seed {seed}"])


def _is_dynamic(dynamic: object, share: Share) -> bool:
    if not isinstance(dynamic, bool):
        raise TypeError(f"dynamic must be True or False, got {dynamic!r}")
    if dynamic and share.exact:
        raise ValueError(
            "exact=True gives every rank the same part each time, and dynamic=True gives it what "
            "it has time for: choose one"
        )
    return dynamic


def _dynamic(data: Any, share: Share, seed: int | None) -> Part:
    """The batches that a rank takes; not a collective.

    Raises:
        TypeError, ValueError: as ``shard``.
    """
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(data, torch.utils.data.DataLoader):
        from hvkit.data.pytorch_loader import dynamic_loader

        part = Part(*dynamic_loader(data, share, seed))
    elif tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        from hvkit.data.tfdata import dynamic_tfdata

        part = Part(*dynamic_tfdata(data, share))
    else:
        raise TypeError(
            "dynamic=True takes a torch DataLoader or a tf.data.Dataset, got "
            f"{type(data).__module__}.{type(data).__qualname__}: convert it to one of these, or "
            "leave dynamic out, and each rank gets its part"
        )
    return Part(part.data, [*part.facts, f"seed {seed}", "dynamic"])


def _checked(exact: object, seed: object) -> int | None:
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be True or False, got {exact!r}")
    if seed is None:
        return None
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return seed


def _refusal(data: object) -> str:
    text = f"data must be {_ACCEPTED}; got {type(data).__module__}.{type(data).__qualname__}"
    if hasattr(data, "__next__"):
        return f"{text}, which can be read only once and may not end: convert it to one of these"
    if hasattr(data, "to_numpy"):
        return f"{text}: pass data.to_numpy()"
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return f"{text}: pass a DataLoader of it"
    return text
