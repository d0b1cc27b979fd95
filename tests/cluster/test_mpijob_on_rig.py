"""What the launcher of an MPIJob runs, with what the operator gives it, starts ranks on workers.

Hosts of the rig stand for pods: the launcher, and workers that have the names in the hostfile.
"""

import json
import subprocess
import sys

import yaml

WHO = (
    "import json, os, socket; print(json.dumps([socket.gethostname(), "
    "int(os.environ['OMPI_COMM_WORLD_RANK']), os.environ['GREETING']]))"
)
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
    hvkit = [sys.executable, "-m", "hvkit.cli", "manifest", "mpijob", "--image", "hvkit:1"]
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
