"""MNIST for the recipes: find its four files, download and verify them, read them.

Where MNIST cannot be had, scikit-learn's bundled handwritten digits stand in for it. Nothing here
knows about ranks: ``common.load_data`` lets the ranks take turns.
"""

import fcntl
import gzip
import hashlib
import http.client
import math
import os
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvkit.paths import cache_dir

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

# Of the uncompressed content: the mirrors may compress it differently.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081  # of MNIST's training images, black 0 to white 1


class DataError(Exception):
    """The images cannot be had; the message says what was tried and what is wrong."""


@dataclass(frozen=True)
class Images:
    """Labelled images: ``pixels`` uint8 of shape (n, 28, 28), ``labels`` int64 of shape (n,)."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """The images at ``rows`` for the network, as float32 centred on 0, and their labels."""
        brightness = self.pixels[rows].astype(np.float32) / 255
        return (brightness - PIXEL_MEAN) / PIXEL_DEVIATION, self.labels[rows]


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


def load(
    dataset: str = "auto",
    data_dir: Path | None = None,
    *,
    download: bool = True,
    mirrors: Sequence[str] = MIRRORS,
    sha256: Mapping[str, str] = SHA256,
    say: Callable[[str], None] = print,
) -> Dataset:
    """The first of these that there is: ``data_dir``, ``$HVKIT_DATA_DIR``, cache, download, digits.

    Args:
        dataset: ``"mnist"``, ``"digits"``, or ``"auto"``: MNIST, and the digits only where the
            download fails.
        data_dir: folder that must hold MNIST, itself or in its subfolder ``mnist``; nothing else
            is tried then.
        download: whether to download what the cache lacks.
        mirrors: addresses to download from, tried in order; they end in a slash.
        sha256: name of each file, and the checksum its downloaded content must have.
        say: is told of a download before it starts.

    Raises:
        DataError: no such images; a file is missing, damaged, or no part of MNIST.
    """
    if dataset == "digits":
        return load_digits("--dataset digits")
    if data_dir is not None:
        return read_mnist(data_dir)
    tried = "$HVKIT_DATA_DIR is not set"
    if named := os.environ.get("HVKIT_DATA_DIR"):
        if find(Path(named)):
            return read_mnist(Path(named))
        tried = f"$HVKIT_DATA_DIR, {named}, holds none of its files"
    cache = cache_dir() / "data" / "mnist"
    if len(find(cache)) < len(SHA256):
        try:
            if not download:
                raise DataError(f"{cache} does not hold it")
            fill_cache(cache, mirrors, sha256, say)
        except (DataError, OSError) as error:
            problem = f"no MNIST: {tried}; download into {cache} failed: {error}"
            if dataset == "auto":
                return load_digits(problem)
            raise DataError(
                f"{problem}. Name a folder with its four files {', '.join(SHA256)} (plain or .gz) "
                "with --data-dir, or use --dataset digits"
            ) from None
    try:
        return read_mnist(cache)
    except DataError as error:
        raise DataError(f"{error}; delete the file, and it is downloaded again") from None


def find(folder: Path) -> dict[str, Path]:
    """Those of MNIST's four files that are in ``folder`` or its subfolder ``mnist``, by name.

    The place with more of them counts; there a plain file goes before a gzipped one.
    """
    places = [
        {
            name: path
            for name in SHA256
            for path in (place / f"{name}.gz", place / name)
            if path.is_file()
        }
        for place in (folder, folder / "mnist")
    ]
    return max(places, key=len)


def read_mnist(folder: Path) -> Dataset:
    """Read MNIST, or any subset of it in files of the same names, from ``folder``.

    Raises:
        DataError: naming the file, and what is wrong with it.
    """
    found = find(folder)
    if missing := [name for name in SHA256 if name not in found]:
        raise DataError(
            f"{folder}: no {', no '.join(missing)} (plain or .gz) there or in {folder / 'mnist'}"
        )
    train = read_images(found["train-images-idx3-ubyte"], found["train-labels-idx1-ubyte"])
    test = read_images(found["t10k-images-idx3-ubyte"], found["t10k-labels-idx1-ubyte"])
    return Dataset(train, test, origin=f"MNIST from {found['train-images-idx3-ubyte'].parent}")


def read_images(pixels_file: Path, labels_file: Path) -> Images:
    """Read an images file and the labels file that belongs to it."""
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
    return Images(pixels, labels.astype(np.int64))


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or gzipped.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions; each
    dimension as a big-endian 32-bit number; then the bytes, last dimension fastest.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, truncated or damaged: {error}") from None
    magic = bytes([0, 0, 8, dims])
    header, values = content[: 4 + 4 * dims], content[4 + 4 * dims :]
    if header[:4] != magic:
        raise DataError(
            f"{path}: no IDX file of bytes in {dims} dimensions: must start with {magic.hex()}, "
            f"got {header[:4].hex() or 'nothing'}"
        )
    shape = struct.unpack_from(f">{dims}I", header.ljust(4 + 4 * dims, b"\0"), offset=4)
    if len(header) < 4 + 4 * dims or len(values) != math.prod(shape):
        raise DataError(
            f"{path}: truncated or overlong: {len(values)} bytes after a header that announces "
            f"{' x '.join(map(str, shape))}"
        )
    return np.frombuffer(values, np.uint8).reshape(shape)


def fill_cache(
    cache: Path, mirrors: Sequence[str], sha256: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Download what ``cache`` lacks; when several processes call, one does it, the others wait."""
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".lock"):
        for name, checksum in sha256.items():
            target = cache / f"{name}.gz"
            if not target.exists():
                say(f"downloading {name} into {cache}")
                _write_whole(target, fetch(f"{name}.gz", mirrors, checksum))


