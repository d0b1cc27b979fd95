"""The pods of an MPIJob, for images that are built from this project's Dockerfile."""

from collections.abc import Mapping, Sequence
from typing import Any

HOME = "/home/hvkit"

_USER = 1000
_SSH_PORT = 2222


def launcher(
    image: str, command: Sequence[str], variables: Mapping[str, str], limits: Mapping[str, Any]
) -> dict[str, Any]:
    """The pod that runs ``command``, which starts the ranks."""
    container = {
        **_container("launcher", image, limits),
        "command": [command[0]],
        "args": [literal(word) for word in command[1:]],
    }
    if variables:
        container["env"] = [
            {"name": name, "value": literal(value)} for name, value in variables.items()
        ]
    return _template({"containers": [container]})


def worker(image: str, shared_memory: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The pod that waits, with an ssh server, for ranks to be started."""
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
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    # Pods have 64 MiB of it otherwise, which MPI, NCCL and data loaders soon fill.
    memory = {"medium": "Memory", "sizeLimit": shared_memory}
    return _template(
        {"containers": [container], "volumes": [{"name": "shared-memory", "emptyDir": memory}]}
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


def _template(spec: dict[str, Any]) -> dict[str, Any]:
    """A pod of the image's user that namespaces with the restricted security standard admit."""
    security = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {"spec": {"securityContext": security, **spec}}
