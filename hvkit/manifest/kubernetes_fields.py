"""What options of Kubernetes' manifests accept: secrets, and where pods may run.

As in ``fields``, a check returns the value of a text, or raises ``ValueError``.
"""

import re
from dataclasses import dataclass
from typing import Any

from hvkit.manifest import fields

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
# Of a label, a taint: with a domain before it or not.
_KEY = re.compile(rf"(?:(?P<domain>[^/]+)/)?{_NAME}", re.ASCII)
_VALUE = re.compile(rf"(?:{_NAME})?", re.ASCII)
_SECRET_KEY = re.compile(r"[A-Za-z0-9_.-]{1,253}", re.ASCII)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value is in a Secret of the job's namespace."""

    name: str
    secret: str
    key: str

    @property
    def entry(self) -> dict[str, Any]:
        """The variable in a container's list."""
        reference = {"name": self.secret, "key": self.key}
        return {"name": self.name, "valueFrom": {"secretKeyRef": reference}}


def secret_variable(text: str) -> SecretVariable:
    """A variable from ``NAME=SECRET:KEY``."""
    name, place = fields.assignment(text)
    secret, sign, key = place.partition(":")
    if not sign or not _SECRET_KEY.fullmatch(key):
        raise ValueError(f"must be NAME=SECRET:KEY, such as TOKEN=tracker:token, got {text!r}")
    return SecretVariable(name, fields.subdomain(secret), key)


def node_label(text: str) -> tuple[str, str]:
    """A label of nodes, as ``KEY=VALUE``: its key and value."""
    key, sign, value = text.partition("=")
    if not sign or not _is_key(key) or not _VALUE.fullmatch(value):
        raise ValueError(
            f"must be KEY=VALUE, such as topology.kubernetes.io/zone=eu-1a, got {text!r}"
        )
    return key, value


def toleration(text: str) -> dict[str, str]:
    """A toleration of a taint as ``kubectl taint`` writes it: ``KEY[=VALUE][:EFFECT]``."""
    taint, colon, effect = text.partition(":")
    key, sign, value = taint.partition("=")
    if not _is_key(key) or not _VALUE.fullmatch(value) or (colon and effect not in _EFFECTS):
        raise ValueError(
            "must be KEY, KEY=VALUE or KEY=VALUE:EFFECT, such as nvidia.com/gpu=present:NoSchedule,"
            f" with one of the effects {', '.join(_EFFECTS)}, got {text!r}"
        )
    found = {"key": key, "operator": "Equal", "value": value} if sign else {"key": key}
    found.setdefault("operator", "Exists")
    return {**found, "effect": effect} if colon else found


def queue(text: str) -> str:
    """The name of a queue of Kueue, which is a label's value as well."""
    if len(text) > fields.LONGEST_LABEL:
        raise ValueError(f"must be at most {fields.LONGEST_LABEL} characters, got {text!r}")
    return fields.subdomain(text)


def _is_key(text: str) -> bool:
    found = _KEY.fullmatch(text)
    if found is None:
        return False
    try:
        fields.subdomain(found["domain"] or "a")
    except ValueError:
        return False
    return True
