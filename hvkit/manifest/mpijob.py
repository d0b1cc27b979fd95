"""A run as an MPIJob of the Kubeflow MPI operator, version ``kubeflow.org/v2beta1``.

The operator starts one pod per host (the workers) and one pod for ``hvkit run`` (the launcher). It
mounts an ssh key into all pods and the list of workers into the launcher. Variables that only Open
MPI 4 reads (``OMPI_MCA_orte_...``) point to that list, so a plain ``mpirun`` of Open MPI 5 would
not find the workers; ``hvkit run`` reads the variables.

The pods need an image built from this project's Dockerfile.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from hvkit.manifest import fields
from hvkit.manifest.fields import Quantity, Size

_GPU = "nvidia.com/gpu"
_LONGEST_HOSTNAME = 63
# The image's user and home folder, and the port of its ssh server.
_USER = 1000
_HOME = "/home/hvkit"
_SSH_PORT = 2222
# Seconds that Kubernetes gives a pod to end, if its specification names no number.
_KUBERNETES_GRACE = 30

# The operator sets these on the launcher and overwrites the manifest's values.
_OPERATORS_OWN = {
    *("K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("OMPI_MCA_orte_keep_fqdn_hostnames", "OMPI_MCA_orte_default_hostfile"),
    *("OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_set_default_slots"),
}

# Mounted by the operator or by the pods themselves; needed by the image; the kernel's.
_TAKEN_PATHS = (
    *(f"{_HOME}/.ssh", "/etc/mpi", "/dev/shm"),
    *("/opt/venv", "/usr/bin", f"{_HOME}/.sshd_config"),
    *("/proc", "/sys"),
)

# PyYAML leaves these unquoted as text; readers of other YAML versions, such as kubectl, take them
# for numbers (1e-3, 0o17, 1:30) or booleans (y).
_AMBIGUOUS = re.compile(r"[-+.0-9].*|[yYnN]", re.DOTALL)


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim that all pods mount.

    Attributes:
        claim: the name of the claim, in the job's namespace.
        path: where pods mount it, absolute.
    """

    claim: str
    path: PurePosixPath


@dataclass(frozen=True)
class MPIJob:
    """A run on Kubernetes.

    Attributes:
        image: the image of all pods, built from this project's Dockerfile.
        command: the program that every rank runs, with its arguments.
        size: ranks, and ranks per worker.
        name: of the job; the names of pods and services begin with it.
        namespace: ``None`` for the one that kubectl is set to.
        gpus: GPUs for each rank.
        cpus: cores for each rank; ``None`` for no limit.
        memory: memory for each rank; ``None`` for no limit.
        shared_memory: size of ``/dev/shm`` in each worker; it counts towards the worker's memory.
        variables: environment variables for all ranks.
        volumes: mounted in all pods, each at its own path.
        run_options: options of ``hvkit run``, one word each.
        launcher_cpus: cores for the launcher.
        launcher_memory: memory for the launcher.
        retries: how many times the operator starts the launcher again after a failure.
        grace: seconds that ranks have to save and end before their pod is taken away.

    Raises:
        ValueError: the name is too long for this many workers, ``shared_memory`` is not less
            than the memory of a worker, two volumes have one path, or the operator overwrites a
            variable.
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
    grace: float
    variables: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    run_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_name()
        self._check_shared_memory()
        for path, times in Counter(volume.path for volume in self.volumes).items():
            if times > 1:
                raise ValueError(f"--volume: {path} is used {times} times: give each its own path")
        for name in self.variables:
            if name in _OPERATORS_OWN:
                raise ValueError(
                    f"--env {name}: the MPI operator sets this variable and overwrites the "
                    "manifest's value: leave it out"
                )

    def _check_name(self) -> None:
        longest = max(f"{self.name}-launcher", f"{self.name}-worker-{self.size.hosts - 1}", key=len)
        if excess := max(0, len(longest) - _LONGEST_HOSTNAME):
            raise ValueError(
                f"--name {self.name} is too long: the hostname {longest} would have {len(longest)} "
                f"characters, {_LONGEST_HOSTNAME} are allowed; make it {excess} shorter"
            )

    def _check_shared_memory(self) -> None:
        memory = self._per_worker(self.memory)
        if memory is not None and self.shared_memory.value >= memory.value:
            raise ValueError(
                f"--shm-size {self.shared_memory} must be less than the memory of a worker, "
                f"{memory} ({self.memory} for each of {self.size.slots} ranks), because it counts "
                "towards that memory: lower --shm-size or raise --memory"
            )

    def document(self) -> dict[str, Any]:
        """The Kubernetes resource, for ``yaml_text``."""
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
                "sshAuthMountPath": f"{_HOME}/.ssh",
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
        container = {
            **_container("launcher", self.image, limits),
            "command": [run[0]],
            "args": [literal(word) for word in run[1:]],
        }
        if self.variables:
            container["env"] = [
                {"name": name, "value": literal(value)} for name, value in self.variables.items()
            ]
        pod = _pod(container, *_mounts(self.volumes))
        # Never: each retry gets a new pod, and the failed one's output stays readable.
        return {"replicas": 1, "restartPolicy": "Never", "template": pod}

    def _workers(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if cpus := self._per_worker(self.cpus):
            limits["cpu"] = str(cpus)
        if memory := self._per_worker(self.memory):
            limits["memory"] = str(memory)
        if self.gpus:
            limits[_GPU] = self.gpus * self.size.slots
        container = {
            **_container("worker", self.image, limits),
            "command": ["hvkit-sshd"],
            "ports": [{"name": "ssh", "containerPort": _SSH_PORT}],
            # Only at startup: sshd logs a complaint for every probe.
            "startupProbe": {
                "tcpSocket": {"port": _SSH_PORT},
                "periodSeconds": 1,
                "failureThreshold": 60,
            },
            # SIGTERM for a pod reaches sshd alone. This sends it to the ranks, and waits for them.
            "lifecycle": {"preStop": {"exec": {"command": ["hvkit-leave"]}}},
        }
        # The default of 64 MiB is too small for MPI, NCCL and data loaders.
        shared = {"medium": "Memory", "sizeLimit": str(self.shared_memory)}
        sources, places = _mounts(self.volumes)
        pod = _pod(
            container,
            [{"name": "shared-memory", "emptyDir": shared}, *sources],
            [{"name": "shared-memory", "mountPath": "/dev/shm"}, *places],
        )
        if self.grace > _KUBERNETES_GRACE:
            pod["spec"]["terminationGracePeriodSeconds"] = math.ceil(self.grace)
        # OnFailure: a worker that ran out of memory must be back for the next retry.
        return {"replicas": self.size.hosts, "restartPolicy": "OnFailure", "template": pod}

    def _per_worker(self, per_rank: Quantity | None) -> Quantity | None:
        return None if per_rank is None else per_rank.times(self.size.slots)


def yaml_text(document: dict[str, Any]) -> str:
    """The document as YAML that every reader understands alike, keys in their order."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=float("inf"))
    return text


