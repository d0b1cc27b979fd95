"""Every rank's part of a tf.data pipeline."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from shards import (
    check_exact,
    check_rows,
    check_training,
    flat,
    more,
    numbers,
    parts,
)

Data = tf.data.Dataset
UNKNOWN, INFINITE = tf.data.UNKNOWN_CARDINALITY, tf.data.INFINITE_CARDINALITY


@pytest.fixture(autouse=True)
def _no_seed():
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


def unknown(data):
    """The same elements, with an unknown length."""
    return data.filter(lambda *_: True)


class Pair(NamedTuple):
    row: tf.Tensor
    target: tf.Tensor


def ragged(length):
    return Data.range(length).map(lambda i: tf.fill([i % 3 + 1], i))


def pairs(length):
    """Samples of one shape that TensorFlow does not know."""
    return Data.range(length).map(lambda i: tf.fill([tf.minimum(i + 2, 2)], i))


def firsts(batches):
    rows = (batch.to_list() if isinstance(batch, tf.RaggedTensor) else batch for batch in batches)
    return [[int(row[0]) for row in batch] for batch in rows]


BATCHED = {
    "batch": (lambda n: Data.range(n).batch(4), numbers),
    "parallel": (lambda n: Data.range(n).batch(4, num_parallel_calls=2), numbers),
    "map before, cache, prefetch": (
        lambda n: Data.range(n).map(lambda x: x + 0).batch(4).cache().prefetch(2), numbers,
    ),
    "mapped and batched again": (
        lambda n: Data.range(n).batch(3).map(lambda x: x).unbatch().batch(4), numbers,
    ),
    "rebatch": (lambda n: Data.range(n).batch(3).rebatch(4), numbers),
    "padded": (lambda n: ragged(n).padded_batch(4), firsts),
    "padded to one shape": (lambda n: ragged(n).padded_batch(4, [3]), firsts),
    "ragged and dense": (
        lambda n: Data.zip((ragged(n).ragged_batch(4), pairs(n).batch(4))),
        lambda batches: firsts(rows for rows, _ in batches),
    ),
    "ragged": (lambda n: ragged(n).ragged_batch(4), firsts),
    "tuples": (
        lambda n: Data.range(n).map(lambda i: (i, {"y": i})).batch(4),
        lambda batches: numbers(x for x, _ in batches),
    ),
    "zipped": (
        lambda n: Data.zip((Data.range(n).batch(4), Data.range(n).batch(4))),
        lambda batches: numbers(x for x, _ in batches),
    ),
    "strings": (
        lambda n: Data.range(n).map(tf.strings.as_string).batch(4),
        lambda batches: numbers([s.numpy() for s in batch] for batch in batches),
    ),
}  # fmt: skip


# TensorFlow or hvkit does not know the number of batches of these.
UNCOUNTED = ("zipped", "rebatch", "ragged and dense", "mapped and batched again")


@pytest.mark.parametrize(
    ("kind", "length", "size"),
    [
        *[("batch", length, size) for length in (0, 7, 201) for size in (1, 3)],
        *[(kind, 23, 3) for kind in BATCHED],
        *[more(kind, length, length + 2) for kind in BATCHED for length in (0, 1)],
    ],
)
def test_steps_of_batches_are_those_of_one_process(kind, length, size):
    make, read = BATCHED[kind]
    for exact in (False, True):
        ranks = parts(lambda: make(length), size, exact=exact)
        seen = [read(rank) for rank in ranks]
        if exact:
            check_exact(seen, list(range(length)))
        else:
            check_training(seen, list(range(length)), 4)
        if kind not in UNCOUNTED:
            lengths = [len(batches) for batches in seen]
            assert [int(rank.cardinality()) for rank in ranks] == lengths
        assert all(rank.element_spec == make(length).element_spec for rank in ranks)


@pytest.mark.parametrize("kind", ["batch", "padded", "ragged"])
@pytest.mark.parametrize(
    ("length", "size", "known"),
    [
        *((0, 2, False), (7, 2, False), (31, 3, False)),
        *(more(0, 2, True), more(7, 1, True), more(24, 2, True), more(31, 3, True)),
    ],
)
def test_an_incomplete_step_is_dropped_if_incomplete_batches_are(length, size, known, kind):
    def make():
        samples = Data.range(length) if kind == "batch" else ragged(length)
        how = {"batch": Data.batch, "padded": Data.padded_batch, "ragged": Data.ragged_batch}[kind]
        return how(samples if known else unknown(samples), 4, drop_remainder=True)

    read = numbers if kind == "batch" else firsts
    ranks = parts(make, size)
    seen = [read(rank) for rank in ranks]
    check_training(seen, list(range(length - length % 4)), 4, drop_last=True)
    assert all(rank.element_spec == make().element_spec for rank in ranks)
    if known:
        assert [int(rank.cardinality()) for rank in ranks] == [len(batches) for batches in seen]
    exact = [read(rank) for rank in parts(make, size, exact=True)]
    check_exact(exact, list(range(length - length % 4)))


def by_rows(part):
    return [int(row[0]) for row in part]


def by_targets(part):
    return [int(target) for _, target in part]


ELEMENTS = {
    "known": (Data.range, lambda part: list(map(int, part))),
    "unknown": (lambda n: unknown(Data.range(n)), lambda part: list(map(int, part))),
    "of many shapes": (ragged, by_rows),
    "unknown, of many shapes": (lambda n: unknown(ragged(n)), by_rows),
    "tuples": (lambda n: Data.range(n).map(lambda i: ({"x": i}, i)), by_targets),
    "unknown tuples": (
        lambda n: unknown(Data.range(n).map(lambda i: ({"x": i}, i))), by_targets,
    ),
    "unknown named tuples of many shapes": (
        lambda n: unknown(ragged(n).map(lambda row: Pair(row, row[0]))),
        lambda part: [int(pair.target) for pair in part],
    ),
    "unknown tuples of many shapes": (
        lambda n: unknown(ragged(n).map(lambda row: ({"x": row}, row[0]))), by_targets,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "length", "size"),
    [
        *[
            (kind, length, n)
            for kind in ("known", "unknown")
            for length in (0, 201)
            for n in (1, 3)
        ],
        *[(kind, 7, 3) for kind in ELEMENTS],
        *[more(kind, length, length + 2) for kind in ELEMENTS for length in (0, 1)],
    ],
)
def test_without_batches_every_nth_element_is_taken(kind, length, size):
    make, read = ELEMENTS[kind]
    ranks = parts(lambda: make(length), size)
    rows = [read(rank) for rank in ranks]
    if "unknown" in kind:  # the last group repeats its own elements: its end was unknown
        check_training([[[row] for row in part] for part in rows], list(range(length)), 1)
    else:
        assert [int(rank.cardinality()) for rank in ranks] == list(map(len, rows))
        check_rows(rows, length)
    exact = [read(rank) for rank in parts(lambda: make(length), size, exact=True)]
    check_exact([[row] if row else [] for row in exact], list(range(length)))


def split(row):
    return row[:-1], row[1:]


def joined(element):
    inputs, targets = element
    return [int(inputs[0]), *map(int, targets)]


def augment(row):
    return row + 100


def classes(row):
    return tf.one_hot(row, 50)


class TakeDataset(Data):
    """A script's step, which does not do what TensorFlow's ``_TakeDataset`` does."""

    def __init__(self, data):
        self._data, self._made = data, data.map(split)
        super().__init__(self._made._variant_tensor)

    def _inputs(self):
        return [self._data]

    @property
    def element_spec(self):
        return self._made.element_spec


SEQUENCES = {
    "split": (lambda data: data.map(split), joined),
    "split in parallel": (lambda data: data.map(split, num_parallel_calls=2).prefetch(1), joined),
    "split, of unknown number": (lambda data: unknown(data.map(split)), joined),
    "one_hot": (lambda data: data.map(classes), lambda x: x.numpy().argmax(-1).tolist()),
    "filter": (unknown, lambda x: x.numpy().tolist()),
    "interleave": (
        lambda data: data.interleave(Data.from_tensors, cycle_length=1),
        lambda x: x.numpy().tolist(),
    ),
    "chosen": (
        lambda data: Data.choose_from_datasets([data, data.take(0)], Data.range(1).repeat()),
        lambda x: x.numpy().tolist(),
    ),
    "a script's class": (TakeDataset, joined),
}  # fmt: skip
every_two = pytest.mark.parametrize("size", [more(2), 3])


@every_two
@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequences_made_by_batch_and_a_function_stay_whole(kind, size):
    make, read = SEQUENCES[kind]
    sequences = [list(range(start, start + 5)) for start in range(0, 35, 5)]

    def pipeline():
        return make(Data.range(37).batch(5, drop_remainder=True))

    ranks = [[read(element) for element in part] for part in parts(pipeline, size)]
    together = flat(zip(*ranks, strict=True))
    assert together[: len(sequences)] == sequences
    assert all(sequence in sequences for sequence in together)
    assert len(together) - len(sequences) < size, "more repetitions than needed"
    exact = [[read(element) for element in part] for part in parts(pipeline, size, exact=True)]
    assert exact == [sequences[rank::size] for rank in range(size)]


@every_two
def test_sequences_that_are_batched_after_the_map_are_regrouped(size):
    def pipeline():
        return Data.range(60).batch(5, drop_remainder=True).map(split).batch(2)

    first, *_ = [[inputs[:, 0].numpy().tolist() for inputs, _ in p] for p in parts(pipeline, size)]
    assert first == [[2 * step * 5 * size, (2 * step + 1) * 5 * size] for step in range(6 // size)]


@every_two
def test_batches_that_are_mapped_stay_whole(size):
    def pipeline():
        return Data.range(22).batch(4).map(augment)

    batches = numbers(pipeline())
    ranks = [numbers(part) for part in parts(pipeline, size)]
    assert flat(zip(*ranks, strict=True)) == [*batches, *[batches[-1]] * (-len(batches) % size)]
    exact = [numbers(part) for part in parts(pipeline, size, exact=True)]
    assert exact == [batches[rank::size] for rank in range(size)]


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: Data.range(7).repeat().batch(4), 4),
        (lambda: Data.range(7).batch(4).repeat(), 4),
        (lambda: Data.range(7).repeat(), 1),
    ],
)
def test_an_infinite_pipeline_stays_infinite(make, batch):
    ranks = parts(make, 2)
    assert {int(rank.cardinality()) for rank in ranks} == {INFINITE}
    seen = [numbers(map(np.atleast_1d, rank.take(3))) for rank in ranks]
    order = flat(numbers(map(np.atleast_1d, make().take(12))))[: 6 * batch]
    check_training(seen, order, batch)


def test_infinite_mapped_batches_stay_infinite_and_whole():
    ranks = parts(lambda: Data.range(8).batch(4).map(augment).repeat(), 2)
    assert {int(rank.cardinality()) for rank in ranks} == {INFINITE}
    seen = [numbers(rank.take(3)) for rank in ranks]
    assert seen == [[[100, 101, 102, 103]] * 3, [[104, 105, 106, 107]] * 3]


def test_batches_of_an_unknown_number_and_of_repeated_epochs():
    unknown_number = parts(lambda: unknown(Data.range(23)).batch(4), 3)
    check_training([numbers(rank) for rank in unknown_number], list(range(23)), 4)
    twice = parts(lambda: Data.range(7).batch(4).repeat(2), 2)
    check_training([numbers(rank) for rank in twice], [*range(7), *range(7)], 4)


@pytest.mark.parametrize("after", [False, True])
def test_a_seeded_shuffle_is_the_one_order_of_all_ranks_in_every_epoch(after):
    def make():
        shuffled = Data.range(50).shuffle(50, seed=3)
        return shuffled.map(lambda x: x).batch(4) if after else shuffled

    one = make()
    ranks = parts(make, 3)
    orders = []
    for _ in range(3):
        if after:
            orders.append(flat(numbers(one)))
            check_training([numbers(rank) for rank in ranks], orders[-1], 4)
        else:
            orders.append([int(i) for i in one])
            rows = [[int(i) for i in rank] for rank in ranks]
            assert flat(zip(*rows, strict=True))[:50] == orders[-1]
    assert orders[0] != orders[1]


UNSEEDED = {
    "shuffle": lambda: Data.range(9).shuffle(9).batch(2),
    "before a cache": lambda: Data.range(9).shuffle(9).cache().batch(2).prefetch(1),
    "files": lambda: Data.list_files("/*"),
    "inside": lambda: Data.range(3).interleave(lambda i: Data.range(3).shuffle(3)),
    "mixed": lambda: Data.sample_from_datasets([Data.range(3), Data.range(3)]),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", UNSEEDED)
def test_an_unseeded_shuffle_is_refused(kind, exact):
    with pytest.raises(ValueError, match=r"use shuffle\(..., seed=...\)"):
        parts(UNSEEDED[kind], 2, exact=exact)
    parts(UNSEEDED[kind], 1, exact=exact)


def test_tensorflows_global_seed_is_a_seed():
    tf.random.set_seed(3)
    parts(UNSEEDED["shuffle"], 2)
    parts(UNSEEDED["inside"], 2)


def test_seeds_are_among_the_facts_that_ranks_compare():
    from hvkit.data.rank_samples import Split
    from hvkit.data.shard import shard_for

    facts = [
        shard_for(Data.range(9).shuffle(9, seed=seed), Split(0, 2, exact), 0)[1]
        for seed in (1, 2)
        for exact in (False, True)
    ]
    assert len({str(each) for each in facts}) == 4
    assert shard_for(Data.range(9), Split(0, 2, True), 0)[1] == []


def test_steps_that_give_up_the_order_are_refused_and_options_overruled():
    with pytest.raises(ValueError, match="map has deterministic=False"):
        parts(lambda: Data.range(9).map(lambda x: x, num_parallel_calls=2, deterministic=False), 2)
    options = tf.data.Options()
    options.deterministic = False
    (part, _) = parts(lambda: Data.range(9).with_options(options), 2)
    assert part.options().deterministic is True


def test_batches_that_cannot_be_regrouped_are_refused():
    with pytest.raises(ValueError, match=r"different sizes \(2, 3\)"):
        parts(lambda: Data.range(9).batch(2).concatenate(Data.range(9).batch(3)), 2)
    with pytest.raises(ValueError, match="before padded_batch"):
        parts(lambda: Data.zip((ragged(9).padded_batch(2), Data.range(9).batch(2))), 2)


def test_a_padded_batch_is_padded_with_the_users_value_again():
    (first, second) = parts(
        lambda: ragged(6).padded_batch(2, padding_values=tf.constant(-1, tf.int64)), 2
    )
    assert [batch.numpy().tolist() for batch in first] == [[[0, -1, -1], [2, 2, 2]], [[4, 4, -1]]]
    assert [batch.numpy().tolist() for batch in second] == [[[1, 1, -1], [3, -1, -1]], [[5, 5, 5]]]
