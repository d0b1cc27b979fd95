"""What the launcher of an MPIJob runs, with what the operator gives it, starts ranks on workers.

Hosts of the rig stand for pods: the launcher, and workers that have the names in the hostfile.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import cases
from quick_start import LEFT_OUT

WHO = (
    "import json, os, socket; print(json.dumps([socket.gethostname(), "
    "int(os.environ['OMPI_COMM_WORLD_RANK']), os.environ['GREETING']]))"
)
DOCKER = Path(__file__).parents[2] / "docker"
LAUNCHER = "mnist-launcher"
WORKERS = [f"mnist-worker-{number}.mnist-worker.ml.svc" for number in range(2)]

# What the operator adds to the launcher for the Open MPI of its time, version 4.
OPERATORS = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "2",
    "NVIDIA_VISIBLE_DEVICES": "",
    "NVIDIA_DRIVER_CAPABILITIES": "",
}


def manifest(*arguments: str) -> dict:
    hvkit = [sys.executable, "-m", "hvkit", "manifest", "mpijob", "--image", "hvkit:1"]
    written = subprocess.run(
        [*hvkit, *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    return yaml.safe_load(written.stdout)["spec"]


def test_ranks_start_on_the_workers_and_get_the_variables(rig):
    spec = manifest(
        *("--name", "mnist", "--namespace", "ml", "-np", "3", "--slots", "2"),
        *("--env", "GREETING=good day", "--", "python", "-c", WHO),
    )
    replicas = spec["mpiReplicaSpecs"]
    assert replicas["Worker"]["replicas"] == len(WORKERS)
    pods = rig([LAUNCHER, *WORKERS])
    for worker in WORKERS:
        # As in a pod, whose own name is only the first part of the one that others know.
        pods.host(worker).run(["hostname", worker.partition(".")[0]]).check_returncode()
    launcher = pods.host(LAUNCHER)
    hostfile = "".join(f"{worker} slots={spec['slotsPerWorker']}\n" for worker in WORKERS)
    place = ["sh", "-ec", "mkdir /etc/mpi; cat > /etc/mpi/hostfile"]
    launcher.run(place, input=hostfile).check_returncode()
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    asked = {entry["name"]: entry["value"] for entry in container["env"]}
    run = launcher.run(
        [*container["command"], *container["args"]], env=asked | OPERATORS, timeout=180
    )
    assert run.returncode == 0, run.stderr
    assert sorted(map(json.loads, run.stdout.splitlines())) == [
        ["mnist-worker-0", 0, "good day"],
        ["mnist-worker-0", 1, "good day"],
        ["mnist-worker-1", 2, "good day"],
    ]


TRAINING = """
import sys, time
import torch, hvkit

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
hvkit.distribute(model, optimizer)
checkpoint = hvkit.Checkpoint(sys.argv[1], model=model, optimizer=optimizer)
start = checkpoint.restore().step
if hvkit.rank() == 0:
    print("started", start, flush=True)
for step in range(start + 1, start + 400):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if hvkit.rank() == 0:
        print("step", step, flush=True)
    checkpoint.end_step(epoch=0, step=step)
    if start and step == start + 5:
        break
    time.sleep(0.1)
"""


SHELL = ["sh", "-c", 'trap : TERM; "$@"', "sh"]


@pytest.mark.parametrize("around", cases([SHELL, []], name=lambda words: "".join(words[:1])))
def test_ranks_save_when_a_pod_is_taken_away(rig, tmp_path, around):
    spec = manifest(
        *("--name", "mnist", "-np", "2", "--slots", "1", "--max-restarts", "1"),
        *("--", *around, sys.executable, "-c", TRAINING, str(tmp_path / "saved")),
    )
    workers = ["mnist-worker-0", "mnist-worker-1"]
    pods = rig([LAUNCHER, *workers])
    launcher = pods.host(LAUNCHER)
    hostfile = "".join(f"{worker} slots=1\n" for worker in workers)
    place = ["sh", "-ec", "mkdir /etc/mpi; cat > /etc/mpi/hostfile"]
    launcher.run(place, input=hostfile).check_returncode()
    replicas = spec["mpiReplicaSpecs"]
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["lifecycle"]["preStop"]["exec"]["command"] == ["hvkit-leave"]
    leave = pods.host(workers[1]).run([str(DOCKER / "hvkit-leave")], timeout=30)
    assert leave.returncode == 0, leave.stderr  # no ranks yet
    arguments = [word.replace("$$", "$") for word in container["args"]]  # as Kubernetes does
    run = launcher.popen(
        [*container["command"], *arguments], env=OPERATORS | LEFT_OUT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line == "step 3\n":
            leave = pods.host(workers[1]).run([str(DOCKER / "hvkit-leave")], timeout=30)
            assert leave.returncode == 0, leave.stderr
    printed = "".join(lines)
    assert run.wait(60) == 0, printed
    first, again = (int(line.split()[1]) for line in lines if line.startswith("started"))
    assert first == 0
    assert again >= 3
    assert f"step {again}\n" in printed
    assert "(not counted)" in printed
