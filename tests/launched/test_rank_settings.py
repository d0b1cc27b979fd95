"""What ranks set before they start, in processes of their own."""

import os
import subprocess
import sys

import pytest
from cases import MORE

pytestmark = MORE

SUM = """
import os, torch, hvkit
os.environ[{variable!r}] = os.environ["OMPI_COMM_WORLD_RANK"]
assert hvkit.allreduce(torch.ones(1 << 18), "sum").eq(hvkit.size()).all()
"""
STARTS = {
    "hvkit": "import hvkit; hvkit.init('torch')",
    "horovod": """
import os, horovod.torch
horovod.torch.init()
assert os.environ["HVKIT_BLOCKING_WAITS"] == os.environ["HVKIT_OWN_COLLECTIVES"] == "1"
assert "HOROVOD_STALL_CHECK_DISABLE" not in os.environ
""",
}
FREED = """
import resource, torch


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


# Memory that Linux gives anew takes 10,240 pages each time. What is free already may first have to
# come together.
assert any(faults() < 100 for _ in range(40))
"""
# The names of Keras 2 are for scripts of Horovod's, which start it themselves. An import of Horovod
# for another framework comes after that.
NAMES = """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
assert tf.keras.optimizers.Adam(lr=0.5).variables()[1] == 0.5
import horovod.torch
assert hvd.global_process_set.included() and hvd.global_process_set.size() == 2
"""
NAMES_OF_KERAS_3 = """
import keras, hvkit
hvkit.init("tensorflow")
assert not hasattr(keras.optimizers.Adam(), "lr")
"""
# In a new process no other thread of Python's is without a frame.
STATES = """
import faulthandler, torch, hvkit
hvkit.allreduce(torch.ones(4))
with open({path!r} + str(hvkit.rank()), "w") as file:
    faulthandler.dump_traceback(file)
"""


def run(script, **settings):
    environment = {
        "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    done = subprocess.run(
        ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", script],
        env=os.environ | environment | settings, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("variable", ["HVKIT_BLOCKING_WAITS", "HVKIT_OWN_COLLECTIVES"])
def test_ranks_may_differ_in_what_they_set_for_horovod(variable):
    status, printed = run(SUM.format(variable=variable))
    assert status == 0, printed


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_rank_keeps_memory_that_it_frees(start):
    status, printed = run(start + FREED)
    assert status == 0, printed


def test_a_rank_returns_memory_if_the_user_says_so():
    status, printed = run(STARTS["hvkit"] + FREED, MALLOC_TRIM_THRESHOLD_="131072")
    assert status != 0
    assert "AssertionError" in printed


@pytest.mark.parametrize("script", [NAMES, NAMES_OF_KERAS_3], ids=["horovod", "hvkit"])
def test_scripts_of_horovods_may_use_names_of_keras_2(script):
    status, printed = run(script)
    assert status == 0, printed


def test_horovods_thread_keeps_its_thread_state(tmp_path):
    """A fork hangs if it comes just when that thread makes one, as it would for each operation."""
    status, printed = run(STATES.format(path=f"{tmp_path}/rank"))
    assert status == 0, printed
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text().count("<no Python frame>") == 1


def test_files_of_killed_launchers_do_not_stop_later_ones(tmp_path):
    name = os.uname().nodename
    for process in range(os.getpid(), os.getpid() + 3000):  # what mpirun may be called next
        folder = tmp_path / f"ompi.{process}"
        folder.mkdir()
        (folder / f"pmix.{name}.tool").touch()
    environment = {n: v for n, v in os.environ.items() if n != "PRTE_MCA_pmix_tool_support"}
    done = subprocess.run(
        [sys.executable, "-m", "hvkit", "run", "-np", "1", "true"],
        env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_messages_of_tensorflow_without_a_problem_go_to_the_log_only(tmp_path):
    script = "import tensorflow as tf; print(int(tf.ones(()) + 1))"
    environment = {n: v for n, v in os.environ.items() if n != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        ["hvkit", "run", "-np", "2", f"--log-dir={tmp_path}", sys.executable, "-c", script],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n2\n", "")
    for rank in range(2):
        assert "oneDNN" in (tmp_path / f"rank-000{rank}.log").read_text()
