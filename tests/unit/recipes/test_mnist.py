"""Reading MNIST's files, errors that name bad files, and the digits in place of them."""

import gzip

import numpy as np
import pytest
from common import sources
from common.images import DataError
from common.mnist import Mnist
from idx_files import idx

read_mnist = Mnist().read
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def test_reads_pixels_and_labels_in_the_files_order(folder, contents, tmp_path):
    data = read_mnist(folder)
    assert (len(data.train), len(data.test)) == (30, 20)
    assert data.train.pixels.dtype == np.uint8
    assert data.train.pixels.tobytes() == contents["train-images-idx3-ubyte"][16:]
    assert data.test.labels.tolist() == list(contents["t10k-labels-idx1-ubyte"][8:])
    plain = tmp_path / "plain" / "mnist"
    plain.mkdir(parents=True)
    for name, content in contents.items():
        (plain / name).write_bytes(content)
    assert read_mnist(plain).digest() == data.digest()
    assert read_mnist(plain.parent).digest() == data.digest()


def flip_a_byte(raw):
    packed = bytearray(gzip.compress(raw))
    packed[200] ^= 255
    return bytes(packed)


@pytest.mark.parametrize(
    ("file", "spoil", "complaint"),
    [
        (IMAGES, lambda raw: gzip.compress(raw)[:9000], "truncated or damaged"),
        (IMAGES, flip_a_byte, "truncated or damaged"),
        (IMAGES, lambda raw: gzip.compress(raw[:-5]), "23515 bytes after a header that announces"),
        (IMAGES, lambda raw: gzip.compress(raw + b"x"), "announces 30 x 28 x 28"),
        (IMAGES, lambda raw: raw[:10], "truncated"),
        (IMAGES, lambda raw: b"", "must start with 00000803, got nothing"),
        (IMAGES, lambda raw: b"<!DOCTYPE html>", "must start with 00000803, got 3c21444f"),
        (IMAGES, lambda raw: idx(np.zeros(30)), "must start with 00000803, got 00000801"),
        (IMAGES, lambda raw: idx(np.zeros((30, 32, 32))), r"must be 28x28, got \(32, 32\)"),
        (LABELS, lambda raw: idx(np.zeros(29)), "has 29 labels for the 30 images of .*images"),
        (LABELS, lambda raw: idx(np.full(30, 10)), "labels must be 0 to 9, got 10"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_with_what_is_wrong(
    folder, contents, file, spoil, complaint
):
    (folder / file).write_bytes(spoil(contents[file.removesuffix(".gz")]))
    with pytest.raises(DataError, match=complaint) as error:
        read_mnist(folder)
    assert str(folder / file) in str(error.value)


def test_files_without_any_image_are_refused(folder):
    (folder / IMAGES).write_bytes(idx(np.zeros((0, 28, 28))))
    (folder / LABELS).write_bytes(idx(np.zeros(0)))
    with pytest.raises(DataError, match="holds no labels"):
        read_mnist(folder)


def test_the_digits_are_mnists_size_in_a_fixed_split_with_every_digit_in_proportion():
    from sklearn.datasets import load_digits

    data = sources.load(Mnist(mirrors=()), "digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.pixels.shape[1:] == (28, 28)
    assert data.train.pixels.max() == 255
    assert not data.train.pixels[:, :2].any()
    assert np.bincount(data.test.labels).min() >= 34
    assert sources.load(Mnist(mirrors=()), "digits").digest() == data.digest()
    # Each is its bundled image enlarged three times.
    bundled = {image.tobytes() for image in load_digits().images.astype(np.uint8)}
    shrunk = np.round(data.test.pixels[:, 3:-3:3, 3:-3:3] * (16 / 255))
    assert all(image.tobytes() in bundled for image in shrunk.astype(np.uint8))


@pytest.mark.parametrize("dataset", ["auto", "mnist"])
def test_a_data_dir_without_the_files_is_an_error_that_names_what_is_missing(
    folder, dataset, monkeypatch
):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    elsewhere = folder / "elsewhere"
    with pytest.raises(DataError, match="no train-images-idx3-ubyte, no train-labels") as error:
        sources.load(Mnist(mirrors=()), dataset, elsewhere)
    assert str(elsewhere / "mnist") in str(error.value)


def test_the_environments_folder_is_used_and_must_be_whole(folder, monkeypatch):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    data = sources.load(Mnist(mirrors=()), "auto")
    assert len(data.train) == 30
    assert str(folder) in data.origin
    (folder / LABELS).unlink()
    with pytest.raises(DataError, match="no train-labels-idx1-ubyte"):
        sources.load(Mnist(mirrors=()), "auto")
