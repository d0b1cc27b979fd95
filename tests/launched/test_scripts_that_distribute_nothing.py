"""A script that shards its data, and trains without ``hvkit.distribute``, is warned."""

import os
import subprocess
import sys

import pytest
from cases import MORE

pytestmark = MORE

DATA = """
import hvkit
{start}
import numpy as np
x, y = hvkit.shard((np.ones((8, 3), "f"), np.ones((8, 1), "f")))
"""
TORCH = """
import torch
{begin}
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.from_numpy(x)).sum().backward()
    optimizer.step()
"""
KERAS = """
import keras
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, batch_size=2, verbose=0)
"""
BY_PYTORCH = (
    'torch.distributed.init_process_group("gloo", rank=hvkit.rank(), world_size=2, '
    'init_method="file://{folder}/ranks")'
)
WARNED = {
    "PyTorch": ("import torch", TORCH.format(begin=""), {}),
    "Keras": ("import keras", KERAS, {}),
    "Keras on JAX": ('import keras\nhvkit.init("jax")', KERAS, {"KERAS_BACKEND": "jax"}),
}


def said_by(tmp_path, start, train, settings):
    script = tmp_path / "train.py"
    script.write_text(DATA.format(start=start) + train)
    done = subprocess.run(
        ["hvkit", "run", "-np", "2", sys.executable, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", WARNED)
def test_training_without_distribute_is_named_once(tmp_path, case):
    said = said_by(tmp_path, *WARNED[case])
    assert said.count("updates a model, but neither was passed to hvkit.distribute") == 1


def test_a_script_that_pytorch_keeps_in_step_is_not(tmp_path):
    train = TORCH.format(begin=BY_PYTORCH.format(folder=tmp_path))
    assert "neither was passed" not in said_by(tmp_path, "import torch", train, {})
