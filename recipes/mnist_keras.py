"""MNIST in Keras with ``model.fit``: a convolutional network, trained on any number of ranks."""

import common
import keras
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


def batches(flags, images):
    """This rank's batches of all epochs, one after the other."""
    for epoch in range(flags.epochs):
        for rows in common.train_batches(flags, images, epoch):
            pixels, labels = images.batch(rows)
            yield pixels[..., None], labels


def decayed(epoch, learning_rate):
    return learning_rate * common.LR_DECAY if epoch > 0 else learning_rate


class ReportProgress(keras.callbacks.Callback):
    """Reports the loss during an epoch, and the test over all ranks after it."""

    def __init__(self, report, test_images, batch_size):
        super().__init__()
        self.report = report
        self.test_images = common.own_part(test_images)
        self.batch_size = batch_size

    def on_epoch_begin(self, epoch, logs=None):
        self.report.start_epoch()

    def on_train_batch_end(self, batch, logs):
        self.report.step(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        pixels, labels = self.test_images.batch(slice(None))
        loss, accuracy = self.model.evaluate(
            pixels[..., None], labels, batch_size=self.batch_size, verbose=0
        )
        # The parts are unequal, so the ranks' sums are combined, not their means.
        images = len(labels)
        self.report.end_epoch(
            *common.over_all_ranks(loss * images, round(accuracy * images), images)
        )


def main():
    flags = common.parse_flags(__doc__)
    data = common.load_data(flags)

    # Rank 0's weights go to all ranks; dropout is drawn by each rank for itself.
    keras.utils.set_random_seed(flags.seed + hvkit.rank())
    model = make_model()
    optimizer = keras.optimizers.SGD(learning_rate=flags.lr, momentum=flags.momentum)
    model, optimizer = hvkit.distribute(model, optimizer)

    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with common.Report(flags, data) as report:
        model.fit(
            batches(flags, data.train),
            steps_per_epoch=report.steps,
            epochs=flags.epochs,
            shuffle=False,
            callbacks=[
                keras.callbacks.LearningRateScheduler(decayed),
                ReportProgress(report, data.test, flags.test_batch_size),
            ],
            verbose=0,
        )


if __name__ == "__main__":
    main()
