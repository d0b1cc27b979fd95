"""The content of files like CIFAR-10's."""

import numpy as np

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"


def records(labels, seed=0):
    """Images of noise with these labels as the content of a file."""
    pixels = np.random.default_rng(seed).integers(256, size=(len(labels), 3072), dtype=np.uint8)
    return np.hstack([np.array(labels, np.uint8)[:, None], pixels]).tobytes()


def files(images=10):
    """Six files like CIFAR-10's, with ``images`` images each."""
    labels = np.arange(images) % 10
    return {name: records(labels, seed) for seed, name in enumerate((*TRAIN_FILES, TEST_FILE))}
