"""JAX's ranks end with what explains it: JAX itself would wait for minutes, or abort the others."""

import os
import re
import subprocess
import sys
import time

import pytest
from cases import MORE, cases

TRAIN = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np, optax, hvkit
{start}
params, tx = hvkit.distribute({{"w": jnp.ones(3)}}, optax.sgd(0.1))
rank = hvkit.rank()
state = tx.init(params)
for i in range({steps}):
    {inside}
    x = hvkit.batch(np.full((2, 3), rank, np.float32))  # batch
    gradients = jax.grad(lambda params: (x @ params["w"]).mean())(params)
    changes, state = tx.update(gradients, state)
    params = optax.apply_updates(params, changes)
print(f"trained {{params['w'][0]:.4f}}")
"""


def run(tmp_path, inside="pass", start='hvkit.init("jax")', steps=5, launcher=(), **settings):
    """The exit status, the output, and the seconds of a script on two ranks."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(inside=inside, start=start, steps=steps))
    command = launcher or ("hvkit", "run", "-np", "2")
    environment = {"OMP_NUM_THREADS": "1", **settings}
    begun = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun


GLOO = ("hvkit", "run", "--launcher", "gloo", "-np", "2")
LAUNCHERS = {"hvkit run": (), "mpirun": ("mpirun", "-np", "2"), "gloo": GLOO}


@pytest.mark.parametrize("launcher", cases(LAUNCHERS))
def test_ranks_train_and_end(tmp_path, launcher):
    status, said, _ = run(tmp_path, launcher=LAUNCHERS[launcher])
    assert status == 0, said
    assert re.findall("trained (.*)", said) == ["0.7500", "0.7500"]  # the mean of x is 0.5
    if launcher != "mpirun":  # hvkit run leaves out what jaxlib and gloo say though all is well
        assert not re.search(r"\.cc:\d+\]|\[Gloo\]|absl::", said), said


@pytest.mark.parametrize(("failing", "launcher"), cases([(0, ()), (1, ()), (0, GLOO)]))
def test_a_rank_that_raises_ends_the_run_with_its_traceback(tmp_path, failing, launcher):
    inside = f"if rank == {failing} and i == 3: raise ValueError('no')"
    status, said, seconds = run(tmp_path, inside=inside, launcher=launcher)
    assert status == 1
    assert said.count("ValueError: no") >= 1
    assert "Traceback" in said
    assert seconds < 60  # on a busy machine: JAX itself would wait for 300 s
    first = said.index("ValueError: no")
    assert "Terminating process" not in said[:first]


@MORE
def test_a_rank_that_sleeps_is_named(tmp_path):
    status, said, _ = run(
        tmp_path,
        inside="if rank == 1 and i == 3: time.sleep(100)",
        HVKIT_STALL_SECONDS="10",
        HVKIT_STALL_LIMIT_SECONDS="20",
    )
    assert status != 0
    assert re.search(r"rank 1 has not reached hvkit\.batch .*train\.py", said), said


@MORE
@pytest.mark.parametrize("launcher", [(), GLOO], ids=["mpi", "gloo"])
def test_a_rank_that_alone_saves_with_collectives_of_jax_is_named_and_ended(tmp_path, launcher):
    # As Orbax's save does it, with the ranks' arrays.
    saves = "if i == 3 and rank == 0: from jax.experimental import multihost_utils as m; "
    status, said, seconds = run(
        tmp_path, saves + "m.sync_global_devices('save')", launcher=launcher
    )
    assert status != 0
    assert seconds < 60  # on a busy machine
    assert re.search(
        r"rank 0 waits in multihost_utils\.sync_global_devices \(.*train\.py:\d+\); rank 1 waits "
        r"in hvkit\.batch \(.*train\.py:\d+\): every rank has to make the same calls",
        said,
    ), said


@MORE
@pytest.mark.parametrize("launcher", [(), GLOO], ids=["mpi", "gloo"])
def test_a_rank_that_is_killed_is_named(tmp_path, launcher):
    inside = "if rank == 1 and i == 3: os.kill(os.getpid(), signal.SIGKILL)"
    status, said, _ = run(tmp_path, inside=inside, launcher=launcher)
    assert status != 0
    assert re.search("rank 1 .*(SIGKILL|killed)", said), said


@MORE
def test_ranks_with_other_numbers_of_steps_are_named(tmp_path):
    status, said, _ = run(tmp_path, steps="(5 if hvkit.rank() else 7)")
    assert status != 0
    assert re.search(r"rank 0 waits in hvkit\.batch .*rank 1 has ended its script", said), said


@MORE
def test_a_script_without_batches_is_warned_at_its_end(tmp_path):
    status, said, _ = run(tmp_path, steps=0)
    assert status == 0, said
    assert said.count("hvkit.distribute was called, but hvkit.batch never") == 1


@MORE
def test_a_start_after_the_first_array_is_refused_with_the_fix(tmp_path):
    status, said, _ = run(tmp_path, start='jnp.ones(1); hvkit.init("jax")')
    assert status == 1
    assert 'call hvkit.init("jax") right after the imports' in said


COLLECTIVES = """
import numpy as np, hvkit
hvkit.init("jax")
rank, size = hvkit.rank(), hvkit.size()
assert size == 3
for root in range(size):
    assert hvkit.broadcast(("from", rank), root) == ("from", root)
assert [len(each) for each in hvkit.allgather(b"x" * rank * 1_000_000)] == [0, 1_000_000, 2_000_000]
for length in (0, 1, 2, 100_003):  # fewer than ranks, and no multiple of them
    array = np.arange(length) + rank
    for dtype in ("int32", "int64", "float32", "float64"):
        for op, reduce in (("sum", sum), ("min", min), ("max", max)):
            expected = np.arange(length) * (3 if op == "sum" else 1) + reduce(range(size))
            result = hvkit.allreduce(array.astype(dtype), op)
            assert result.dtype == dtype and np.array_equal(result, expected), (length, dtype, op)
assert (hvkit.local_rank(), hvkit.local_size()) == (rank, 3)
"""


@MORE
def test_collectives_without_mpi(tmp_path):
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    command = ("hvkit", "run", "--launcher", "gloo", "-np", "3", sys.executable, str(script))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
