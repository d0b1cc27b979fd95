"""MPIJobs for tests."""

from typing import Any

import yaml

from hvkit.manifest import MPIJob, Size
from hvkit.manifest.fields import cpus, memory
from hvkit.manifest.mpijob import volume, yaml_text

COMMAND = ("python", "recipes/mnist_torch.py", "--epochs", "2")


def job(**changes: Any) -> MPIJob:
    """A job of 8 ranks on 2 workers, everything else at its default."""
    defaults: dict[str, Any] = {
        "image": "hvkit:1",
        "command": COMMAND,
        "size": Size.of(8, 4),
        "name": "mnist",
        "namespace": None,
        "gpus": 0,
        "cpus": None,
        "memory": None,
        "shared_memory": memory("2Gi"),
        "launcher_cpus": cpus("1"),
        "launcher_memory": memory("1Gi"),
        "retries": 0,
        "grace": 10.0,
    }
    return MPIJob(**{**defaults, **changes})


def full_job() -> MPIJob:
    """A job with every option set."""
    return job(
        namespace="teaching",
        gpus=1,
        cpus=cpus("500m"),
        memory=memory("1.5Gi"),
        shared_memory=memory("512M"),
        retries=3,
        variables={"HVKIT_DATA_DIR": "/data", "RATE": "1e-3"},
        volumes=tuple(map(volume, ("datasets:/data", "results.a:/out", "datasets:/more"))),
        run_options=("--lost-after", "45", "--prefix", "--timestamps", "--log-dir=/out/logs"),
    )


def read(job: MPIJob) -> dict[str, Any]:
    """The document as a cluster reads it from the YAML text."""
    document: dict[str, Any] = yaml.safe_load(yaml_text(job.document()))
    return document


def container(document: dict[str, Any], replica: str) -> dict[str, Any]:
    """The only container of the launcher or of a worker."""
    replicas = document["spec"]["mpiReplicaSpecs"][replica]
    (found,) = replicas["template"]["spec"]["containers"]
    return dict(found)
