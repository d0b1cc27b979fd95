"""How scripts with a parameter server end: with other numbers of steps, with errors, too late."""

import pytest
from cases import MORE
from test_ranks_that_wait import GLOO, run

pytestmark = MORE

TORCH = """
import sys, time, torch
{before}
import hvkit
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvkit.distribute(model, optimizer, strategy=hvkit.ParameterServer({staleness}))  # distribute
rank = hvkit.rank()
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    {inside}
    optimizer.step()  # step
print("rank", rank, "did", step + 1, file=sys.stderr, flush=True)
{after}
"""

FIT = """
import keras, numpy as np, hvkit
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
hvkit.distribute(model, optimizer, strategy=hvkit.ParameterServer({staleness}))
model.compile(optimizer, "mse")
rank = hvkit.rank()
x, y = np.ones((64, 2), np.float32), np.ones((64, 1), np.float32)
class InFit(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        {inside}
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[InFit()])
"""


def torch_script(staleness=1, steps="12", before="", inside="", after=""):
    return TORCH.format(staleness=staleness, steps=steps, before=before, inside=inside, after=after)


@pytest.mark.parametrize(("staleness", "steps"), [(2, "28 - 20 * rank"), (0, "8 + 20 * rank")])
def test_ranks_with_fewer_steps_wait_at_the_end_and_hold_up_nobody(staleness, steps, tmp_path):
    status, err, _ = run(torch_script(staleness, steps), tmp_path, 2)
    assert status == 0, err
    assert all(f"rank {rank} did {eval(steps)}\n" in err for rank in (0, 1)), err


FAILS = "assert {} != {} or {} < 5, 'too far'"
FAILING = {
    "torch: rank 1": torch_script(inside=FAILS.format("rank", 1, "step")),
    "torch: rank 0": torch_script(inside=FAILS.format("rank", 0, "step")),
    "torch: killed": torch_script(
        inside="if rank == 1 and step == 5: import os; os.kill(os.getpid(), 9)"
    ),
    "keras: rank 1": FIT.format(staleness=0, inside=FAILS.format("rank", 1, "batch")),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_rank_that_fails_ends_the_others_while_they_wait_for_the_server(case, tmp_path):
    status, err, _ = run(FAILING[case], tmp_path, 2)
    assert status != 0
    assert "killed" in case or err.count("\nAssertionError: too far") == 1, err
    assert "did 12" not in err


def test_without_mpi_messages_go_over_tcp_and_a_rank_that_fails_ends_the_others(tmp_path):
    status, err, _ = run(torch_script(2, "28 - 20 * rank"), tmp_path, 2, launcher=GLOO)
    assert status == 0, err
    assert "rank 0 did 28\n" in err
    assert "rank 1 did 8\n" in err
    status, err, _ = run(FAILING["torch: rank 1"], tmp_path, 2, launcher=GLOO)
    assert status != 0
    assert "AssertionError: too far" in err
    assert "did 12" not in err


def test_a_rank_that_is_too_slow_is_named_and_ends_the_run_after_the_limit(tmp_path):
    code = torch_script(inside="while rank == 1 and step == 5: time.sleep(0.1)")
    limits = {"HVKIT_STALL_SECONDS": "5", "HVKIT_STALL_LIMIT_SECONDS": "8"}
    status, err, _ = run(code, tmp_path, 2, **limits)
    assert status != 0
    waits = "rank 0 waits for the parameter server on rank 0 for"
    assert err.count(f"hvkit: {waits}") == 1, err
    assert "it is ahead of rank 1 by 2 of its steps" in err
    assert "the limit is 8 s" in err


def test_a_collective_that_only_one_rank_calls_is_named(tmp_path):
    code = torch_script(after="if rank == 0: hvkit.average(1.0)  # here")
    status, err, lines = run(code, tmp_path, 2)
    assert status != 0
    assert f"rank 0 waits in hvkit.average ({lines['here']})" in err, err
    assert "rank 1 waits in the end of the script" in err


def test_without_mpi4py_every_rank_says_what_to_do(tmp_path):
    code = torch_script(before="sys.modules['mpi4py'] = None")
    status, err, _ = run(code, tmp_path, 2)
    assert status != 0
    assert "ParameterServer(staleness=1) needs messages by MPI: mpi4py cannot be loaded" in err
    assert "pip install --force-reinstall mpi4py" in err
