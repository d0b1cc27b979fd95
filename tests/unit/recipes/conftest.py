"""Makes the recipes' shared modules importable as ``common``, and provides files like MNIST's."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from idx_files import NAMES, idx
from local_server import Server

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))


@pytest.fixture(autouse=True)
def no_data_at_hand(monkeypatch, tmp_path):
    """No test reads the data or the cache of the user who runs it."""
    monkeypatch.delenv("HVKIT_DATA_DIR", raising=False)
    monkeypatch.setenv("HVKIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def contents():
    """Four files like MNIST's, uncompressed, with 30 training and 20 test images."""
    random = np.random.default_rng(0)
    arrays = (
        random.integers(256, size=(30, 28, 28)),
        random.integers(10, size=30),
        random.integers(256, size=(20, 28, 28)),
        random.integers(10, size=20),
    )
    return {name: idx(values) for name, values in zip(NAMES, arrays, strict=True)}


@pytest.fixture
def folder(tmp_path, contents):
    """A folder with the four files, gzipped."""
    place = tmp_path / "files"
    place.mkdir()
    for name, content in contents.items():
        (place / f"{name}.gz").write_bytes(gzip.compress(content))
    return place


@pytest.fixture
def server(folder, monkeypatch):
    """Serves ``folder``."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server(folder)
    yield running
    running.stop()
