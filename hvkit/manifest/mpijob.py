"""A run as an MPIJob of the Kubeflow MPI operator, version ``kubeflow.org/v2beta1``.

The operator starts a pod for each host, the workers, and one that runs ``hvkit run``, the launcher.
It mounts an ssh key into all of them, and the list of the workers into the launcher. Where that is
it says in variables that Open MPI 4 reads and Open MPI 5 does not (``OMPI_MCA_orte_...``), so the
launcher cannot be a plain ``mpirun``; ``hvkit run`` reads them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvkit.manifest import pods
from hvkit.manifest.quantity import Quantity
from hvkit.manifest.size import Size
from hvkit.manifest.volumes import HOME, Volume

_GPU = "nvidia.com/gpu"
_LONGEST_HOSTNAME = 63

# What the operator sets on the launcher, whatever the manifest says.
_OPERATORS_OWN = {
    *("K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("OMPI_MCA_orte_keep_fqdn_hostnames", "OMPI_MCA_orte_default_hostfile"),
    *("OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_set_default_slots"),
}


@dataclass(frozen=True)
class MPIJob:
    """A run on Kubernetes.

    Attributes:
        image: the image of all pods, built from this project's Dockerfile.
        command: what every rank runs.
        size: ranks, and ranks per worker.
        name: of the job; pods and services are named after it.
        namespace: where it runs; ``None`` for the one that kubectl is set to.
        gpus: GPUs for each rank.
        cpus: cores for each rank; ``None`` for no limit.
        memory: memory for each rank; ``None`` for no limit.
        shared_memory: size of ``/dev/shm`` of each worker, which counts as its memory.
        variables: environment variables for all ranks.
        volumes: what all pods have mounted, at a path of its own each.
        run_options: for ``hvkit run``, as words.
        launcher_cpus: cores for the launcher.
        launcher_memory: memory for the launcher.
        retries: how often the launcher is started again after a failure.
    """

    image: str
    command: tuple[str, ...]
    size: Size
    name: str
    namespace: str | None
    gpus: int
    cpus: Quantity | None
    memory: Quantity | None
    shared_memory: Quantity
    launcher_cpus: Quantity
    launcher_memory: Quantity
    retries: int
    variables: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    run_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what no single argument tells.

        Raises:
            ValueError: two of the attributes do not fit together.
        """
        longest = max(f"{self.name}-launcher", f"{self.name}-worker-{self.size.hosts - 1}", key=len)
        if excess := max(0, len(longest) - _LONGEST_HOSTNAME):
            raise ValueError(
                f"--name {self.name} is too long: the hostname {longest} would have {len(longest)} "
                f"characters, {_LONGEST_HOSTNAME} are allowed; make it {excess} shorter"
            )
        memory = self._of_worker(self.memory)
        if memory is not None and self.shared_memory.value >= memory.value:
            raise ValueError(
                f"--shm-size {self.shared_memory} must be less than the memory of a worker, "
                f"{memory} ({self.memory} for each of {self.size.slots} ranks), as it counts as "
                "its memory: make it smaller, or --memory larger"
            )
        for path, times in Counter(volume.path for volume in self.volumes).items():
            if times > 1:
                raise ValueError(
                    f"--volume: {path} is there {times} times: give each volume its own path"
                )
        for name in self.variables:
            if name in _OPERATORS_OWN:
                raise ValueError(
                    f"--env {name}: the MPI operator sets this variable itself, whatever the "
                    "manifest says: leave it away"
                )

    def document(self) -> dict[str, Any]:
        """The resource, as it is to be written in YAML."""
        metadata = {"name": self.name}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        return {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": metadata,
            "spec": {
                "slotsPerWorker": self.size.slots,
                "mpiImplementation": "OpenMPI",
                "sshAuthMountPath": f"{HOME}/.ssh",
                "launcherCreationPolicy": "WaitForWorkersReady",
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": self.retries},
                "mpiReplicaSpecs": {"Launcher": self._launcher(), "Worker": self._workers()},
            },
        }

    def _launcher(self) -> dict[str, Any]:
        forwarded = [word for name in self.variables for word in ("-x", name)]
        options = ["-np", str(self.size.ranks), *forwarded, *self.run_options]
        run = ["hvkit", "run", *options, *self.command]
        limits = {"cpu": str(self.launcher_cpus), "memory": str(self.launcher_memory)}
        pod = pods.launcher(self.image, run, self.variables, limits, self.volumes)
        # A new pod for each try, so that the output of those that failed can be read.
        return {"replicas": 1, "restartPolicy": "Never", "template": pod}

    def _workers(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if cpus := self._of_worker(self.cpus):
            limits["cpu"] = str(cpus)
        if memory := self._of_worker(self.memory):
            limits["memory"] = str(memory)
        if self.gpus:
            limits[_GPU] = self.gpus * self.size.slots
        pod = pods.worker(self.image, str(self.shared_memory), limits, self.volumes)
        # A worker that ran out of memory has to be there for the next try.
        return {"replicas": self.size.hosts, "restartPolicy": "OnFailure", "template": pod}

    def _of_worker(self, of_rank: Quantity | None) -> Quantity | None:
        return None if of_rank is None else of_rank.times(self.size.slots)
