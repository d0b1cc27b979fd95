"""MNIST in Flax NNX: a convolutional network, trained on any number of ranks or on a mesh."""

import common
import jax
import numpy as np
import optax
from flax import nnx

import hvkit

hvkit.init("jax")  # before the first array


class Net(nnx.Module):
    """Images of 28x28 in, ten logits out."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), padding="VALID", rngs=rngs)
        self.dropout1 = nnx.Dropout(0.25, rngs=rngs)
        self.linear1 = nnx.Linear(64 * 12 * 12, 128, rngs=rngs)
        self.dropout2 = nnx.Dropout(0.5, rngs=rngs)
        self.linear2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, pixels):
        x = nnx.relu(self.conv1(pixels[..., None]))
        x = nnx.relu(self.conv2(x))
        x = self.dropout1(nnx.max_pool(x, (2, 2), strides=(2, 2)))
        x = nnx.relu(self.linear1(x.reshape(len(x), -1)))
        return self.linear2(self.dropout2(x))


@nnx.jit
def train_step(model, optimizer, pixels, labels):
    def loss_of(model):
        logits = model(pixels)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def test_step(model, pixels, labels):
    logits = model(pixels)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), (logits.argmax(1) == labels).sum()


def batches_of(images, rows, batch_size, steps):
    """This rank's batches, as parts of the global batches."""
    for start in range(0, steps * batch_size, batch_size):
        yield hvkit.batch(*images.batch(rows[start : start + batch_size]))


def evaluate(model, images, flags):
    """Loss and accuracy on all test images; each rank computes its own rows."""
    rows = hvkit.shard(np.arange(len(images)), exact=True, mesh=flags.mesh)
    largest_part = -(-len(images) // common.parts_of_a_batch(flags))
    steps = -(-largest_part // flags.test_batch_size)
    batches = batches_of(images, rows, flags.test_batch_size, steps)
    loss_sum, correct = jax.tree.map(
        lambda *each: float(sum(each)), *(test_step(model, *batch) for batch in batches)
    )
    return loss_sum / len(images), correct / len(images)


def main():
    flags = common.parse_flags(__doc__, meshes=True)
    data = common.load_data(flags)
    rows = hvkit.shard(np.arange(len(data.train)), mesh=flags.mesh)
    steps = len(rows) // flags.batch_size

    model = Net(nnx.Rngs(flags.seed))
    rate = flags.lr * common.parts_of_a_batch(flags)
    rate = optax.exponential_decay(rate, steps, common.MNIST_DECAY, staircase=True)
    optimizer = nnx.Optimizer(model, optax.sgd(rate, flags.momentum), wrt=nnx.Param)
    monitor = common.make_monitor(flags, steps)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        monitor=monitor,
        mesh=flags.mesh,
    )
    testing = nnx.view(model, deterministic=True)  # the same weights, without dropout

    random = np.random.default_rng(flags.seed)
    with common.Report(flags, data, steps, monitor) as report:
        for _ in range(flags.epochs):
            report.start_epoch()
            batches = batches_of(data.train, random.permutation(rows), flags.batch_size, steps)
            for pixels, labels in report.batches(batches):
                report.step(train_step(model, optimizer, pixels, labels))
            report.end_epoch(*evaluate(testing, data.test, flags))


if __name__ == "__main__":
    main()
