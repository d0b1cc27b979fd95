"""What ``bench/speed.py`` starts on every rank for Keras, as ``speed_on_ranks.py`` for PyTorch.

The network is the MNIST recipe's. Ways to train it: ``fit``, and a custom loop.
"""

import argparse
import itertools
import json
import time

import keras
import tensorflow as tf

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


def data(steps):
    images = tf.random.stateless_normal((BATCH * 10, 28, 28, 1), (0, 1))
    labels = tf.random.stateless_uniform((BATCH * 10,), (0, 2), 0, 10, tf.int32)
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, True)
    return batches.cache().repeat().take(steps)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Seconds(keras.callbacks.Callback):
    """The seconds of each step; ``fit`` calls this after each of its executions."""

    def __init__(self):
        super().__init__()
        self.at = []

    def on_train_batch_end(self, batch, logs=None):
        self.at.append(time.perf_counter())


def by_fit(model, optimizer, steps):
    model.compile(optimizer=optimizer, loss=LOSS)
    seconds = Seconds()
    model.fit(data(steps), epochs=1, verbose=0, callbacks=[seconds])
    return seconds.at


def by_loop(model, optimizer, steps, run=None):
    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(images, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [each.value for each in variables])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    at = []
    for images, labels in data(steps):
        run(step, images, labels) if run else step(images, labels).numpy()
        at.append(time.perf_counter())
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["alone", "hvkit", "mwms", "horovod"])
    parser.add_argument("way", choices=["fit", "loop"])
    parser.add_argument("blocks", type=int, help="0: until the first step")
    parser.add_argument("steps", type=int, help="in a block")
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
    if flags.peer == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
        hvd.broadcast_variables([each.value for each in model.variables], root_rank=0)
        plain = tf.GradientTape
        tf.GradientTape = lambda: hvd.DistributedGradientTape(plain())
    train = by_fit if flags.way == "fit" else by_loop
    more = {} if flags.way == "fit" else {"run": run}
    if not flags.blocks:
        train(model, optimizer, 1, **more)
        print("\n" + json.dumps([time.time()]) + "\n", flush=True)
        return
    at = train(model, optimizer, flags.steps * (flags.blocks + 1) + 1, **more)
    ends = at[flags.steps :: flags.steps]
    seconds = [(b - a) / flags.steps for a, b in itertools.pairwise(ends)]
    print("\n" + json.dumps(seconds) + "\n", flush=True)


if __name__ == "__main__":
    main()
