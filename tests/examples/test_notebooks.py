"""The notebooks run from the first cell to the last, and show what their text says."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown(notebook):
    """What its cells print on standard output, or have as their values."""
    found = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    return "".join(
        each["text"] if each.get("name") == "stdout" else each["data"]["text/plain"] + "\n"
        for each in found
        if each.get("name") != "stderr"
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_says(path):
    notebook = nbformat.read(path, as_version=4)
    said = re.sub(r"rank 1, \S+:", "rank 1, HOST:", shown(notebook))
    NotebookClient(
        notebook,
        timeout=120,
        coalesce_streams=True,
        resources={"metadata": {"path": str(EXAMPLES)}},
    ).execute()
    now = re.sub(r"rank 1, \S+:", "rank 1, HOST:", shown(notebook))
    assert "same weights: True" in now
    assert numbers_of(now) == pytest.approx(numbers_of(said), abs=0.01)
    assert re.sub(r"\d\.\d+", "N", now) == re.sub(r"\d\.\d+", "N", said)


def numbers_of(text):
    return [float(number) for number in re.findall(r"\d\.\d+", text)]
