"""If ranks would read different orders, all ranks get an error and none waits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from ranks import error_of
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch_nets import raised_everywhere

import hvkit
from hvkit.data import shard


def last():
    return hvkit.rank() == hvkit.size() - 1


def loader(length=10, **options):
    return DataLoader(TensorDataset(torch.arange(length)), batch_size=2, **options)


class Mine(Sampler):
    """Another order on each rank, or an error on the last rank."""

    def __init__(self, fails=False):
        self.fails = fails

    def __len__(self):
        return 10

    def __iter__(self):
        if self.fails and last():
            raise KeyError("lost")
        return iter(np.random.default_rng(hvkit.rank()).permutation(10).tolist())


def split():
    return np.random.default_rng(last()).permutation(20)[:10].tolist()


class Labelled(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.random.normal(size=(2, 3)), np.array([i, i + last()])


def shuffled():
    return tf.data.Dataset.range(9).shuffle(9, seed=1 + last())


DIFFERENT = {
    "length": lambda: shard(np.zeros(10 + last())),
    "dataset": lambda: shard(loader(10 + last())),
    "batch size": lambda: shard(tf.data.Dataset.range(10).batch(2 + last())),
    "seed": lambda: shard(loader(shuffle=True), seed=int(last())),
    "seed of a pipeline": lambda: shard(tf.data.Dataset.range(10), seed=int(last())),
    "rows": lambda: shard(np.random.default_rng(last()).normal(size=(50, 2))),
    "tensors": lambda: shard(DataLoader(TensorDataset(torch.arange(10) + last()))),
    "split": lambda: shard(torch.utils.data.Subset(range(20), split())),
    "labels": lambda: shard(Labelled()),
    "shuffle": lambda: shard(shuffled()),
    "exact shuffle": lambda: shard(shuffled(), exact=True),
    "order": lambda: iter(shard(loader(sampler=Mine()))),
    "exact order": lambda: list(shard(loader(sampler=Mine()), exact=True)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFERENT)
def test_data_that_differs_between_ranks_is_an_error_on_all(kind):
    assert raised_everywhere(DIFFERENT[kind])


def test_ranks_with_different_global_seeds_disagree_about_a_pipelines_order():
    tf.random.set_seed(1 + hvkit.rank())
    data = tf.data.Dataset.range(9).shuffle(9, seed=1)
    assert raised_everywhere(lambda: shard(data), "shuffle with seeds")
    tf.random.set_seed(None)
    data = tf.data.Dataset.range(9).shuffle(9)  # without a seed at all
    assert raised_everywhere(lambda: shard(data), kind=ValueError)


def test_wrong_data_on_one_rank_is_an_error_on_all():
    error, text = error_of(lambda: shard("no data" if last() else np.zeros(9)))
    assert error is TypeError
    assert "got builtins.str" in text


def test_a_sampler_that_fails_on_one_rank_is_an_error_on_all():
    error, text = error_of(lambda: iter(shard(loader(sampler=Mine(fails=True)))))
    assert error is (KeyError if last() else hvkit.HvkitError)
    assert "lost" in text


def test_evaluation_needs_no_other_rank():
    if hvkit.rank() == 0:
        part = shard(loader(11, sampler=torch.utils.data.RandomSampler(range(11))), exact=True)
        counts = [len(part.dataset), sum(len(batch) for (batch,) in part)]
        assert counts == [-(-11 // hvkit.size())] * 2
        with pytest.raises(TypeError, match="str"):
            shard("no data", exact=True)
    hvkit.barrier()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_loop_may_leave_an_evaluation_where_only_some_ranks_have_another_batch(limit):
    length = 4 * hvkit.size() + 1  # two batches for each rank, and one more for rank 0
    part = shard(loader(length), exact=True)
    for number, _ in enumerate(part):
        if number == limit:
            break
    assert number == min(limit, len(part) - 1)
    hvkit.barrier()


def test_sums_divided_by_the_length_of_the_dataset_are_right():
    """Common scripts evaluate and report this way: a sum divided by ``len(loader.dataset)``."""
    part = shard(loader(101), exact=True)
    mean = sum(float(batch.sum()) for (batch,) in part) / len(part.dataset)
    assert 100.0 * sum(len(batch) for (batch,) in part) / len(part.dataset) == 100.0
    assert hvkit.average(mean, weight=len(part.dataset)) == pytest.approx(50.0)
    train = shard(loader(60, shuffle=True))
    mean = sum(float(batch.sum()) for (batch,) in train) / len(train.dataset)
    assert hvkit.average(mean) == pytest.approx(29.5)


def test_a_look_at_the_first_batch_on_one_rank_is_noticed_in_the_next_epoch():
    part = shard(loader(20, shuffle=True))
    if hvkit.rank() == 0:
        next(iter(part))
    text = "equally often on every rank"
    assert raised_everywhere(lambda: list(part), "epoch 1", text)


def test_a_look_at_the_first_batch_on_all_ranks_is_an_epoch():
    part = shard(loader(20, shuffle=True))
    next(iter(part))
    list(part)
    assert part.state_dict() == {"epoch": 2, "samples": 0}
