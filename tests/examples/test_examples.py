"""Scripts as people have them, put on several ranks by at most five added lines."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import cases

EXAMPLES = Path(__file__).parents[2] / "examples"
ADDED = "  # added"
BATCH_SIZE, RATE = 18, 0.04
TRAINERS = ["torch_lightning", "torch_transformers", "torch_accelerate"]
PYTORCH, KERAS = ["torch_loop", "torch_gan", *TRAINERS], ["keras_sequential", "keras_functional"]
SUFFIX = {"keras_train_step": ".weights.h5", "keras_hub_lora": ".lora.h5"} | dict.fromkeys(
    PYTORCH, ".pt"
)


def without_hvkit(script: Path) -> str:
    return "".join(
        line
        for line in script.read_text().splitlines(keepends=True)
        if not line.rstrip().endswith(ADDED)
    )


def run(command, script, save, *, batch_size, rate):
    """Run a script for two epochs in the given order of samples; what it printed."""
    flags = ["--batch-size", str(batch_size), "--lr", str(rate), "--epochs", "2"]
    if "--no-shuffle" in script.read_text():
        flags.append("--no-shuffle")  # Keras shuffles arrays itself, and not by a common seed
    done = subprocess.run(
        [*command, sys.executable, str(script), "--save", str(save), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(path):
    """The arrays in a saved file."""
    if path.suffix == ".pt":
        import torch

        def flat(state):
            for value in state.values():
                yield from flat(value) if isinstance(value, dict) else [value.numpy()]

        return list(flat(torch.load(path)))
    import zipfile

    import h5py

    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            path = Path(archive.extract("model.weights.h5", path.parent / path.stem))
    arrays = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: arrays.update({name: item[()]}) if hasattr(item, "shape") else None
        )
    return [value for name, value in sorted(arrays.items()) if "optimizer" not in name]


# One of each framework.
FIRST = ("torch_loop", "keras_sequential")


@pytest.mark.parametrize(
    "script",
    cases(
        sorted(EXAMPLES.glob("*.py")),
        [EXAMPLES / f"{name}.py" for name in FIRST],
        name=lambda path: path.stem,
    ),
)
def test_two_ranks_equal_one_process_with_twice_the_batch(script, tmp_path):
    suffix = SUFFIX.get(script.stem, ".keras")
    one, two = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
    run([], script, one, batch_size=2 * BATCH_SIZE, rate=RATE)
    run(["mpirun", "-np", "2"], script, two, batch_size=BATCH_SIZE, rate=RATE)
    for ours, reference in zip(trained(two), trained(one), strict=True):
        assert np.abs(ours - reference).max() < 1e-5 * max(np.abs(reference).max(), 1)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_at_most_five_lines_make_the_difference(script):
    added = [line for line in script.read_text().splitlines() if line.endswith(ADDED)]
    assert 2 <= len(added) <= 5
    assert "hvkit" not in without_hvkit(script)


@pytest.mark.parametrize("name", cases(FIRST))
def test_without_them_it_is_the_script_that_one_had(name, tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text(without_hvkit(EXAMPLES / f"{name}.py"))
    save = tmp_path / f"plain{SUFFIX.get(name, '.keras')}"
    assert "accuracy" in run([], plain, save, batch_size=32, rate=0.1)
    assert save.exists()
