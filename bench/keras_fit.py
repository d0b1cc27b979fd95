"""What a step of Keras's ``fit`` takes on one core: plain, with XLA, and several steps at once.

    taskset -c 0 python bench/keras_fit.py    # two minutes

No rank takes part. XLA cannot compile what ranks send each other, so hvkit trains without it: this
shows what that costs on a CPU.
"""

import sys
import time
from pathlib import Path

import keras
import tensorflow as tf
from speed_keras_on_ranks import BATCH, LOSS, data, network

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from common.for_keras import resnet20

SETTINGS = {
    "plain": {},
    "XLA": {"jit_compile": True},
    "4 steps at once": {"steps_per_execution": 4},
}


class Ends(keras.callbacks.Callback):
    """When each execution ended."""

    def __init__(self):
        super().__init__()
        self.at = []

    def on_train_batch_end(self, batch, logs=None):
        self.at.append(time.perf_counter())


def colour_images():
    images = tf.random.stateless_normal((BATCH * 10, 32, 32, 3), (0, 1))
    labels = tf.random.stateless_uniform((BATCH * 10,), (0, 2), 0, 10, tf.int32)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH, True).cache().repeat()


def milliseconds(model, batches, steps, settings):
    """The best decile of the steps."""
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=LOSS, **settings)
    ends = Ends()
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[ends])
    at_once = settings.get("steps_per_execution", 1)
    taken = sorted((b - a) / at_once for a, b in zip(ends.at, ends.at[1:], strict=False))
    return 1e3 * taken[len(taken) // 10]


def main():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    for make, batches, steps in (network, data(), 60), (resnet20, colour_images(), 24):
        for setting, options in SETTINGS.items():
            ms = milliseconds(make(), batches, steps, options)
            print(f"{make.__name__}, {setting}: {ms:.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
