"""Random crops and mirror images, the augmentation of He et al. (2015) for CIFAR-10."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from common.images import Images

PAD = 4
"""An image may be shifted by so many pixels in each direction."""


@dataclass(frozen=True)
class AugmentedImages:
    """Images as one epoch shows them: each shifted, and mirrored or not.

    What happens to an image depends on the seed, the epoch and its row only; not on the batch it
    is in, nor on the number of ranks.

    Attributes:
        images: colour images.
        corners: where each crop begins in its padded image: of shape (n, 2), from 0 to 2 * PAD.
        mirrored: which images are mirrored: bool of shape (n,).
    """

    images: Images
    corners: np.ndarray
    mirrored: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images at ``rows`` for the network, as float32, and their labels."""
        pixels, labels = self.images.batch(rows)
        padded = np.pad(pixels, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
        windows = sliding_window_view(padded, pixels.shape[1:3], axis=(1, 2))
        top, left = self.corners[rows].T
        crops = windows[np.arange(len(pixels)), top, left]  # channels before rows and columns
        crops = np.where(self.mirrored[rows, None, None, None], crops[..., ::-1], crops)
        return np.ascontiguousarray(crops.transpose(0, 2, 3, 1)), labels


def augmented(images: Images, seed: int, epoch: int) -> AugmentedImages:
    """The images as ``epoch`` of a run with ``seed`` shows them."""
    random = np.random.default_rng([seed, epoch])
    corners = random.integers(0, 2 * PAD, size=(len(images), 2), endpoint=True)
    mirrored = random.integers(0, 2, size=len(images)).astype(bool)
    return AugmentedImages(images, corners, mirrored & images.mirrors)
