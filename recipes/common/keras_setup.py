"""The network and the optimizer that both Keras CNN recipes train."""

import keras

from common import keras_resnets
from common.cnn_flags import CnnFlags

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
MODELS = {"resnet20": keras_resnets.resnet20, "resnet50": keras_resnets.resnet50}


def make_model(flags: CnnFlags) -> keras.Model:
    """The network that the flags name, in the precision that they name."""
    keras.mixed_precision.set_global_policy(POLICIES[flags.precision])
    classes, size = (flags.classes, flags.image_size) if flags.synthetic else (10, 32)
    return MODELS[flags.model](classes, size)


def make_optimizer(flags: CnnFlags) -> keras.optimizers.SGD:
    """SGD with weight decay for kernels only.

    Keras takes the decay off the weights themselves, where PyTorch adds it to the gradients;
    momentum then repeats it 1 / (1 - momentum) times.
    """
    optimizer = keras.optimizers.SGD(
        learning_rate=flags.lr,
        momentum=flags.momentum,
        weight_decay=flags.weight_decay / (1 - flags.momentum) or None,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
    return optimizer
