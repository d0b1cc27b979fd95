"""MNIST in Keras with ``model.fit``: a convolutional network, trained on any number of ranks."""

import math

import common
import keras
from common.for_keras import ReportProgress
from keras import layers

import hvkit

hvkit.init()


def make_model() -> keras.Model:
    """Images of 28x28 in, ten logits out."""
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def decayed(epoch, learning_rate):
    return learning_rate * common.MNIST_DECAY if epoch > 0 else learning_rate


def main():
    flags = common.parse_flags(__doc__)
    data = common.load_data(flags)
    pixels, labels = hvkit.shard(data.train.batch(slice(None)))
    steps = math.ceil(len(labels) / flags.batch_size)

    # Each rank draws its own dropout; distribute copies rank 0's weights to all ranks.
    keras.utils.set_random_seed(flags.seed + hvkit.rank())
    model = make_model()
    optimizer = keras.optimizers.SGD(learning_rate=flags.lr, momentum=flags.momentum)
    monitor = common.make_monitor(flags, steps)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        lr_scaling="linear",
        monitor=monitor,
    )

    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with common.Report(flags, data, steps, monitor) as report:
        model.fit(
            pixels,
            labels,
            batch_size=flags.batch_size,
            epochs=flags.epochs,
            validation_data=hvkit.shard(data.test.batch(slice(None)), exact=True),
            validation_batch_size=flags.test_batch_size,
            callbacks=[
                keras.callbacks.LearningRateScheduler(decayed),
                ReportProgress(report),
            ],
            verbose=0,
        )


if __name__ == "__main__":
    main()
