"""Labelled images in memory: batches, augmentation, and the bundled digits."""

import gzip
import hashlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


class DataError(Exception):
    """The images cannot be loaded; the message names what was tried and the reason."""


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        pixels: uint8 of shape (n, height, width) or (n, height, width, 3).
        labels: int64 of shape (n,).
        mean: of the pixels, with black as 0 and white as 1; one number, or one per channel.
        deviation: the standard deviation, in the same units.
        mirrors: whether an image and its mirror image show the same thing.
    """

    pixels: np.ndarray
    labels: np.ndarray
    mean: float | tuple[float, ...] = 0.0
    deviation: float | tuple[float, ...] = 1.0
    mirrors: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, number: int) -> Self:
        """The first ``number`` images, or all if there are fewer."""
        return replace(self, pixels=self.pixels[:number], labels=self.labels[:number])

    def batch(self, rows: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """The images at ``rows`` for the network, as float32 centred on 0, and their labels."""
        brightness = self.pixels[rows].astype(np.float32) / 255
        mean, deviation = np.float32(self.mean), np.float32(self.deviation)
        return (brightness - mean) / deviation, self.labels[rows]


@dataclass(frozen=True)
class Dataset:
    """Training and test images, and a line that names their origin."""

    train: Images
    test: Images
    origin: str

    def digest(self) -> str:
        """SHA-256 of all pixels and labels: equal on two hosts that hold the same images."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            digest.update(part.pixels.tobytes() + part.labels.tobytes())
        return digest.hexdigest()


def read_file(path: Path) -> bytes:
    """The content of a file, plain or gzipped.

    Raises:
        DataError: it cannot be read; the message names the file and the reason.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, truncated or damaged: {error}") from None


def plain_or_gzipped(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """The paths of the files that ``folder`` has, by name; plain files before gzipped ones."""
    return {
        name: path
        for name in names
        for path in (folder / f"{name}.gz", folder / name)
        if path.is_file()
    }


def load_digits(instead_of: str, why: str, scale: int, border: int, channels: int = 0) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, enlarged to another image size.

    The 17 grey levels become 0 to 255. A fixed fifth of the images is the test set, with the same
    proportion of every digit.

    Args:
        instead_of: the name of the images that the digits replace, for ``origin``.
        why: why the digits are loaded, for the error.
        scale: the height and width of the square that each pixel becomes.
        border: the width of the black border, in pixels.
        channels: the number of equal colour channels, as last axis; 0 for no such axis.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load_bundled
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise DataError(
            f"{why}; the bundled digits need scikit-learn: pip install scikit-learn"
        ) from None
    bundled = load_bundled()
    pixels = np.round(bundled.images * (255 / 16)).astype(np.uint8)
    pixels = pixels.repeat(scale, axis=1).repeat(scale, axis=2)
    pixels = np.pad(pixels, ((0, 0), (border, border), (border, border)))
    if channels:
        pixels = pixels[..., None].repeat(channels, axis=3)
    labels = bundled.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=0.2, random_state=0, stratify=labels
    )
    # MNIST's numbers centre the enlarged digits well enough, in any shape.
    train, test = (
        Images(x, y, mean=0.1307, deviation=0.3081)
        for x, y in ((train_x, train_y), (test_x, test_y))
    )
    origin = f"scikit-learn's 1,797 handwritten digits in place of {instead_of}"
    return Dataset(train, test, origin)


PAD = 4
"""The largest shift of an image, in pixels, in each direction."""


@dataclass(frozen=True)
class AugmentedImages:
    """The images of one epoch: each shifted, and some mirrored.

    This is the augmentation of He et al. (2015) for CIFAR-10. The augmentation of an image depends
    only on the seed, the epoch and its row, not on its batch or the number of ranks.

    Attributes:
        images: colour images.
        corners: top left corner of each crop in its padded image: shape (n, 2), 0 to 2 * PAD.
        mirrored: whether each image is mirrored: bool of shape (n,).
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
    """The images with the augmentation of this epoch and seed."""
    random = np.random.default_rng([seed, epoch])
    corners = random.integers(0, 2 * PAD, size=(len(images), 2), endpoint=True)
    mirrored = random.integers(0, 2, size=len(images)).astype(bool)
    return AugmentedImages(images, corners, mirrored & images.mirrors)
