"""Programs with problems."""

import pytest


@pytest.fixture
def program(tmp_path):
    """Write a shell script into the folder ``bin`` of the test; returns its path."""

    def write(name, body):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write
