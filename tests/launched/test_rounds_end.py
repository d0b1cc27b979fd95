"""How scripts end while an agreement runs beside training."""

import pytest
from cases import MORE
from test_ranks_that_wait import run

pytestmark = MORE

# Rank 1 ends its round when rank 0 has ended its script.
LATE = """
import sys, time, torch
import hvkit
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvkit.distribute(model, optimizer, strategy=hvkit.DiLoCo(4, overlap=2))
for step in range(4):
    if hvkit.rank() == 1 and step == 3:
        time.sleep(2)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("rank", hvkit.rank(), "ends", file=sys.stderr, flush=True)
"""


def test_a_rank_that_ends_first_waits_for_the_agreement(tmp_path):
    status, err, _ = run(LATE, tmp_path, 2)
    assert status == 0, err
    assert all(f"rank {rank} ends\n" in err for rank in (0, 1)), err


# One rank makes more objects than the other, at other addresses.
SIX_MODELS = """
import sys, torch
import hvkit
kept, trained = [], []
for layers in range(1, 7):
    kept += [bytearray(40) for _ in range(3 * hvkit.rank())]
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained.append(hvkit.distribute(model, optimizer, strategy=hvkit.DiLoCo(4, overlap=2)))
for step in range(4):
    for model, optimizer in trained:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_the_agreements_of_several_models_end_in_the_same_order(tmp_path):
    status, err, _ = run(SIX_MODELS, tmp_path, 2)
    assert status == 0, err
    assert "Error" not in err, err


# TensorFlow has as many threads for graphs as a rank has cores; one of them waits.
ONE_THREAD = """
import keras, numpy as np, tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
import hvkit
x = np.ones((96, 8), np.float32)
for compression in (hvkit.PowerSGD(2), "none", "int8", hvkit.TopK(0.5)):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.01)
    strategy = hvkit.DiLoCo(4, overlap=2)
    hvkit.distribute(model, optimizer, strategy=strategy, compression=compression)
    model.compile(optimizer, "mse")
    model.fit(x, x[:, :4], batch_size=8, verbose=0)
"""


def test_one_thread_for_graphs_is_enough_in_keras(tmp_path):
    status, err, _ = run(ONE_THREAD, tmp_path, 2)
    assert status == 0, err


# With one thread for graphs: two optimizers that share a layer, one of them also in another dtype.
SHARED = """
import keras, numpy as np, tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
import hvkit
for strategy in (hvkit.DiLoCo(4, overlap=3), hvkit.LocalSGD(2), hvkit.Gossip(1)):
    layers = [keras.layers.Dense(4, dtype=dtype) for dtype in ("float32", "float64")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizers = [keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01)]
    hvkit.distribute(model, optimizers, strategy=strategy)
    updated = [model.trainable_variables, layers[0].trainable_variables]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(layers[1](layers[0](x)), tf.float32) ** 2)
        gradients = tape.gradient(loss, updated[0])
        optimizers[0].apply(gradients, updated[0])
        optimizers[1].apply(gradients[:2], updated[1])

    for optimizer, variables in zip(optimizers, updated):
        optimizer.build(variables)
    for _ in range(16):
        step(tf.ones((2, 8)))
"""


def test_one_thread_for_graphs_is_enough_for_optimizers_that_share_a_layer(tmp_path):
    status, err, _ = run(SHARED, tmp_path, 2)
    assert status == 0, err


# The ranks step two optimizers in another order, in the second round.
MIXED_UP = """
import sys, keras, tensorflow as tf
import hvkit
layers = [keras.layers.Dense(8, use_bias=False) for _ in range(3)]
model = keras.Sequential([keras.Input((8,)), *layers])
kernels = [layer.kernel for layer in layers]
trained = {"own": [kernels[:1], kernels[1:2]], "shared": [kernels[:2], kernels[::2]]}[sys.argv[2]]
both = [keras.optimizers.SGD(0.0), keras.optimizers.SGD(0.0)]
hvkit.distribute(model, both, strategy=hvkit.LocalSGD(1))

def step_of(optimizer, variables):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones((2, 8))) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    optimizer.build(variables)
    return tf.function(step) if sys.argv[1] == "graph" else step

steps = [step_of(*each) for each in zip(both, trained)]
for number in [0, 1, *((0, 1), (1, 0))[hvkit.rank()]]:
    steps[number]()
"""


@pytest.mark.parametrize(("weights", "code"), [("own", "graph"), ("shared", "eager")])
def test_ranks_that_step_optimizers_in_another_order_do_not_train_on(weights, code, tmp_path):
    status, err, _ = run(MIXED_UP, tmp_path, 2, [code, weights])
    assert status == 1, err
    assert "every rank has to make the same calls in the same order" in err, err
