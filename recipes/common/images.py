"""Labelled images, and files of them read whole."""

import gzip
import hashlib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np


class DataError(Exception):
    """The images cannot be had; the message says what was tried and what is wrong."""


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        pixels: uint8 of shape (n, height, width) or (n, height, width, 3).
        labels: int64 of shape (n,).
        mean: of the pixels with black as 0 and white as 1; one number, or one a channel.
        deviation: likewise.
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
        """The first so many images, or all if there are fewer."""
        return replace(self, pixels=self.pixels[:number], labels=self.labels[:number])

    def batch(self, rows: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """The images at ``rows`` for the network, as float32 centred on 0, and their labels."""
        brightness = self.pixels[rows].astype(np.float32) / 255
        mean, deviation = np.float32(self.mean), np.float32(self.deviation)
        return (brightness - mean) / deviation, self.labels[rows]


@dataclass(frozen=True)
class Dataset:
    """Training and test images, and one line on where they come from."""

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
        DataError: naming the file, and what is wrong with it.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, truncated or damaged: {error}") from None


def plain_or_gzipped(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """Those of the files that are in ``folder``, by name; a plain one goes before a gzipped one."""
    return {
        name: path
        for name in names
        for path in (folder / f"{name}.gz", folder / name)
        if path.is_file()
    }
