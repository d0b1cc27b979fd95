"""Reading MNIST's files, and saying what is wrong with files that are not MNIST's."""

import gzip
import os
import shutil

import numpy as np
import pytest
from common import sources
from common.images import DataError
from common.mnist import Mnist
from idx_files import idx

read_mnist = Mnist().read


def load(*arguments):
    return sources.load(Mnist(mirrors=()), *arguments)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def test_reads_pixels_and_labels_in_the_files_order(folder, contents):
    data = read_mnist(folder)
    assert (len(data.train), len(data.test)) == (30, 20)
    assert data.train.pixels.dtype == np.uint8
    assert data.train.pixels.tobytes() == contents["train-images-idx3-ubyte"][16:]
    assert data.test.labels.tolist() == list(contents["t10k-labels-idx1-ubyte"][8:])


def test_plain_files_read_the_same_as_gzipped_ones(folder, contents, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for name, content in contents.items():
        (plain / name).write_bytes(content)
    assert read_mnist(plain).digest() == read_mnist(folder).digest()


def test_finds_the_files_in_the_subfolder_mnist(folder, tmp_path):
    (tmp_path / "parent").mkdir()
    shutil.move(folder, tmp_path / "parent" / "mnist")
    assert len(read_mnist(tmp_path / "parent").train) == 30


def test_a_batch_is_float32_centred_on_zero_with_its_labels(folder):
    images = read_mnist(folder).train
    rows = np.array([7, 3])
    pixels, labels = images.batch(rows)
    assert pixels.dtype == np.float32
    assert pixels.shape == (2, 28, 28)
    np.testing.assert_allclose(pixels[1], (images.pixels[3] / 255 - 0.1307) / 0.3081, rtol=1e-5)
    assert labels.tolist() == [images.labels[7], images.labels[3]]


def test_the_digest_tells_apart_images_that_differ_in_one_label(folder, contents):
    before = read_mnist(folder).digest()
    labels = bytearray(contents["t10k-labels-idx1-ubyte"])
    labels[-1] = (labels[-1] + 1) % 10
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    assert read_mnist(folder).digest() != before


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


@pytest.mark.parametrize("dataset", ["auto", "mnist"])
def test_a_data_dir_without_the_files_is_an_error_that_names_what_is_missing(
    folder, dataset, monkeypatch
):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    elsewhere = folder / "elsewhere"
    with pytest.raises(DataError, match="no train-images-idx3-ubyte, no train-labels") as error:
        load(dataset, elsewhere)
    assert str(elsewhere / "mnist") in str(error.value)


def test_the_environments_folder_is_used_where_no_data_dir_is_given(folder, monkeypatch):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    data = load("auto")
    assert len(data.train) == 30
    assert str(folder) in data.origin


def test_the_environments_folder_with_one_file_missing_is_an_error(folder, monkeypatch):
    monkeypatch.setenv("HVKIT_DATA_DIR", str(folder))
    os.remove(folder / LABELS)
    with pytest.raises(DataError, match="no train-labels-idx1-ubyte"):
        load("auto")


def test_the_digits_are_mnists_size_in_a_fixed_split_with_every_digit_in_proportion():
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.pixels.shape[1:] == (28, 28)
    assert data.train.pixels.max() == 255
    assert not data.train.pixels[:, :2].any()
    assert np.bincount(data.test.labels).min() >= 34
    assert load("digits").digest() == data.digest()


def test_each_digit_is_its_bundled_image_enlarged_three_times():
    from sklearn.datasets import load_digits

    bundled = {image.tobytes() for image in load_digits().images.astype(np.uint8)}
    shrunk = np.round(load("digits").test.pixels[:, 3:-3:3, 3:-3:3] * (16 / 255))
    assert all(image.tobytes() in bundled for image in shrunk.astype(np.uint8))
