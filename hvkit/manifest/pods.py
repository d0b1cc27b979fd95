"""The pods of an MPIJob, for images that are built from this project's Dockerfile."""

from collections.abc import Mapping, Sequence
from typing import Any

from hvkit.manifest.volumes import Volume, mounted

_USER = 1000
_SSH_PORT = 2222


def launcher(
    image: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    limits: Mapping[str, Any],
    volumes: Sequence[Volume],
) -> dict[str, Any]:
    """The pod that runs ``command``, which starts the ranks, with ``volumes``."""
    container = {
        **_container("launcher", image, limits),
        "command": [command[0]],
        "args": [literal(word) for word in command[1:]],
    }
    if variables:
        container["env"] = [
            {"name": name, "value": literal(value)} for name, value in variables.items()
        ]
    return _template(container, *mounted(volumes))


def worker(
    image: str, shared_memory: str, limits: Mapping[str, Any], volumes: Sequence[Volume]
) -> dict[str, Any]:
    """The pod that waits, with an ssh server, for ranks to be started, with ``volumes``."""
    container = {
        **_container("worker", image, limits),
        "command": ["hvkit-sshd"],
        "ports": [{"name": "ssh", "containerPort": _SSH_PORT}],
        # Ready is who answers; asked later, too, sshd would complain in its output each time.
        "startupProbe": {
            "tcpSocket": {"port": _SSH_PORT},
            "periodSeconds": 1,
            "failureThreshold": 60,
        },
    }
    # Pods have 64 MiB of it otherwise, which MPI, NCCL and data loaders soon fill.
    memory = {"medium": "Memory", "sizeLimit": shared_memory}
    sources, places = mounted(volumes)
    return _template(
        container,
        [{"name": "shared-memory", "emptyDir": memory}, *sources],
        [{"name": "shared-memory", "mountPath": "/dev/shm"}, *places],
    )


def literal(text: str) -> str:
    """Text that Kubernetes takes as it is: ``$(NAME)`` would stand for a variable otherwise."""
    return text.replace("$", "$$")


def _container(name: str, image: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": image}
    if limits:
        # Kubernetes requests as much as the limits are.
        container["resources"] = {"limits": dict(limits)}
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    return container


def _template(
    container: dict[str, Any], sources: Sequence[Mapping[str, Any]], places: Sequence[Any]
) -> dict[str, Any]:
    """A pod of the image's user that namespaces with the restricted security standard admit."""
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec: dict[str, Any] = {"securityContext": security, "containers": [container]}
    if any("persistentVolumeClaim" in source for source in sources):
        # They belong to root otherwise. Not file by file again if their root says that it is done.
        security |= {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"}
    if sources:
        spec["volumes"] = sources
        container["volumeMounts"] = places
    return {"spec": spec}
