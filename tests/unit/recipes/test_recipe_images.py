"""Images as a model gets them: batches, random crops and mirror images."""

import numpy as np
import pytest
from common.images import PAD, Images, augmented
from common.mnist import Mnist


def test_a_batch_is_float32_centred_on_zero_with_its_labels(folder):
    images = Mnist().read(folder).train
    pixels, labels = images.batch(np.array([7, 3]))
    assert pixels.dtype == np.float32
    assert pixels.shape == (2, 28, 28)
    np.testing.assert_allclose(pixels[1], (images.pixels[3] / 255 - 0.1307) / 0.3081, rtol=1e-5)
    assert labels.tolist() == [images.labels[7], images.labels[3]]


def test_the_digest_tells_apart_images_that_differ_in_one_label(folder):
    data = Mnist().read(folder)
    before = data.digest()
    data.test.labels[-1] += 1
    assert data.digest() != before


@pytest.fixture
def images():
    pixels = np.random.default_rng(0).integers(1, 256, size=(200, 8, 8, 3), dtype=np.uint8)
    return Images(pixels, np.arange(200) % 10, mirrors=True)


def test_each_image_is_its_padded_self_cropped_and_perhaps_mirrored(images):
    shown = augmented(images, seed=1, epoch=0)
    rows = np.array([5, 0, 199, 5])
    pixels, labels = shown.batch(rows)
    assert labels.tolist() == [5, 0, 9, 5]
    assert pixels.dtype == np.float32
    for pixel, row in zip(pixels, rows, strict=True):
        padded = np.pad(images.batch(slice(row, row + 1))[0][0], ((PAD, PAD), (PAD, PAD), (0, 0)))
        top, left = shown.corners[row]
        crop = padded[top : top + 8, left : left + 8]
        np.testing.assert_array_equal(pixel, crop[:, ::-1] if shown.mirrored[row] else crop)


def test_every_shift_occurs_and_half_of_the_images_are_mirrored(images):
    shown = augmented(images, seed=1, epoch=0)
    assert {*shown.corners[:, 0]} == {*shown.corners[:, 1]} == set(range(2 * PAD + 1))
    assert 70 <= shown.mirrored.sum() <= 130


def test_the_look_changes_with_epoch_and_seed_and_with_nothing_else(images):
    def look(seed, epoch):
        return augmented(images, seed, epoch).batch(np.arange(200))[0].tobytes()

    assert look(1, 1) == look(1, 1)
    some = augmented(images, 1, 1).batch(np.array([17]))[0].tobytes()
    assert some in look(1, 1)
    assert look(1, 1) != look(1, 2)
    assert look(1, 1) != look(2, 1)


def test_images_that_mean_something_else_in_a_mirror_are_not_mirrored(images):
    digits = Images(images.pixels, images.labels)
    assert not augmented(digits, seed=1, epoch=0).mirrored.any()
