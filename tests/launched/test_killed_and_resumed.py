"""Runs whose ranks are killed in the middle of a round go on to the same weights."""

import pytest
from cases import MORE
from test_ranks_that_wait import run

pytestmark = MORE

# Each strategy trains a model of its own; all are saved after step 8. Rank 1 of the first run is
# killed when both have said what they have.
COMMON = """
import hashlib, os, sys
import numpy as np
import hvkit
from hvkit import *
CASES = (
    (Synchronous(), TopK(0.1)), (Synchronous(), PowerSGD(1)), (ShardedOptimizer(), "none"),
    (LocalSGD(5), "int8"), (DiLoCo(5), "none"), (DiLoCo(5, overlap=3), TopK(0.1)),
    (ElasticAveraging(5), "none"), (Gossip(3), "none"), (DeMo(top_k=1, chunk=4), "none"),
    (ParameterServer(0), "none"),
)
batches = np.random.default_rng(hvkit.rank()).normal(size=(19, 6, 8)).astype(np.float32)
runs = [Run(*case) for case in CASES]
checkpoint = hvkit.Checkpoint(
    sys.argv[1],
    **{f"model{i}": each.model for i, each in enumerate(runs)},
    **{f"optimizer{i}": each.optimizer for i, each in enumerate(runs)},
)
start = checkpoint.restore().step
for step, batch in enumerate(batches[start:], start + 1):
    for each in runs:
        each.step(batch)
    if step == 8:
        checkpoint.save(epoch=0, step=step)
states = [b"".join(w.tobytes() for w in each.weights()) for each in runs]
digests = [hashlib.sha256(state).hexdigest()[:8] for state in states]
for rank, theirs in enumerate(hvkit.allgather((start, digests))):
    if hvkit.rank() == 0:
        print("result", rank, *map(str, theirs), file=sys.stderr, flush=True)
hvkit.barrier()
if start == 0 and hvkit.rank() == 1:
    os.kill(os.getpid(), 9)
"""

TORCH = """
import torch
class Run:
    def __init__(self, strategy, compression):
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9)
        hvkit.distribute(self.model, self.optimizer, strategy=strategy, compression=compression)

    def step(self, x):
        x = torch.from_numpy(x)
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), x[:, :4]).backward()
        self.optimizer.step()

    def weights(self):
        return [p.detach().numpy() for p in self.model.parameters()]
"""

KERAS = """
import keras, tensorflow as tf
class Run:
    def __init__(self, strategy, compression):
        layers = keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)
        self.model = keras.Sequential([keras.Input((8,)), *layers])
        self.optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
        hvkit.distribute(self.model, self.optimizer, strategy=strategy, compression=compression)

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x) - x[:, :4]) ** 2)
        weights = self.model.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)

    def weights(self):
        return [w.numpy() for w in self.model.weights]
"""


@pytest.mark.parametrize("framework", [TORCH, KERAS], ids=["torch", "keras"])
def test_every_strategy_goes_on_as_if_nothing_had_happened(framework, tmp_path):
    seeds = "import random\nrandom.seed(1)\n"
    seeds += "torch.manual_seed(1)\n" if framework is TORCH else "keras.utils.set_random_seed(1)\n"
    script = framework + seeds + COMMON

    def results():
        status, err, _ = run(script, tmp_path, 2, ["saved"])
        return status, [line for line in err.splitlines() if line.startswith("result ")], err

    status, first, err = results()
    assert status != 0
    status, resumed, err = results()
    assert status == 0, err
    assert len(resumed) == 2
    assert [line.replace(" 8 ", " 0 ", 1) for line in resumed] == first
