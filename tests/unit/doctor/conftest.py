"""Programs with problems."""

import pytest
from scripts import write_program


@pytest.fixture
def program(tmp_path):
    """Write a shell script into the folder ``bin`` of the test; returns its path."""
    return lambda name, body: write_program(tmp_path / "bin" / name, body)
