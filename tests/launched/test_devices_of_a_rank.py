"""A model whose layers a script places on several devices of each rank."""

from cases import MORE
from test_ranks_that_wait import run

pytestmark = MORE

# Two devices of the CPU stand for two GPUs. TensorFlow must not have started before.
SCRIPT = """
import sys
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [half, half])
import keras, numpy as np
import hvkit

class On(keras.layers.Layer):
    def __init__(self, device, layer):
        super().__init__()
        self.device, self.layer = device, layer

    def build(self, shape):
        with tf.device(self.device):
            self.layer.build(shape)

    def call(self, x):
        with tf.device(self.device):
            return self.layer(x)

def make(seed):
    keras.utils.set_random_seed(seed)
    first, second = keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)
    return keras.Sequential([keras.Input((8,)), On("CPU:0", first), On("CPU:1", second)])

def train(model, optimizer, x, y):
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=len(x) // 4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()

rng = np.random.default_rng(0)
x, y = (rng.normal(size=(24, n)).astype("float32") for n in (8, 4))
alone = train(make(0), keras.optimizers.SGD(0.1), x, y)
model, optimizer = make(hvkit.rank()), keras.optimizers.SGD(0.1)
hvkit.distribute(model, optimizer)
found = train(model, optimizer, x[hvkit.rank() :: 2], y[hvkit.rank() :: 2])
worst = max(np.abs(a - b).max() for a, b in zip(alone, found))
devices = [w._value.device[-5:] for w in model.weights]
print(worst < 1e-6, *devices, file=sys.stderr, flush=True)
"""


def test_layers_on_two_devices_train_as_in_one_process(tmp_path):
    status, err, _ = run(SCRIPT, tmp_path, 2)
    assert status == 0, err
    assert err.count("True CPU:0 CPU:0 CPU:1 CPU:1") == 2, err
