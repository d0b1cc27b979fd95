"""What halves the time in which a script of PyTorch starts on its ranks.

A conftest of tests that start scripts imports the fixture; hosts of a rig get the variable.
"""

import os
from pathlib import Path

import pytest

WITHOUT_COMPILER = {"PYTHONPATH": str(Path(__file__).with_name("without_compiler"))}


@pytest.fixture(scope="session", autouse=True)
def without_compiler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", WITHOUT_COMPILER["PYTHONPATH"], prepend=os.pathsep)
        yield
