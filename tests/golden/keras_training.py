"""The recorded trainings in Keras on TensorFlow."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from trainings import STEPS, data, start

import hvkit


class Training:
    """A model and its optimizer, distributed, after no step or where a checkpoint stands."""

    def __init__(self, case, mode, folder=None):
        keras.backend.clear_session()
        layers = keras.layers
        dense = layers.Dense(3), layers.Dense(2)
        hidden = [dense[0], layers.BatchNormalization(momentum=0.75), layers.ReLU()]
        self.model = keras.Sequential([keras.Input((4,)), *hidden, dense[1]])
        for layer, weights in zip(dense, start(), strict=True):
            layer.kernel.assign(weights)
        momentum = 0.0 if case.strategy == "DeMo" else 0.75
        self.optimizer = keras.optimizers.SGD(0.25, momentum)
        hvkit.distribute(self.model, self.optimizer, **case.arguments())
        self._update = tf.function(self._step) if mode == "graph" else self._step
        self.done = 0
        if folder:
            parts = {"model": self.model, "optimizer": self.optimizer}
            self.checkpoint = hvkit.Checkpoint(folder, **parts)
            self.done = self.checkpoint.restore().step

    def train(self, until=STEPS):
        for x, y in data()[self.done : until]:
            self._update(tf.constant(x), tf.constant(y))
        self.done = until
        return self

    def _step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x, training=True) - y) ** 2)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def weights(self):
        """What this rank holds."""
        return [v.numpy() for v in self.model.weights]


def clean_up():
    """Leave no graphs."""
    keras.backend.clear_session()
