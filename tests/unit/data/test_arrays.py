"""Every rank's part of arrays, and data that shard rejects."""

from collections import namedtuple

import numpy as np
import pytest
import tensorflow as tf
import torch
from shards import check_exact, check_rows, every_length, every_size, parts

from hvkit.data import shard

Pair = namedtuple("Pair", "x y")

KINDS = {
    "numpy": np.asarray,
    "torch": torch.as_tensor,
    "tensorflow": tf.constant,
}


@pytest.mark.parametrize("kind", KINDS)
@every_size
@every_length
def test_an_array_is_divided_by_rows(length, size, kind):
    rows = np.arange(length)

    def make():
        return KINDS[kind](rows)

    ranks = parts(make, size)
    assert {type(part) for part in ranks} == {type(make())}
    check_rows([[int(row) for row in part] for part in ranks], length)
    exact = parts(make, size, exact=True)
    check_exact([[part.tolist()] if len(part) else [] for part in map(np.asarray, exact)], rows)


def test_containers_keep_their_type_and_rows_stay_together():
    x, y = np.arange(14).reshape(7, 2), np.arange(7)
    for data, get in {
        "tuple": ((x, y), lambda part: part),
        "list": ([x, y], lambda part: part),
        "dict": ({"x": x, "y": y}, lambda part: (part["x"], part["y"])),
        "named": (Pair(x, y), lambda part: part),
        "nested": (({"a": x}, y), lambda part: (part[0]["a"], part[1])),
    }.values():
        for part in parts(lambda data=data: data, 3):
            assert type(part) is type(data)
            images, labels = get(part)
            assert images.shape == (3, 2)
            assert (images[:, 0] == 2 * labels).all()


def test_no_copy_is_made_where_nothing_is_repeated():
    rows = np.arange(8)
    assert all(np.shares_memory(part, rows) for part in parts(lambda: rows, 2))
    assert all(np.shares_memory(part, rows) for part in parts(lambda: rows, 3, exact=True))


def test_one_process_keeps_its_arrays():
    data = {"x": np.arange(3), "y": (np.arange(3), np.arange(3))}
    assert shard(data) is data


WRONG = {
    "lengths": ((np.zeros(3), np.zeros(4)), {}, ValueError, "same number of rows .* got 3, 4"),
    "scalar": (np.float32(3), {}, TypeError, "data must be a torch DataLoader"),
    "0-d": (np.zeros(()), {}, TypeError, "an array without dimensions"),
    "no array": ((np.zeros(3), 5), {}, TypeError, "holds a int, which is not an array"),
    "empty": ([], {}, TypeError, "at least one array"),
    "generator": ((i for i in range(3)), {}, TypeError, "got builtins.generator, which can"),
    "string": ("cifar", {}, TypeError, "got builtins.str"),
    "exact": (np.zeros(3), {"exact": 1}, TypeError, "exact must be True or False, got 1"),
    "seed": (np.zeros(3), {"seed": 1.5}, TypeError, "seed must be an int, got 1.5"),
    "negative": (np.zeros(3), {"seed": -1}, ValueError, "must not be negative, got -1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_say_what_came_and_what_is_accepted(kind):
    data, options, error, message = WRONG[kind]
    with pytest.raises(error, match=message):
        shard(data, **options)
