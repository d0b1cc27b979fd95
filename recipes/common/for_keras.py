"""For the Keras recipes: residual networks, their optimizer, and the report from ``fit``."""

from typing import Any

import keras
from keras import layers, ops

from common.flags import CnnFlags
from common.report import Report

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def make_model(flags: CnnFlags) -> keras.Model:
    """The network and precision that the flags name."""
    keras.mixed_precision.set_global_policy(POLICIES[flags.precision])
    classes, size = (flags.classes, flags.image_size) if flags.synthetic else (10, 32)
    return {"resnet20": resnet20, "resnet50": resnet50}[flags.model](classes, size)


def make_optimizer(flags: CnnFlags) -> keras.optimizers.SGD:
    """SGD with weight decay for kernels only.

    Keras subtracts the decay from the weights. PyTorch adds it to the gradients, where momentum
    multiplies it by 1 / (1 - momentum); the same factor here makes both equal.
    """
    optimizer = keras.optimizers.SGD(
        learning_rate=flags.lr,
        momentum=flags.momentum,
        weight_decay=flags.weight_decay / (1 - flags.momentum) or None,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
    return optimizer


class ReportProgress(keras.callbacks.Callback):
    """Reports the loss during an epoch, and the test on all ranks after it."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._report.start_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._report.show_step(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._report.show_epoch(logs["val_loss"], logs["val_accuracy"])


def resnet20(classes: int = 10, image_size: int = 32) -> keras.Model:
    """ResNet-20: colour images in, logits out; 0.27 million weights, none in the shortcuts.

    He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2. Logits start
    small, which suits large learning rates (Goyal et al. 2017, section 5.1).

    Args:
        classes: number of logits.
        image_size: height and width of the images.
    """
    images = layers.Input((image_size, image_size, 3))
    x = layers.ReLU()(conv_norm(images, 16))
    for width in (16, 32, 64):
        for block in range(3):
            stride = 2 if width > 16 and block == 0 else 1
            y = layers.ReLU()(conv_norm(x, width, stride))
            x = layers.ReLU()(conv_norm(y, width) + shortcut(x, width, stride))
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(
        classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        dtype="float32",  # Even if the other layers compute in fewer bits.
    )
    return keras.Model(images, logits(x), name="resnet20")


def resnet50(classes: int = 1000, image_size: int = 224) -> keras.Model:
    """``keras.applications.ResNet50`` from random weights, with logits: 25.6 million weights.

    Args:
        classes: number of logits.
        image_size: height and width of the images, at least 32.
    """
    base = keras.applications.ResNet50(
        weights=None,
        classes=classes,
        classifier_activation=None,
        input_shape=(image_size, image_size, 3),
    )
    logits = layers.Activation("linear", dtype="float32")(base.output)
    return keras.Model(base.input, logits, name="resnet50")


def conv_norm(x: keras.KerasTensor, width: int, stride: int = 1) -> keras.KerasTensor:
    """A 3x3 convolution that keeps height and width (divided by the stride), and batch norm.

    With a stride of 2, Keras's ``"same"`` would pad two sides only, so a layer pads all four.
    """
    x = layers.ZeroPadding2D(1)(x) if stride > 1 else x
    convolution = layers.Conv2D(
        width,
        3,
        stride,
        padding="valid" if stride > 1 else "same",
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(2.0, mode="fan_out"),
    )
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(convolution(x))


def shortcut(x: keras.KerasTensor, width: int, stride: int) -> keras.KerasTensor:
    """The input without the pixels that the stride drops, with empty channels added."""
    x = x[:, ::stride, ::stride, :]
    new_channels = width - x.shape[-1]
    return ops.pad(x, ((0, 0), (0, 0), (0, 0), (0, new_channels)))
