"""A residual network in Keras ``fit``: ResNet-20 on CIFAR-10, or throughput of ResNet-50."""

import common
import keras
import numpy as np
from common.for_keras import ReportProgress, make_model, make_optimizer

import hvkit

hvkit.init()


class TrainingImages(keras.utils.PyDataset):
    """The training batches; each epoch has its own order and augmentation."""

    def __init__(self, images, flags, steps, epoch):
        super().__init__()
        self.images, self.flags, self.epoch = images, flags, epoch
        self.batches = steps * hvkit.size()
        self.start_epoch()

    def start_epoch(self):
        flags = self.flags
        self.order = np.random.default_rng([flags.seed, self.epoch]).permutation(len(self.images))
        self.shown = (
            common.augmented(self.images, flags.seed, self.epoch) if flags.augment else self.images
        )

    def on_epoch_end(self):
        self.epoch += 1
        self.start_epoch()

    def __len__(self):
        return self.batches

    def __getitem__(self, number):
        start = number * self.flags.batch_size
        return self.shown.batch(self.order[start : start + self.flags.batch_size])


def compile_model(model, optimizer):
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


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
    compile_model(model, optimizer)

    def rate_of_epoch(epoch, _):
        return flags.lr * common.rate_factor(flags.schedule, epoch, flags.epochs)

    first_epoch, saving = 0, []
    if flags.checkpoint_dir is not None:
        recorded = {} if monitor is None else {"monitor": monitor}
        checkpoint = hvkit.Checkpoint(
            flags.checkpoint_dir, keep=flags.keep, model=model, optimizer=optimizer, **recorded
        )
        first_epoch = checkpoint.restore().epoch
        saving = [checkpoint.callback(every="epoch")]

    with common.Report(flags, data, steps, monitor, first_epoch) as report:
        model.fit(
            hvkit.shard(TrainingImages(data.train, flags, steps, first_epoch)),
            shuffle=False,
            epochs=flags.epochs,
            initial_epoch=first_epoch,
            validation_data=hvkit.shard(data.test.batch(slice(None)), exact=True),
            validation_batch_size=flags.test_batch_size,
            callbacks=[
                keras.callbacks.LearningRateScheduler(rate_of_epoch),
                ReportProgress(report),
                *saving,
            ],
            verbose=0,
        )


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
    compile_model(model, optimizer)
    pixels, labels = common.random_batch(flags)
    with common.Throughput(flags) as throughput:
        for _ in range(throughput.steps):
            model.train_on_batch(pixels, labels)
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
