"""Checks of the options of ``hvkit manifest``.

A check takes the text that a user wrote and returns the value. All raise ``ValueError`` for text
they do not accept, and name in the message what they accept and what they got.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

LONGEST_LABEL = 63
"""Characters that Kubernetes allows in the value of a label, and in the name of a host."""

_PREFIXES = "kMGTPE"
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix.upper()}i": Decimal(1024) ** n for n, prefix in enumerate(_PREFIXES, 1)},
}

# Mounted by the operator or by the pods themselves; needed by the image; the kernel's.
_TAKEN_PATHS = (
    *("/home/hvkit/.ssh", "/etc/mpi", "/dev/shm"),
    *("/opt/venv", "/usr/bin", "/home/hvkit/.sshd_config"),
    *("/proc", "/sys"),
)


@dataclass(frozen=True)
class Quantity:
    """A number with the unit it was written in."""

    number: Decimal
    unit: str

    def __str__(self) -> str:
        text = f"{self.number:f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + self.unit

    def __mul__(self, count: int) -> "Quantity":
        return Quantity(self.number * count, self.unit)

    @property
    def value(self) -> Decimal:
        """A Kubernetes quantity as a number of cores or bytes."""
        return self.number * _UNITS[self.unit]


def _matching(
    pattern: str, accepted: str, read: Callable[[re.Match[str]], Any] = lambda found: found[0]
) -> Callable[[str], Any]:
    """A check for printable text that a pattern matches completely, ``accepted`` in words.

    ``read`` makes the value of what was found; None refuses it.
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> Any:
        found = compiled.fullmatch(text) if text.isprintable() else None
        value = None if found is None else read(found)
        if value is None:
            raise ValueError(f"must be {accepted}, got {text!r}")
        return value

    return check


def _amount(number: str, unit: str, accepted: str, step: Decimal | None = None) -> Any:
    """A check for a positive amount, a multiple of ``step``."""

    def read(found: re.Match[str]) -> Quantity | None:
        quantity = Quantity(Decimal(found[1]), found[2])
        fits = quantity.number and (step is None or not quantity.value % step)
        return quantity if fits else None

    return _matching(f"({number})({unit})", accepted, read)


_WHOLE, _DECIMAL = r"\d{1,12}", r"\d{1,12}(?:\.\d{1,9})?"

# In Kubernetes' notation: no finer than a thousandth of a core, and a byte.
cpus = _amount(_DECIMAL, "m?", "a number of cores such as 4, 0.5 or 500m", _UNITS["m"])
memory = _amount(
    _DECIMAL,
    "[kMGTPE]|[KMGTPE]i",
    "a number and a unit of Kubernetes such as 512Mi or 16Gi (or k, M, G, T for powers of 1000)",
    Decimal(1),
)
# Units of Slurm and of Docker are powers of 1024.
slurm_memory = _amount(_WHOLE, "[KMGT]", "a whole number and K, M, G or T such as 512M or 16G")
_docker_memory = _amount(_WHOLE, "[KMG]i", "a whole number and Mi or Gi, such as 2Gi")


def docker_memory(text: str) -> str:
    """An amount of memory in Docker's notation: ``2g`` for ``2Gi``."""
    return str(_docker_memory(text)).removesuffix("i").lower()


# registry.example.com:5000/team/hvkit:1.0@sha256:...
# The part before the first slash is a host only if it has a dot or a port.
_DOMAIN = r"[A-Za-z0-9-]+(?:(?:\.[A-Za-z0-9-]+)+(?::\d+)?|:\d+)"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r":\w[\w.-]{0,127}"
_DIGEST = r"@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z0-9]+)*:[0-9a-fA-F]{32,}"
image = _matching(
    rf"(?:{_DOMAIN}/)?{_PART}(?:/{_PART})*(?:{_TAG})?(?:{_DIGEST})?",
    "an image such as registry.example.com/team/hvkit:1.0, in lower case except for the tag",
)

# Names of Kubernetes: labels of RFC 1123 and, since the operators give services the name of a job,
# of RFC 1035; and of most objects, such as a PersistentVolumeClaim.
label = _matching(
    "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?",
    "1 to 63 lower-case letters, digits and `-`, with a letter or digit at both ends",
)
job_name = _matching(
    "[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?",
    "1 to 63 lower-case letters, digits and `-`, with a letter first and no `-` at the end",
)
_PART_OF_SUBDOMAIN = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = rf"(?![a-z0-9.-]{{254}}){_PART_OF_SUBDOMAIN}(?:\.{_PART_OF_SUBDOMAIN})*"
_DOTS = (
    "lower-case letters, digits, `-` and `.`, with a letter or digit at both ends and beside each "
    "dot"
)
subdomain = _matching(_SUBDOMAIN, f"at most 253 {_DOTS}")
# A queue of Kueue, whose name is a label's value as well.
queue = _matching(rf"(?!.{{{LONGEST_LABEL + 1}}}){_SUBDOMAIN}", f"at most {LONGEST_LABEL} {_DOTS}")

