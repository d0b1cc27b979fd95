"""Volumes of an MPIJob: what a PersistentVolumeClaim holds, at a path of all pods."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from hvkit.manifest import names

HOME = "/home/hvkit"
"""The folder of the image's user."""

# What the operator mounts, the pods' own volume, what the image cannot do without, the kernel's.
_TAKEN = (
    *(f"{HOME}/.ssh", "/etc/mpi", "/dev/shm"),
    *("/opt/venv", "/usr/bin", f"{HOME}/.sshd_config", "/proc", "/sys"),
)


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim of the job's namespace, and where all pods have it.

    Attributes:
        claim: its name.
        path: an absolute path.
    """

    claim: str
    path: PurePosixPath


def volume(text: str) -> Volume:
    """A volume.

    Raises:
        ValueError: it is not ``CLAIM:PATH``, or the path is taken.
    """
    claim, sign, path = text.partition(":")
    if not sign:
        raise ValueError(f"must be CLAIM:PATH, such as datasets:/data, got {text!r}")
    return Volume(names.subdomain(claim), _mount_point(path))


def _mount_point(text: str) -> PurePosixPath:
    path = PurePosixPath(text)
    # Kubernetes takes no colon.
    if path.root != "/" or str(path) != text or ".." in path.parts or ":" in text:
        raise ValueError(
            "PATH must be absolute, such as /data, and have no `:`, no `..`, and no `/` too many, "
            f"got {text!r}"
        )
    if not text.isprintable():
        raise ValueError(f"PATH must be printable, got {text!r}")
    for taken in map(PurePosixPath, _TAKEN):
        if taken.is_relative_to(path) or path.is_relative_to(taken):
            raise ValueError(
                f"PATH {text} is in the way of {taken}, which the pods need: use another, such as "
                "/data"
            )
    return path


def mounted(volumes: Sequence[Volume]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, each claim once, and the places where its container has them."""
    # Numbers, as a claim may have a longer name than a volume, and dots in it.
    once = dict.fromkeys(one.claim for one in volumes)
    claims = {claim: f"claim-{number}" for number, claim in enumerate(once, 1)}
    sources = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        for claim, name in claims.items()
    ]
    places = [{"name": claims[one.claim], "mountPath": str(one.path)} for one in volumes]
    return sources, places
