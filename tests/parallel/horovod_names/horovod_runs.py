"""Training on all ranks through Horovod's names, and in one process on the global batches."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
from keras_models import fit, in_eager_code, local, mlp, regression, weights, with_state
from ranks import same_on_all_ranks

DATA = regression(steps=8)
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "decayed": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.7), weight_decay=0.05
    ),
    "averaged": lambda: keras.optimizers.SGD(0.05, use_ema=True),
}
hvd.init()


def of_one_process(make_optimizer=OPTIMIZERS["adam"], make=mlp, data=DATA, loop=fit):
    """The weights that one process has after the global batches."""
    model, optimizer = with_state(make(0), make_optimizer())
    in_eager_code(loop)(model, optimizer, data)
    return weights(model)


def of_all_ranks(optimizer, make=mlp, data=DATA, loop=fit):
    """The weights of this rank, which begins with the same ones as all others."""
    model, optimizer = with_state(make(0), optimizer)
    loop(model, optimizer, local(data))
    assert same_on_all_ranks(weights(model))
    return weights(model)


def pairs_of(data):
    """Batches twice as large: two of them make one."""
    return [
        tuple(np.concatenate(each) for each in zip(*pair, strict=True))
        for pair in zip(data[::2], data[1::2], strict=True)
    ]