# Labels and taints of nodes; the key may have a domain before it.
_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY, _VALUE = rf"(?:{_SUBDOMAIN}/)?{_LABEL_NAME}", f"(?:{_LABEL_NAME})?"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
node_label = _matching(
    f"({_KEY})=({_VALUE})",
    "KEY=VALUE, such as topology.kubernetes.io/zone=eu-1a",
    re.Match.groups,
)


def _toleration(found: re.Match[str]) -> dict[str, str]:
    operator = "Exists" if found["value"] is None else "Equal"
    parts = {"key": found["key"], "operator": operator, **found.groupdict()}
    return {name: part for name, part in parts.items() if part is not None}


# A taint as `kubectl taint` writes it.
toleration = _matching(
    f"(?P<key>{_KEY})(?:=(?P<value>{_VALUE}))?(?::(?P<effect>{'|'.join(_EFFECTS)}))?",
    "KEY, KEY=VALUE or KEY=VALUE:EFFECT, such as nvidia.com/gpu=present:NoSchedule, with one of "
    f"the effects {', '.join(_EFFECTS)}",
    _toleration,
)
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
secret_variable = _matching(
    rf"({_VARIABLE})=({_SUBDOMAIN}):([A-Za-z0-9_.-]{{1,253}})",
    "NAME=SECRET:KEY, such as TOKEN=tracker:token",
    lambda found: (found[1], {"name": found[2], "key": found[3]}),
)

_SLURM_NAME = "[A-Za-z0-9_][A-Za-z0-9_.+@-]*"
_SLURM_LETTERS = "letters, digits and `_.+@-`, and not begin with one of `.+@-`"
slurm_name = _matching(_SLURM_NAME, _SLURM_LETTERS)
slurm_names = _matching(f"{_SLURM_NAME}(?:,{_SLURM_NAME})*", f"{_SLURM_LETTERS}; or several: a,b")
sbatch_option = _matching(
    "--[a-z][a-z0-9-]*(?:[= ].+)?", "one option on one line, such as --qos=high"
)
# The only form of Slurm's that has one reading: 30 means minutes.
_DURATION = r"(?=.*[1-9])(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)"
_CLOCK = "HH:MM:SS or DAYS-HH:MM:SS, longer than zero"
duration = _matching(_DURATION, _CLOCK)


def _seconds(found: re.Match[str]) -> int:
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


seconds = _matching(_DURATION, _CLOCK, _seconds)

_FOLDER = "([A-Za-z][A-Za-z0-9_]{0,63})"
_S3 = r"s3://[^/\s]+(?:/\S*)?"
s3 = _matching(_S3, "an S3 URI such as s3://bucket/folder")
s3_input = _matching(
    f"{_FOLDER}=({_S3})",
    "NAME=PLACE with an S3 URI such as s3://bucket/folder: train=s3://bucket/mnist",
    re.Match.groups,
)
sagemaker_name = _matching(
    "[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62}",
    "1 to 63 letters, digits and `-`, with a letter or digit at both ends",
)

azure_folder = _matching(
    f"{_FOLDER}=(.+)",
    "NAME=PLACE, such as train=azureml://datastores/workspaceblobstore/paths/mnist",
    re.Match.groups,
)
azure_name = _matching(
    "[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}",
    "1 to 255 letters, digits, `_` and `-`, with a letter or digit first",
)
azure_identity = _matching(
    "(user)|managed|([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})",
    "user (whoever submits the job), managed (the cluster's) or the client ID of one of the "
    "cluster's identities",
    lambda found: {
        "type": "user_identity" if found[1] else "managed",
        **({"client_id": found[2]} if found[2] else {}),
    },
)
one_line = _matching(r".*\S.*", "text on one line")


def assignment(text: str) -> tuple[str, str]:
    """An environment variable written as ``NAME=VALUE``: its name and value."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(_VARIABLE, name):
        raise ValueError(
            "must be NAME=VALUE, with a name of letters, digits and `_` that does not begin with "
            f"a digit, got {text!r}"
        )
    return name, utf8(value)


def utf8(text: str) -> str:
    """Text that UTF-8 can encode; a command line may contain bytes that are not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be text in UTF-8, got {text!r}") from error
    return text


def volume(text: str) -> tuple[str, str]:
    """A volume as ``CLAIM:PATH``: its path, which the pods need for nothing else, and its claim."""
    claim, sign, mount_path = text.partition(":")
    if not sign:
        raise ValueError(f"must be CLAIM:PATH, such as datasets:/data, got {text!r}")
    path = PurePosixPath(mount_path)
    # Kubernetes refuses colons.
    absolute = path.root == "/" and str(path) == mount_path and ".." not in path.parts
    if not absolute or ":" in mount_path or not mount_path.isprintable():
        raise ValueError(
            "PATH must be absolute and printable, such as /data, without `:`, `..`, `//` or a `/` "
            f"at the end, got {mount_path!r}"
        )
    for taken in map(PurePosixPath, _TAKEN_PATHS):
        if taken.is_relative_to(path) or path.is_relative_to(taken):
            raise ValueError(
                f"PATH {path} overlaps {taken}, which the pods need: use another, such as /data"
            )
    return mount_path, subdomain(claim)
