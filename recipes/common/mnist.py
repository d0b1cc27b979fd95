"""MNIST: finding, downloading and reading its four IDX files."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.images import DataError, Dataset, Images, load_digits, plain_or_gzipped, read_file
from common.sources import fetch, locked

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

# Of the unpacked files: the mirrors may compress them differently.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081  # of the training images


@dataclass(frozen=True)
class Mnist:
    """MNIST as a ``Source``; ``sha256`` has the checksums of the unpacked files."""

    mirrors: tuple[str, ...] = MIRRORS
    sha256: Mapping[str, str] = field(default_factory=lambda: SHA256)
    name: str = "MNIST"
    key: str = "mnist"
    files: str = f"its four files {', '.join(SHA256)}"

    def find(self, folder: Path) -> dict[str, Path]:
        """Its files in ``folder`` or in its subfolder ``mnist``, where more files are."""
        places = (plain_or_gzipped(place, tuple(SHA256)) for place in (folder, folder / "mnist"))
        return max(places, key=len)

    def is_whole(self, found: Mapping[str, Path]) -> bool:
        """Whether all four files are there."""
        return len(found) == len(SHA256)

    def read(self, folder: Path) -> Dataset:
        """Read MNIST, or a subset of it in files of the same names."""
        found = self.find(folder)
        if missing := [name for name in SHA256 if name not in found]:
            raise DataError(
                f"{folder}: no {', no '.join(missing)} (plain or .gz) there or in "
                f"{folder / 'mnist'}"
            )
        train = read_images(found["train-images-idx3-ubyte"], found["train-labels-idx1-ubyte"])
        test = read_images(found["t10k-images-idx3-ubyte"], found["t10k-labels-idx1-ubyte"])
        return Dataset(train, test, f"MNIST from {found['train-images-idx3-ubyte'].parent}")

    def download(self, cache: Path, say: Callable[[str], None]) -> None:
        """Download the files that ``cache`` lacks."""
        with locked(cache):
            found = self.find(cache)
            for name, checksum in self.sha256.items():
                if name not in found:
                    say(f"downloading {name} into {cache}")
                    fetch(name, self.mirrors, checksum, cache, gzipped=True)

    def digits(self, why: str) -> Dataset:
        """The bundled digits in 28x28."""
        return load_digits(self.name, why, scale=3, border=2)


def read_images(pixels_file: Path, labels_file: Path) -> Images:
    """Read a file of images and its file of labels."""
    pixels, labels = read_idx(pixels_file, dims=3), read_idx(labels_file, dims=1)
    if pixels.shape[1:] != (28, 28):
        raise DataError(f"{pixels_file}: images must be 28x28, got {pixels.shape[1:]}")
    if len(pixels) != len(labels):
        raise DataError(
            f"{labels_file} has {len(labels)} labels for the {len(pixels)} images of {pixels_file}"
        )
    if len(labels) == 0:
        raise DataError(f"{labels_file}: holds no labels")
    if labels.max() > 9:
        raise DataError(f"{labels_file}: labels must be 0 to 9, got {labels.max()}")
    return Images(pixels, labels.astype(np.int64), PIXEL_MEAN, PIXEL_DEVIATION)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or gzipped.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions; each
    dimension as a big-endian 32-bit number; then the bytes, with the last dimension fastest.
    """
    content = read_file(path)
    magic = bytes([0, 0, 8, dims])
    header, values = content[: 4 + 4 * dims], content[4 + 4 * dims :]
    if header[:4] != magic:
        raise DataError(
            f"{path}: not an IDX file of bytes in {dims} dimensions: it must start with "
            f"{magic.hex()}, got {header[:4].hex() or 'nothing'}"
        )
    shape = struct.unpack_from(f">{dims}I", header.ljust(4 + 4 * dims, b"\0"), offset=4)
    if len(header) < 4 + 4 * dims or len(values) != math.prod(shape):
        raise DataError(
            f"{path}: truncated or overlong: {len(values)} bytes after a header that announces "
            f"{' x '.join(map(str, shape))}"
        )
    return np.frombuffer(values, np.uint8).reshape(shape)
