"""The image that the tests look at."""

import os
import sys
from pathlib import Path

import pytest
from built_image import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))  # for the rig of hosts


@pytest.fixture(scope="session")
def image() -> Image:
    """The image that build_image.py left in the folder that HVKIT_IMAGE_DIR names."""
    if "HVKIT_IMAGE_DIR" not in os.environ:
        pytest.fail("build an image with tests/image/build_image.py and name it in HVKIT_IMAGE_DIR")
    return Image.read(Path(os.environ["HVKIT_IMAGE_DIR"]).absolute())
