"""The content of files like MNIST's."""

import numpy as np

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(values):
    """``values`` as the content of an IDX file."""
    shape = np.array(values.shape, ">u4").tobytes()
    return bytes([0, 0, 8, values.ndim]) + shape + values.astype(np.uint8).tobytes()