def fetch(file: str, mirrors: Sequence[str], checksum: str, timeout: float = 5.0) -> bytes:
    """Download a gzipped file from the first mirror that has it, with the right content.

    Args:
        file: its name, which follows the mirror's address.
        mirrors: addresses, tried in order.
        checksum: SHA-256 that the uncompressed content must have.
        timeout: seconds to wait for a connection, and for each piece of the answer.

    Raises:
        DataError: no mirror has it; says for each one why.
    """
    problems = []
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(mirror + file, timeout=timeout) as response:
                packed: bytes = response.read()
            found = hashlib.sha256(gzip.decompress(packed)).hexdigest()
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            problems.append(f"{mirror + file}: {error or type(error).__name__}")
            continue
        if found == checksum:
            return packed
        problems.append(f"{mirror + file}: content has SHA-256 {found}, expected {checksum}")
    raise DataError("; ".join(problems))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; waits while another process holds it."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_whole(target: Path, content: bytes) -> None:
    """Write a file that appears under its name only when it is complete."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
        try:
            part.write(content)
            part.close()
            os.replace(part.name, target)
        except BaseException:
            os.unlink(part.name)
            raise


def load_digits(why: str) -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8x8, brought to MNIST's 28x28.

    Each pixel becomes 3x3 pixels, inside a border of 2; the 17 grey levels are spread over 0 to
    255. A fixed fifth, with every digit in proportion, is the test set.

    Args:
        why: the reason for not using MNIST, for ``origin``.
    """
    try:
        from sklearn.datasets import load_digits as load_bundled
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise DataError(
            f"{why}; the bundled digits need scikit-learn: pip install scikit-learn"
        ) from None
    bundled = load_bundled()
    small = np.round(bundled.images * (255 / 16)).astype(np.uint8)
    pixels = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    labels = bundled.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=0.2, random_state=0, stratify=labels
    )
    origin = f"scikit-learn's 1,797 handwritten digits in place of MNIST ({why})"
    return Dataset(Images(train_x, train_y), Images(test_x, test_y), origin)
