"""Messages between ranks under each launcher, from Horovod's start to its end."""

import json
import sys

import pytest
from cases import cases
from launching import run

SCRIPT = """
import json, sys
import {framework}
import hvkit
from hvkit import runtime
from hvkit.communication import collectives
from hvkit.transport import mailbox
everyone = list(collectives.collect("test", "x" * 100 * hvkit.rank()))
engine = runtime.engine("{framework}")
before = mailbox.can_send(engine)
imported = "mpi4py" in sys.modules
states = hvkit.allgather([before, imported])
if hvkit.rank() == 0:
    print("hvkit:" + json.dumps([[len(each) for each in everyone], states]), flush=True)
engine.hvd.shutdown()
if mailbox.can_send(engine):
    sys.exit("messages after the end of MPI")
"""

LAUNCHERS = {
    "mpirun, 2": (["mpirun", "--oversubscribe", "-np", "2"], True),
    "mpirun, 3": (["mpirun", "--oversubscribe", "-np", "3"], True),
    "gloo": (["horovodrun", "--gloo", "-np", "2"], False),
}
FIRST = [("mpirun, 2", "torch"), ("gloo", "torch")]
MORE = [("mpirun, 3", "tensorflow")]


@pytest.mark.parametrize(("launcher", "framework"), cases([*FIRST, *MORE], FIRST))
def test_they_go_through_mpi_where_it_runs_and_leave_its_end_to_horovod(launcher, framework):
    command, by_mpi = LAUNCHERS[launcher]
    code = SCRIPT.format(framework=framework)
    status, out, err = run([*command, sys.executable, "-c", code], 170)
    assert status == 0, err
    lengths, states = json.loads(out.partition("hvkit:")[2].splitlines()[0])
    assert lengths == [100 * rank for rank in range(len(states))]
    assert states == [[by_mpi, by_mpi]] * len(states)


def test_one_process_and_ranks_that_send_nothing_import_no_mpi4py():
    code = "import sys, hvkit, torch\nhvkit.allgather(1)\nsys.exit('mpi4py' in sys.modules)"
    status, _, err = run([sys.executable, "-c", code], 170)
    assert status == 0, err
    status, _, err = run(["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", code], 170)
    assert status == 0, err


WITHOUT = """
import sys
sys.modules["mpi4py"] = None
import torch, hvkit
from hvkit.communication import collectives
assert list(collectives.collect("test", hvkit.rank())) == ([0, 1] if hvkit.rank() == 0 else [])
assert list(collectives.collect("test", hvkit.rank())) == ([0, 1] if hvkit.rank() == 0 else [])
"""


def test_without_mpi4py_ranks_send_through_horovod_and_say_so_once():
    command = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", WITHOUT]
    status, _, err = run(command, 170)
    assert status == 0, err
    assert err.count("hvkit: mpi4py cannot be loaded") == 2, "once on each rank"
    assert "pip install --force-reinstall mpi4py" in err
