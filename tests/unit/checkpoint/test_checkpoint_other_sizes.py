"""Two ranks save, three resume and save, one resumes: training goes on at the rate of each size."""

import json
import os
import subprocess
import sys

import pytest

TORCH = """
import json, sys, torch, hvkit
from hvkit.checkpoint import Checkpoint
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
torch.manual_seed(hvkit.rank())
model = torch.nn.Linear(8, 1)
used = []
class Watched(torch.optim.SGD):
    def _init_group(self, group, *rest):  # called by the update
        used.append(group["lr"])
        return super()._init_group(group, *rest)
optimizer = Watched(model.parameters(), lr=0.02, momentum=0.5)
hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=8)
first = LinearLR(optimizer, 0.5, total_iters=2)
scheduler = SequentialLR(optimizer, [first, StepLR(optimizer, 100)], [2])
checkpoint = Checkpoint(sys.argv[1], model=model, optimizer=optimizer, scheduler=scheduler)
start = checkpoint.restore()
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
losses = []
for step in range(start.step, start.step + 5):
    loss = (model(x) - x[:, :1]).square().mean()
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
checkpoint.save(epoch=0, step=start.step + 5, extras={"losses": losses})
rate, base = optimizer.param_groups[0]["lr"], scheduler._schedulers[1].base_lrs[0]
weight = model.weight.tolist()
"""

KERAS = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras, numpy as np, hvkit
from hvkit.checkpoint import Checkpoint
keras.utils.set_random_seed(hvkit.rank())
model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.01), keras.layers.Dense(1)])
used = []
class Watched(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        used.append(float(learning_rate))
        super().update_step(gradient, variable, learning_rate)
optimizer = Watched(0.02, momentum=0.5)
hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=8)
model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
checkpoint = Checkpoint(sys.argv[1], model=model, optimizer=optimizer)
start = checkpoint.restore()
x = np.random.default_rng(5).normal(size=(64, 8)).astype("float32")
fitted = model.fit(
    x, x[:, :1], batch_size=64, epochs=start.epoch + 5, initial_epoch=start.epoch, verbose=0
)
losses = fitted.history["loss"]
checkpoint.save(epoch=start.epoch + 5, step=start.step + 5, extras={"losses": losses})
rate = base = float(optimizer.learning_rate)
weight = model.weights[0].numpy().tolist()
"""

REPORT = """
if len({json.dumps(each) for each in hvkit.allgather(weight)}) != 1:
    sys.exit("the ranks have different weights")
if hvkit.rank() == 0:
    before = start.extras.get("losses", [])
    print(json.dumps([start.step, start.size, rate, base, [used[0], used[-1]], before, losses]))
"""


def run(script, ranks, folder):
    launcher = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HVKIT_RANK"))}
    done = subprocess.run(
        [*launcher, sys.executable, "-c", script + REPORT, str(folder)],
        capture_output=True, text=True, timeout=240, env=clean, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("script", [TORCH, KERAS], ids=["torch", "keras"])
def test_the_rate_stays_the_users_and_steps_use_it_for_the_new_number_of_ranks(script, tmp_path):
    """The warm-up goes on in the middle, too."""
    (step, size, rate, base, used, _, _), said = run(script, 2, tmp_path)
    assert (step, size) == (0, None)
    assert (rate, base) == pytest.approx((0.02, 0.02))
    assert used == pytest.approx([0.01 if script is TORCH else 0.02, 0.02 * 1.5])
    assert "resumed" not in said

    (step, size, rate, base, used, before, losses), said = run(script, 3, tmp_path)
    assert (step, size) == (5, 2)
    assert (rate, base) == pytest.approx((0.02, 0.02))
    assert used == pytest.approx([0.02 * (1 + 2 * 5 / 8), 0.06])
    assert (
        f"hvkit: resumed {tmp_path}/step-000000005 (epoch {5 * (script is KERAS)}, step 5) saved "
        "on 2 ranks; 3 ranks now; rank 2: random state as the script set it\n"
    ) in said
    assert before[-1] > losses[0] > losses[-1]

    (step, size, rate, base, used, before, losses), said = run(script, 1, tmp_path)
    assert (step, size) == (10, 3)
    assert (rate, base) == pytest.approx((0.02, 0.02))
    assert used == pytest.approx([0.02, 0.02])
    assert "saved on 3 ranks; 1 rank now\n" in said
    assert before[-1] > losses[0] > losses[-1]
