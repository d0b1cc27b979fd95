"""The fixture that starts a recipe."""

import json

import pytest
from launching import Run, python, run


@pytest.fixture
def start(tmp_path):
    """``start(launcher, recipe, *flags)`` runs a recipe to its end and returns a ``Run``."""

    def start(launcher, recipe, *flags, fails=False, seconds=170) -> Run:
        folder = tmp_path / recipe
        command = [*launcher, *python(recipe), *flags, "--output-dir", str(folder)]
        status, out, err = run(command, seconds)
        if (status != 0) != fails:
            pytest.fail(f"exit status {status}: {command}\n{out}\n{err}")
        metrics = folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return Run(status, out, err, [json.loads(line) for line in lines])

    return start
