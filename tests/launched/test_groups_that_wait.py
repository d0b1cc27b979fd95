"""Groups of ranks that do different things are left alone; ranks of one that do not meet are named.

The scripts are started as users start them, on four ranks in two groups.
"""

import pytest
from cases import MORE
from test_ranks_that_wait import run

pytestmark = MORE

TORCH = """
import time, torch, hvkit
from hvkit.mesh import divide
group = divide([[0, 1], [2, 3]], "torch")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvkit.distribute(model, optimizer, _group=group)
rank = hvkit.rank()
for step in range(3 if group.first == 0 else 6):
    loss = model(torch.ones(1, 2)).sum()
    {inside}
    loss.backward()  # backward
    optimizer.step()
hvkit.barrier()  # barrier
if rank == 0:
    print("all are here")
"""

KERAS = """
import time, keras, numpy as np, hvkit
from hvkit.mesh import divide
group = divide([[0, 1], [2, 3]], "tensorflow")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
hvkit.distribute(model, optimizer, _group=group)
model.compile(optimizer, "mse")
rank = hvkit.rank()
class InFit(keras.callbacks.Callback):
    def on_train_batch_begin(self, step, logs=None):
        {inside}
steps = 3 if group.first == 0 else 6
x, y = np.ones((4 * steps, 2), np.float32), np.ones((4 * steps, 1), np.float32)
model.fit(x, y, batch_size=4, verbose=0, callbacks=[InFit()])  # fit
hvkit.barrier()  # barrier
if rank == 0:
    print("all are here")
"""
SCRIPTS = {"torch": TORCH, "keras": KERAS}

# Longer than ranks may wait in calls that do not match.
SLOW = "if rank == 3 and step == 4: time.sleep(12)"


def test_a_group_waits_at_the_end_for_another_that_still_trains(tmp_path):
    code = TORCH.format(inside=SLOW)
    status, said, lines = run(code, tmp_path, 4, HVKIT_STALL_SECONDS="6")
    assert status == 0, said
    assert "RankLostError" not in said
    assert f"not reached hvkit.barrier ({lines['barrier']})" in said
    assert "rank 3 has not reached " in said


@pytest.mark.parametrize("framework", SCRIPTS)
def test_ranks_of_a_group_that_do_not_meet_are_named(framework, tmp_path):
    code = SCRIPTS[framework].format(inside="if rank == 3 and step == 4: hvkit.barrier()  # here")
    status, said, lines = run(code, tmp_path, 4)
    assert status != 0
    where = "backward() of step 5" if framework == "torch" else "fit, step"
    trained = "backward" if framework == "torch" else "fit"
    assert "hvkit: RankLostError: " in said
    assert f"rank 2 waits in {where}" in said
    assert f"({lines[trained]}); rank 3 waits in hvkit.barrier ({lines['here']})" in said
    assert "rank 0" not in said.split("RankLostError: ")[1].split("\n")[0]


def test_groups_of_a_horovod_that_was_started_without_them_are_refused(tmp_path):
    code = TORCH.replace("group =", "hvkit.rank()\ngroup =").format(inside="")
    status, said, _ = run(code, tmp_path, 4)
    assert status != 0
    assert "LaunchError: groups of ranks need a Horovod that was started for them" in said
