"""A residual network in a TensorFlow loop: ResNet-20 on CIFAR-10, or throughput of ResNet-50."""

import common
import keras
import numpy as np
import tensorflow as tf
from common.for_keras import make_model, make_optimizer

import hvkit

hvkit.init()

losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def make_train_step(flags, model, optimizer):
    # Float16 cannot represent small gradients: they are scaled up, and down again.
    scaled = flags.precision == "float16"
    updater = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer

    @tf.function
    def train_step(pixels, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(labels, model(pixels, training=True)))
            to_derive = updater.scale_loss(loss)
        gradients = tape.gradient(to_derive, model.trainable_variables)
        updater.apply(gradients, model.trainable_variables)  # gradients are averaged here
        return loss

    return train_step


def make_test_step(model):
    @tf.function(reduce_retracing=True)
    def test_step(pixels, labels):
        logits = model(pixels, training=False)
        hits = tf.argmax(logits, axis=1) == labels
        return tf.reduce_sum(losses_of(labels, logits)), tf.math.count_nonzero(hits)

    return test_step


def training_batches(flags, images, epoch):
    """This rank's batches of one epoch."""
    shown = common.augmented(images, flags.seed, epoch) if flags.augment else images
    order = np.random.default_rng([flags.seed, epoch]).permutation(len(images))
    rows = tf.data.Dataset.from_tensor_slices(order).batch(flags.batch_size, drop_remainder=True)
    for batch in hvkit.shard(rows).as_numpy_iterator():
        yield shown.batch(batch)


def train(train_step, batches, report):
    for pixels, labels in report.batches(batches):
        report.step(train_step(pixels, labels))


def evaluate(test_step, images, batch_size):
    """Loss and accuracy on all test images; each rank computes its own part of them."""
    rows = tf.data.Dataset.range(len(images)).batch(batch_size)
    loss_sum = correct = count = 0
    for batch in hvkit.shard(rows, exact=True).as_numpy_iterator():
        batch_loss, batch_correct = test_step(*images.batch(batch))
        loss_sum += float(batch_loss)
        correct += int(batch_correct)
        count += len(batch)
    return common.mean_over_ranks(loss_sum, correct, count)


def train_and_evaluate(flags):
    data = common.load_data(flags)
    steps = len(data.train) // (flags.batch_size * hvkit.size())

    model, optimizer = make_model(flags), make_optimizer(flags)
    monitor = common.make_monitor(flags, steps)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        lr_scaling="linear",
        warmup_epochs=flags.warmup_epochs,
        steps_per_epoch=steps,
        strategy=flags.strategy,
        compression=flags.compression,
        batch_norm=flags.batch_norm,
        monitor=monitor,
    )
    train_step, test_step = make_train_step(flags, model, optimizer), make_test_step(model)

    first_epoch, steps_done, checkpoint = 0, 0, None
    if flags.checkpoint_dir is not None:
        recorded = {} if monitor is None else {"monitor": monitor}
        checkpoint = hvkit.Checkpoint(
            flags.checkpoint_dir, keep=flags.keep, model=model, optimizer=optimizer, **recorded
        )
        start = checkpoint.restore()
        first_epoch, steps_done = start.epoch, start.step

    with common.Report(flags, data, steps, monitor, first_epoch) as report:
        for epoch in range(first_epoch, flags.epochs):
            report.start_epoch()
            factor = common.rate_factor(flags.schedule, epoch, flags.epochs)
            optimizer.learning_rate.assign(flags.lr * factor)
            train(train_step, training_batches(flags, data.train, epoch), report)
            steps_done += steps
            with hvkit.settled(model):
                report.end_epoch(*evaluate(test_step, data.test, flags.test_batch_size))
            # After the test: a run that is killed before this line repeats epoch and test.
            if checkpoint is not None:
                checkpoint.save(epoch=epoch + 1, step=steps_done)


def measure(flags):
    """Images per second of training on random images."""
    model, optimizer = make_model(flags), make_optimizer(flags)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        batch_norm=flags.batch_norm,
    )
    train_step = make_train_step(flags, model, optimizer)
    pixels, labels = (tf.constant(part) for part in common.random_batch(flags))
    loss = None
    with common.Throughput(flags, wait=lambda: loss is None or loss.numpy()) as throughput:
        for _ in range(throughput.steps):
            loss = train_step(pixels, labels)
            throughput.step()


def main():
    flags = common.parse_cnn_flags(__doc__)
    # distribute copies rank 0's weights to all ranks.
    keras.utils.set_random_seed(flags.seed + hvkit.rank())
    if flags.synthetic:
        measure(flags)
    else:
        train_and_evaluate(flags)


if __name__ == "__main__":
    main()
