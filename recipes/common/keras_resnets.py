"""Residual networks in Keras: ResNet-20 for CIFAR-10, and Keras's own ResNet-50."""

import keras
from keras import layers, ops


def resnet20(classes: int = 10, image_size: int = 32) -> keras.Model:
    """Colour images in, logits out; 0.27 million weights, shortcuts without any.

    He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2. Logits start
    small, which large learning rates want (Goyal et al. 2017, section 5.1).

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
        dtype="float32",  # Also where the layers before compute in less.
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
    """A 3x3 convolution that keeps height and width (but for the stride), and batch norm.

    The pixels around the image are put there by hand: Keras's ``"same"`` puts them on two sides
    only where the stride is 2.
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
    """The input itself, without the pixels that the stride drops, with empty channels added."""
    x = x[:, ::stride, ::stride, :]
    new_channels = width - x.shape[-1]
    return ops.pad(x, ((0, 0), (0, 0), (0, 0), (0, new_channels)))
