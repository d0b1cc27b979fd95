"""The runner of tests/parallel: a rank that fails or hangs ends the run and shows itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARALLEL = Path(__file__).parents[1] / "parallel"

FAILS = """
import hvkit
def test_it():
    number = 40 + hvkit.rank()
    assert number != 41
    hvkit.barrier()
"""

HANGS = """
import time, hvkit
def test_it():
    if hvkit.rank() == 1:
        time.sleep(1000)  # here
    hvkit.barrier()
"""


def run_on_two_ranks(test: str, folder: Path) -> subprocess.CompletedProcess:
    path = folder / "test_it.py"
    path.write_text(test)
    command = [
        "mpirun", "-np", "2", sys.executable, "-m", "pytest", "-p", "conftest",
        "-c", os.devnull, "--rootdir", str(folder), str(path),
        "-o", "faulthandler_timeout=8",
    ]  # fmt: skip
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(PARALLEL)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("test", "shown"),
    [
        (FAILS, ["rank 1 of 2: test_it.py::test_it failed in call", "assert 41 != 41"]),
        (HANGS, ["Timeout", 'test_it.py", line 5 in test_it']),
    ],
    ids=["fails", "hangs"],
)
def test_a_rank_that_fails_or_hangs_ends_the_run_and_shows_itself(test, shown, tmp_path):
    done = run_on_two_ranks(test, tmp_path)
    assert done.returncode != 0
    for text in shown:
        assert text in done.stderr + done.stdout


FEWER_BATCHES = """
import torch, hvkit
model = torch.nn.Linear(2, 1)
model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3 - hvkit.rank()):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


WAITS_ELSEWHERE = FEWER_BATCHES + "hvkit.average(1.0)"

EVALUATES_ALONE = """
import keras, numpy as np, hvkit
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1))
model.compile(optimizer, "mse")
if hvkit.rank() == 0:
    model.evaluate(np.ones((4, 2)), np.ones(4), verbose=0)
"""


@pytest.mark.parametrize(
    "code",
    [FEWER_BATCHES, WAITS_ELSEWHERE, EVALUATES_ALONE],
    ids=["fewer batches", "waits elsewhere", "evaluates alone"],
)
def test_a_rank_that_others_wait_for_in_vain_ends_them_with_the_reason(code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(code)
    soon = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    done = subprocess.run(
        ["mpirun", "-np", "2", sys.executable, str(script)],
        env=os.environ | soon,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "RankLostError: another rank has ended, or waits elsewhere" in done.stderr
    assert "the same number of steps" in done.stderr


def test_a_run_without_ranks_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(PARALLEL)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "mpirun -np 2" in done.stdout + done.stderr
