"""A rank of a pipeline that ends, or does not come, is named. Started as users start scripts."""

import pytest
from cases import MORE
from test_ranks_that_wait import run

pytestmark = MORE

SCRIPT = """
import os, signal, time, torch, hvkit
from torch import nn
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = hvkit.distribute(
    model, optimizer, mesh=hvkit.Mesh(pipeline=2), schedule="{schedule}"
)
batches = iter([torch.full((8, 8), float(n)) for n in range(20)])
for step, x in enumerate(batches):
    {inside}
    loss = model(x).mean()  # forward
    loss.backward()  # backward
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_killed_rank_is_named(schedule, tmp_path):
    inside = "if step == 5 and hvkit.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)"
    status, said, _ = run(SCRIPT.format(inside=inside, schedule=schedule), tmp_path, 2)
    assert status != 0
    assert "rank 1" in said
    assert "SIGKILL" in said or "signal 9" in said


def test_a_rank_that_sleeps_is_named(tmp_path):
    inside = "if step == 5 and hvkit.rank() == 1: time.sleep(12)"
    code = SCRIPT.format(inside=inside, schedule="GPipe")
    status, said, lines = run(code, tmp_path, 2, HVKIT_STALL_SECONDS="5")
    assert status == 0, said
    assert "rank 1 has not reached" in said
    assert f"({lines['forward']})" in said


def test_a_rank_that_leaves_a_batch_out_is_named(tmp_path):
    inside = "if step == 5 and hvkit.rank() == 1: x = next(batches)"
    status, said, _ = run(SCRIPT.format(inside=inside, schedule="GPipe"), tmp_path, 2)
    assert status != 0
    assert "RanksDisagreeError: forward pass 6 of ranks 0-1" in said
    assert "rank 1 gets another batch than rank 0" in said
