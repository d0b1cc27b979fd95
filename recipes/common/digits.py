"""The handwritten digits that scikit-learn bundles: they stand in where there are no files."""

import numpy as np

from common.images import DataError, Dataset, Images


def load_digits(instead_of: str, why: str, scale: int, border: int, channels: int = 0) -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8x8, brought to the size of other images.

    The 17 grey levels are spread over 0 to 255. A fixed fifth, with every digit in proportion, is
    the test set.

    Args:
        instead_of: name of the images in whose place they stand, for ``origin``.
        why: the reason for that, for ``origin``.
        scale: each pixel becomes so many pixels in height and in width.
        border: so many black pixels are put around.
        channels: so many equal colour channels come last; 0 for grey images without that axis.

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
    # In MNIST's numbers the enlarged digits are centred well enough, in any shape.
    train, test = (
        Images(x, y, mean=0.1307, deviation=0.3081)
        for x, y in ((train_x, train_y), (test_x, test_y))
    )
    origin = f"scikit-learn's 1,797 handwritten digits in place of {instead_of} ({why})"
    return Dataset(train, test, origin)
