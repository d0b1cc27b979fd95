"""CIFAR-10: finding, downloading and reading its binary files."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from common.images import DataError, Dataset, Images, load_digits, plain_or_gzipped, read_file
from common.sources import fetch, locked

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
ARCHIVE = "cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
SUBFOLDERS = ("cifar-10-batches-bin", "cifar10-subset")

RECORD = 1 + 3 * 32 * 32  # bytes: the label, then the pixels

# Of the training images: red, green and blue.
PIXEL_MEAN, PIXEL_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10 as a ``Source``; ``sha256`` is the checksum of the archive."""

    mirrors: tuple[str, ...] = MIRRORS
    sha256: str = SHA256
    name: str = "CIFAR-10"
    key: str = "cifar10"
    files: str = f"one or more of {TRAIN_FILES[0]} to {TRAIN_FILES[-1]}, and {TEST_FILE}"

    def find(self, folder: Path) -> dict[str, Path]:
        """Its files in ``folder`` or in a subfolder with a known name, where most files are."""
        places = (folder, *(folder / subfolder for subfolder in SUBFOLDERS))
        found = (plain_or_gzipped(place, (*TRAIN_FILES, TEST_FILE)) for place in places)
        return max(found, key=len)

    def is_whole(self, found: Mapping[str, Path]) -> bool:
        """Whether all six files are there."""
        return len(found) == len(TRAIN_FILES) + 1

    def read(self, folder: Path) -> Dataset:
        """Read CIFAR-10 with all training files that are in ``folder``."""
        found = self.find(folder)
        train = [found[name] for name in TRAIN_FILES if name in found]
        missing = [
            *([] if train else [f"{TRAIN_FILES[0]} or other training file"]),
            *([] if TEST_FILE in found else [TEST_FILE]),
        ]
        if missing:
            places = " or ".join(SUBFOLDERS)
            raise DataError(
                f"{folder}: no {', no '.join(missing)} (plain or .gz) there or in its subfolder "
                f"{places}"
            )
        origin = f"CIFAR-10 from {found[TEST_FILE].parent}"
        return Dataset(read_images(train), read_images([found[TEST_FILE]]), origin)

    def download(self, cache: Path, say: Callable[[str], None]) -> None:
        """Download the archive and put its six files into ``cache``, unless they are there."""
        with locked(cache):
            if self.is_whole(self.find(cache)):
                return
            say(f"downloading {ARCHIVE} (170 MB) into {cache}")
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                archive = fetch(ARCHIVE, self.mirrors, self.sha256, Path(folder))
                for file in unpack(archive):
                    os.replace(file, cache / file.name)

    def digits(self, why: str) -> Dataset:
        """The bundled digits in 32x32 pixels and three equal channels."""
        return load_digits(self.name, why, scale=4, border=0, channels=3)


def unpack(archive: Path) -> list[Path]:
    """Unpack the six files of the published archive next to it, and return their paths.

    Raises:
        DataError: the archive lacks one of them.
    """
    paths = []
    with tarfile.open(archive, mode="r:gz") as members:
        for member in members:
            name = PurePosixPath(member.name).name
            if name in (*TRAIN_FILES, TEST_FILE) and (source := members.extractfile(member)):
                paths.append(archive.with_name(name))
                with paths[-1].open("wb") as target:
                    shutil.copyfileobj(source, target)
    if missing := {*TRAIN_FILES, TEST_FILE} - {path.name for path in paths}:
        raise DataError(f"{ARCHIVE}: has no {', no '.join(sorted(missing))}")
    return paths


def read_images(paths: list[Path]) -> Images:
    """Read files of CIFAR-10's binary version, in this order.

    The format: 3,073 bytes for each image: the label, then the pixels in the order channel, row,
    column.
    """
    records = np.concatenate([_read_records(path) for path in paths])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(
        np.ascontiguousarray(pixels),
        records[:, 0].astype(np.int64),
        PIXEL_MEAN,
        PIXEL_DEVIATION,
        mirrors=True,
    )


def _read_records(path: Path) -> np.ndarray:
    content = read_file(path)
    if not content or len(content) % RECORD:
        raise DataError(
            f"{path}: truncated or not a CIFAR-10 file: {len(content)} bytes are not a whole "
            f"number of images of {RECORD} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if len(wrong):
        raise DataError(
            f"{path}: not a CIFAR-10 file: labels must be 0 to 9, got {records[wrong[0], 0]} for "
            f"image {wrong[0]}"
        )
    return records
