"""MNIST in a custom TensorFlow loop: a convolutional network, trained on any number of ranks."""

import common
import keras
import tensorflow as tf
from keras import layers

import hvkit

hvkit.init()

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


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


def train(train_step, images, batches, report):
    for rows in batches:
        pixels, labels = images.batch(rows)
        report.step(train_step(pixels[..., None], labels))


def evaluate(test_step, images, batch_size):
    """Loss and accuracy on all test images, each rank working on its own part of them."""
    images = common.own_part(images)
    loss_sum = correct = 0
    for start in range(0, len(images), batch_size):
        pixels, labels = images.batch(slice(start, start + batch_size))
        batch_loss, batch_correct = test_step(pixels[..., None], labels)
        loss_sum += float(batch_loss)
        correct += int(batch_correct)
    return common.over_all_ranks(loss_sum, correct, len(images))


def main():
    flags = common.parse_flags(__doc__)
    data = common.load_data(flags)

    # Rank 0's weights go to all ranks; dropout is drawn by each rank for itself.
    keras.utils.set_random_seed(flags.seed + hvkit.rank())
    model = make_model()
    optimizer = keras.optimizers.SGD(learning_rate=flags.lr, momentum=flags.momentum)
    model, optimizer = hvkit.distribute(model, optimizer)

    @tf.function
    def train_step(pixels, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(pixels, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function(reduce_retracing=True)
    def test_step(pixels, labels):
        logits = model(pixels, training=False)
        hits = tf.argmax(logits, axis=1) == labels
        count = tf.cast(tf.size(labels), tf.float32)
        return loss_of(labels, logits) * count, tf.math.count_nonzero(hits)

    with common.Report(flags, data) as report:
        for epoch in range(flags.epochs):
            report.start_epoch()
            train(train_step, data.train, common.train_batches(flags, data.train, epoch), report)
            optimizer.learning_rate.assign(optimizer.learning_rate * common.LR_DECAY)
            report.end_epoch(*evaluate(test_step, data.test, flags.test_batch_size))


if __name__ == "__main__":
    main()
