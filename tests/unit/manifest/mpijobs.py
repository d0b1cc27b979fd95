"""MPIJobs for tests."""

import yaml

from hvkit.manifest.fields import HvkitRun, Size, cpus, memory, volume
from hvkit.manifest.kubernetes_fields import node_label, secret_variable, toleration
from hvkit.manifest.mpijob import manifest

SIZE = Size.of(8, 4)
COMMAND = ("python", "recipes/mnist_torch.py", "--epochs", "2")


def job(*, size=SIZE, command=COMMAND, variables=None, run_options=(), **changes):
    """A job of 8 ranks on 2 workers as text, everything else at its default."""
    defaults = {
        "image": "hvkit:1",
        "name": "mnist",
        "namespace": None,
        "gpus": None,
        "cpus": None,
        "memory": None,
        "shm_size": memory("2Gi"),
        "volume": [],
        "pull_secret": [],
        "node_label": [],
        "tolerate": [],
        "queue": None,
        "secret_env": [],
        "launcher_cpus": cpus("1"),
        "launcher_memory": memory("1Gi"),
        "retries": 0,
        "grace": 10.0,
    }
    assert changes.keys() <= defaults.keys()
    run = HvkitRun(size, command, variables or {}, run_options)
    return manifest({**defaults, **changes}, run)


def full_job():
    """A job with every option set."""
    return job(
        namespace="teaching",
        gpus=1,
        cpus=cpus("500m"),
        memory=memory("1.5Gi"),
        shm_size=memory("512M"),
        retries=3,
        variables={"HVKIT_DATA_DIR": "/data", "RATE": "1e-3"},
        volume=list(map(volume, ("datasets:/data", "results.a:/out", "datasets:/more"))),
        pull_secret=["registry"],
        node_label=[node_label("gpu=a100")],
        tolerate=list(map(toleration, ("nvidia.com/gpu", "pool=train:NoSchedule"))),
        queue="training",
        secret_env=[secret_variable("TOKEN=tracker:api-token")],
        run_options=("--lost-after", "45", "--prefix", "--timestamps", "--log-dir=/out/logs"),
    )


def read(job):
    """The document as a cluster reads it from the YAML text."""
    document = yaml.safe_load(job)
    return document


def container(document, replica):
    """The only container of the launcher or of a worker."""
    replicas = document["spec"]["mpiReplicaSpecs"][replica]
    (found,) = replicas["template"]["spec"]["containers"]
    return dict(found)