def literal(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes would replace by a variable's value."""
    return text.replace("$", "$$")


def volume(text: str) -> Volume:
    """Read a volume from ``CLAIM:PATH``.

    Raises:
        ValueError: the text has another form, or the pods need the path for something else.
    """
    claim, sign, path = text.partition(":")
    if not sign:
        raise ValueError(f"must be CLAIM:PATH, such as datasets:/data, got {text!r}")
    return Volume(fields.subdomain(claim), _mount_point(path))


def _mount_point(text: str) -> PurePosixPath:
    path = PurePosixPath(text)
    # Kubernetes refuses colons.
    if path.root != "/" or str(path) != text or ".." in path.parts or ":" in text:
        raise ValueError(
            "PATH must be absolute, such as /data, without `:`, `..`, `//` or a `/` at the end, "
            f"got {text!r}"
        )
    if not text.isprintable():
        raise ValueError(f"PATH must be printable, got {text!r}")
    for taken in map(PurePosixPath, _TAKEN_PATHS):
        if taken.is_relative_to(path) or path.is_relative_to(taken):
            raise ValueError(
                f"PATH {text} overlaps {taken}, which the pods need: use another, such as /data"
            )
    return path


def _mounts(volumes: Sequence[Volume]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ``volumes`` of a pod, each claim once, and the ``volumeMounts`` of its container."""
    # Numbered: the name of a claim may be longer than that of a volume, and contain dots.
    once = dict.fromkeys(one.claim for one in volumes)
    claims = {claim: f"claim-{number}" for number, claim in enumerate(once, 1)}
    sources = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        for claim, name in claims.items()
    ]
    places = [{"name": claims[one.claim], "mountPath": str(one.path)} for one in volumes]
    return sources, places


def _container(name: str, image: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": image}
    if limits:
        # Kubernetes takes the limits as the requests, too.
        container["resources"] = {"limits": dict(limits)}
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    return container


def _pod(
    container: dict[str, Any], sources: Sequence[Mapping[str, Any]], places: Sequence[Any]
) -> dict[str, Any]:
    """A pod that namespaces with the restricted security standard admit."""
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec: dict[str, Any] = {"securityContext": security, "containers": [container]}
    if any("persistentVolumeClaim" in source for source in sources):
        # Without fsGroup, claims belong to root. OnRootMismatch: change a claim's files only once.
        security |= {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"}
    if sources:
        spec["volumes"] = sources
        container["volumeMounts"] = places
    return {"spec": spec}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes all text that some YAML version would read as a number or a boolean."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
