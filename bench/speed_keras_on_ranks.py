"""What ``bench/speed.py`` starts on every rank for Keras, as ``speed_on_ranks.py`` for PyTorch.

The network is the MNIST recipe's. Ways to train it: ``fit``, and a custom loop.
"""

import argparse
import json
import time

import keras
import tensorflow as tf
from turns import Turns, horovod_as_published

BATCH = 64


def network():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def data():
    images = tf.random.stateless_normal((BATCH * 10, 28, 28, 1), (0, 1))
    labels = tf.random.stateless_uniform((BATCH * 10,), (0, 2), 0, 10, tf.int32)
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, True)
    return batches.cache().repeat()


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Follow(keras.callbacks.Callback):
    """Takes steps as an iterator yields, and stops when it ends."""

    def __init__(self, turns):
        super().__init__()
        self._turns = iter(turns)
        next(self._turns)

    def on_train_batch_end(self, batch, logs=None):
        if next(self._turns, "ended") == "ended":
            self.model.stop_training = True


def by_fit(model, optimizer, turns):
    model.compile(optimizer=optimizer, loss=LOSS)
    # One epoch without end: turns are not to meet what happens between epochs.
    model.fit(data(), steps_per_epoch=1 << 40, verbose=0, callbacks=[Follow(turns)])


def by_loop(model, optimizer, turns, run=None):
    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(images, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [each.value for each in variables])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    for _, (images, labels) in zip(turns, data(), strict=False):
        run(step, images, labels) if run else step(images, labels).numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["alone", "hvkit", "mwms", "horovod", "horovod's names"])
    parser.add_argument("way", choices=["fit", "loop"])
    parser.add_argument("turns", nargs="?", help="the bench's socket; without: one step")
    flags = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    run = None
    if flags.peer == "mwms":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model, optimizer = network(), keras.optimizers.SGD(0.01)

        def run(step, images, labels):
            return strategy.run(step, (images, labels))

    else:
        model, optimizer = network(), keras.optimizers.SGD(0.01)
    if flags.peer == "hvkit":
        import hvkit

        model, optimizer = hvkit.distribute(model, optimizer)
    if flags.peer.startswith("horovod"):
        import horovod.tensorflow as hvd
        from horovod.tensorflow.keras import DistributedOptimizer

        if flags.peer == "horovod":
            horovod_as_published()
        hvd.init()
        hvd.broadcast_variables(model.variables, root_rank=0)
        if flags.way == "fit":
            optimizer = DistributedOptimizer(optimizer)
        else:
            plain = tf.GradientTape
            tf.GradientTape = lambda: hvd.DistributedGradientTape(plain())
    turns = Turns(flags.turns) if flags.turns else range(1)
    if flags.way == "fit":
        by_fit(model, optimizer, turns)
    else:
        by_loop(model, optimizer, turns, run)
    print("\n" + json.dumps([time.time()]) + "\n", flush=True)


if __name__ == "__main__":
    main()
