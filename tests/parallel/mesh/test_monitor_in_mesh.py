"""``hvkit.Monitor`` of a model of which each rank has a part."""

import json

import keras
import numpy as np
import pytest
import torch
from cases import MORE
from mesh_models import GPT
from mesh_training import MICROBATCHES, adamw, cross_entropy, of_this_rank, tokens
from ranks import shared_folder

import hvkit

pytestmark = MORE

MESHES = {
    "pipeline": {"mesh": hvkit.Mesh(pipeline=2), "microbatches": MICROBATCHES},
    "1F1B": {"mesh": hvkit.Mesh(pipeline=2), "microbatches": MICROBATCHES, "schedule": "1F1B"},
    "tensor": {"mesh": hvkit.Mesh(tensor=2)},
    "shard": {"mesh": hvkit.Mesh(shard=2)},
}
CLIP = 0.5


@pytest.fixture
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory)


def recorded(folder):
    """Rank 0's records, on all ranks."""
    text = (folder / "metrics.jsonl").read_text() if hvkit.is_main() else ""
    lines = map(json.loads, hvkit.broadcast(text).splitlines())
    return [line for line in lines if "samples_per_second" in line]


@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
def test_a_record_has_the_norm_of_all_gradients_and_counts_each_sample_once(folder, options):
    torch.manual_seed(0)
    model, data = GPT(layers=4), tokens(6)
    optimizer = adamw(model)
    norms = []
    with hvkit.Monitor(folder, every=2) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, **options)
        together = options["mesh"].pipeline * options["mesh"].tensor
        for x, y in monitor.batches(of_this_rank(data, together)):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            monitor.step(loss=loss.detach())
    found = recorded(folder)
    assert [each["step"] for each in found] == [2, 4, 6]
    assert [each["gradient_norm"] for each in found] == pytest.approx(norms[1::2], rel=1e-5)
    assert min(norms) > CLIP
    applied = [each["applied_gradient_norm"] for each in found]
    assert applied == pytest.approx([CLIP] * 3, rel=1e-4)
    # Of a rank's time, which differs from rank to rank.
    samples = [line["samples_per_second"] * line["seconds"]["step"] for line in found]
    assert samples == pytest.approx([len(data[0][0])] * 3, rel=0.4)


def test_keras_records_them_too(folder):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(16, width)).astype("f") for width in (8, 4))
    states = []
    with hvkit.Monitor(folder, every=1) as monitor:
        hvkit.distribute(
            model,
            optimizer,
            monitor=monitor,
            mesh=hvkit.Mesh(pipeline=2),
            microbatches=MICROBATCHES,
        )
        model.compile(optimizer, "mse")
        for _ in range(2):  # of the first step, which makes functions, there is no record
            model.fit(x, y, batch_size=16, verbose=0)
            with hvkit.settled(model):
                weights = model.get_weights() if hvkit.is_main() else [np.zeros(1)]
                states.append(np.concatenate([w.ravel() for w in weights]))
    norm = hvkit.broadcast(float(np.linalg.norm(states[1] - states[0]) / 0.1))
    (found,) = recorded(folder)
    assert found["gradient_norm"] == pytest.approx(norm, rel=1e-3)
