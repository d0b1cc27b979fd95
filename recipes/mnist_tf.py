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


def batches_of(images, batch_size, shuffle_seed=None):
    """A pipeline of batches; with a seed, each epoch has another order."""
    dataset = tf.data.Dataset.from_tensor_slices((images.pixels, images.labels))
    if shuffle_seed is not None:
        dataset = dataset.shuffle(len(images), seed=shuffle_seed)

    def for_network(pixels, labels):
        brightness = tf.cast(pixels, tf.float32)[..., None] / 255
        return (brightness - images.mean) / images.deviation, labels

    dataset = dataset.map(for_network)
    return dataset.batch(batch_size, drop_remainder=shuffle_seed is not None)


def evaluate(test_step, batches):
    """Loss and accuracy on all test images; each rank computes its own part of them."""
    loss_sum = correct = images = 0
    for pixels, labels in batches:
        batch_loss, batch_correct = test_step(pixels, labels)
        loss_sum += float(batch_loss)
        correct += int(batch_correct)
        images += len(labels)
    return common.mean_over_ranks(loss_sum, correct, images)


def main():
    flags = common.parse_flags(__doc__)
    data = common.load_data(flags)
    train_batches = hvkit.shard(batches_of(data.train, flags.batch_size, flags.seed))
    test_batches = hvkit.shard(batches_of(data.test, flags.test_batch_size), exact=True)

    # Each rank draws its own dropout; distribute copies rank 0's weights to all ranks.
    keras.utils.set_random_seed(flags.seed + hvkit.rank())
    model = make_model()
    optimizer = keras.optimizers.SGD(learning_rate=flags.lr, momentum=flags.momentum)
    monitor = common.make_monitor(flags, len(train_batches))
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        lr_scaling="linear",
        monitor=monitor,
    )

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

    with common.Report(flags, data, len(train_batches), monitor) as report:
        for _ in range(flags.epochs):
            report.start_epoch()
            for pixels, labels in report.batches(train_batches):
                report.step(train_step(pixels, labels))
            optimizer.learning_rate.assign(optimizer.learning_rate * common.MNIST_DECAY)
            with hvkit.settled(model):
                report.end_epoch(*evaluate(test_step, test_batches))


if __name__ == "__main__":
    main()
