import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from test_docs import scripts


@pytest.mark.parametrize("text", scripts("docs/transformers.md"))
def test_the_code_of_the_page_runs(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(text)
    runpy.run_path(str(script), run_name="__main__")
