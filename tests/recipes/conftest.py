"""The fixture that starts a recipe, in less time."""

import pytest
from launching import Run, python, run
from monitored import Monitored
from quick_start import quick_start  # noqa: F401


@pytest.fixture
def start(tmp_path):
    """``start(launcher, recipe, *flags)`` runs a recipe to its end and returns a ``Run``.

    With ``output_dir=None`` the recipe records nothing.
    """

    def start(
        launcher, recipe, *flags, output_dir=tmp_path / "run", fails=False, seconds=170
    ) -> Run:
        folder = ["--output-dir", str(output_dir)] if output_dir else []
        command = [*launcher, *python(recipe), *flags, *folder]
        status, out, err = run(command, seconds)
        if (status != 0) != fails:
            pytest.fail(f"exit status {status}: {command}\n{out}\n{err}")
        recorded = output_dir and (output_dir / "metrics.jsonl").exists()
        return Run(status, out, err, Monitored.read(output_dir) if recorded else None)

    return start
