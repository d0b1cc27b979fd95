"""Makes the recipes' shared modules importable as ``common``, and provides files like MNIST's."""

import functools
import gzip
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from idx_files import NAMES, idx

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
    """Serves ``folder`` at ``url``; ``requests`` holds the requested paths."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            requests.append(self.path)

    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{running.server_port}/"
        yield SimpleNamespace(url=url, requests=requests)
        running.shutdown()
