"""What tests of groups do with a framework: models in float64, optimizers and loops."""

import keras
import keras_models
import numpy as np
import torch
import torch_nets
from torch import nn


class PyTorch:
    name = "torch"
    loops = {"loop": torch_nets.train}  # noqa: RUF012
    weights = staticmethod(torch_nets.weights)
    array = staticmethod(torch.from_numpy)

    @staticmethod
    def mlp(seed=0, outputs=4):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs)).double()

    @staticmethod
    def deeper(seed=0):
        torch.manual_seed(seed)
        hidden = nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 7), nn.ReLU()
        return nn.Sequential(*hidden, nn.Linear(7, 4)).double()

    @staticmethod
    def normalised():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()

    @staticmethod
    def sgd(model, factor=1):
        return torch.optim.SGD(model.parameters(), 0.05 * factor, momentum=0.9)

    @staticmethod
    def adam(model, factor=1):
        return torch.optim.Adam(model.parameters(), 0.01 * factor)

    @staticmethod
    def add_to_a_weight(model):
        model[0].weight.data.add_(1)

    @staticmethod
    def set_rate(optimizer, rate):
        optimizer.param_groups[0]["lr"] = rate

    @staticmethod
    def in_one_process(loop):
        return loop


class Keras:
    name = "tensorflow"
    loops = keras_models.LOOPS
    mlp = staticmethod(lambda seed=0, outputs=4: _dense(seed, (16, "tanh"), (outputs, None)))
    deeper = staticmethod(lambda seed=0: _dense(seed, (12, "tanh"), (7, "relu"), (4, None)))
    weights = staticmethod(keras_models.weights)
    in_one_process = staticmethod(keras_models.in_eager_code)
    array = staticmethod(np.asarray)

    @staticmethod
    def normalised():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential([keras.Input((8,)), layers.BatchNormalization(), layers.Dense(4)])

    @staticmethod
    def sgd(model, factor=1):
        return keras.optimizers.SGD(0.05 * factor, momentum=0.9)

    @staticmethod
    def adam(model, factor=1):
        return keras.optimizers.Adam(0.01 * factor)

    @staticmethod
    def add_to_a_weight(model):
        model.layers[0].kernel.assign_add(np.ones((8, 16)))

    @staticmethod
    def set_rate(optimizer, rate):
        optimizer.learning_rate = rate


def _dense(seed, *layers):
    keras.utils.set_random_seed(seed)
    dense = [keras.layers.Dense(units, activation) for units, activation in layers]
    return keras.Sequential([keras.Input((8,)), *dense])
