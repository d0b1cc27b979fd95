"""Keras: batches that the parameter server hands out, to the ranks that have time."""

import itertools

import numpy as np
import tensorflow as tf
from cases import MORE
from keras_models import alike, regression, served, tape_step
from ranks import Busy

import hvkit

pytestmark = MORE


def test_batches_go_to_the_ranks_that_have_time(tmp_path):
    busy = Busy(hvkit.broadcast(tmp_path), number=15)
    rows = np.arange(40, dtype=np.float32)
    pipeline = tf.data.Dataset.from_tensor_slices(rows).shuffle(40, seed=1).batch(2)
    pipeline = hvkit.shard(pipeline, dynamic=True)
    model, optimizer = served(None)
    for epoch in range(2):
        mine = []
        for batch in pipeline:
            x = np.broadcast_to(batch.numpy()[:, None] / 100, (2, 8))
            tape_step(model, optimizer, x, np.zeros((2, 4), np.float32))
            mine.append(batch.numpy().tolist())
            busy.take(epoch, len(mine))
        everyone = hvkit.allgather(mine)
        assert sorted(row for theirs in everyone for batch in theirs for row in batch) == [
            *range(40)
        ]
        assert len(everyone[0]) <= 20 - 15


def test_two_iterators_over_handed_out_batches_each_read_an_epoch():
    rows = range(12 * hvkit.size())
    pipeline = tf.data.Dataset.from_tensor_slices(np.arange(len(rows))).batch(1)
    pipeline = hvkit.shard(pipeline, dynamic=True)
    served(None)
    both = ([], [])
    for pair in itertools.zip_longest(iter(pipeline), iter(pipeline)):
        for taken, batch in zip(both, pair, strict=True):
            taken += [] if batch is None else [int(batch[0])]
    for mine in both:
        assert sorted(itertools.chain(*hvkit.allgather(mine))) == [*rows]


def test_fit_on_batches_that_are_handed_out():
    x, y = (np.concatenate(part) for part in zip(*regression(steps=10), strict=True))
    pipeline = hvkit.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(6), dynamic=True)
    model, optimizer = served(None)
    model.compile(optimizer, "mse")
    before = int(optimizer.iterations.numpy())
    model.fit(pipeline, epochs=2, verbose=0)
    steps = hvkit.allgather(int(optimizer.iterations.numpy()) - before)
    assert sum(steps) == 2 * 10 * hvkit.size()
    assert alike(model)
