"""``hvkit run`` as the command of a SageMaker job, which starts it on every host.

Hosts of the rig stand for the job's containers, and have what its training toolkit sets.
"""

import subprocess
import sys

import pytest
from cases import cases
from quick_start import LEFT_OUT

NAMES = ["algo-1", "algo-2"]
# Rank 1 is killed once.
SCRIPT = """
import os, signal, socket, sys
import torch, hvkit

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
hvkit.distribute(model, optimizer)
checkpoint = hvkit.Checkpoint(sys.argv[1], model=model, optimizer=optimizer)
start = checkpoint.restore().step
for step in range(start + 1, 7):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    checkpoint.end_step(epoch=0, step=step, every=2)
    if hvkit.rank() == 1 and start == 0 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
print("ended", socket.gethostname(), start, step, os.environ["SM_CHANNEL_TRAINING"], flush=True)
"""


@pytest.fixture
def hosts(rig):
    return rig(NAMES)


@pytest.mark.parametrize("named", cases([[], ["-H", "algo-1:1,algo-2:1"]], name=" ".join))
def test_the_first_host_starts_ranks_on_all_and_the_others_wait(hosts, tmp_path, named):
    command = [sys.executable, "-m", "hvkit", "run", "-np", "2", "--max-restarts", "1", *named]
    command += [sys.executable, "-c", SCRIPT, str(tmp_path / "saved")]
    running = {}
    for name in reversed(NAMES):
        environ = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": name}
        environ |= LEFT_OUT | {
            "SM_NUM_GPUS": "1",
            "SM_CHANNEL_TRAINING": f"/data/of/{name}",
        }
        running[name] = hosts.host(name).popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
        )
    printed, _ = running["algo-1"].communicate(timeout=240)
    assert running["algo-1"].returncode == 0, printed
    ended = sorted(line for line in printed.splitlines() if line.startswith("ended"))
    assert ended == [f"ended {name} 2 6 /data/of/algo-1" for name in NAMES], printed
    assert (
        "restart 1 (1 of at most 1 without a newer checkpoint), from step 2: rank 1 on algo-2"
        in printed
    )
    # Then the first container ends, and its ssh server with it.
    assert running["algo-2"].poll() is None
    hosts.host("algo-1").run(["pkill", "-KILL", "sshd"]).check_returncode()
    said, _ = running["algo-2"].communicate(timeout=120)
    assert running["algo-2"].returncode == 0, said
    assert "algo-1 starts the ranks" in said
