"""What is in a manifest: the command that it starts, and the values of its options.

A check takes the text that a user wrote and returns the value. All raise ``ValueError`` for text
they do not accept, and name in the message what they accept and what they got.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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

# registry.example.com:5000/team/hvkit:1.0@sha256:...
# The part before the first slash is a host only if it has a dot or a port.
_DOMAIN = r"[A-Za-z0-9-]+(?:(?:\.[A-Za-z0-9-]+)+(?::\d+)?|:\d+)"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r":\w[\w.-]{0,127}"
_DIGEST = r"@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z0-9]+)*:[0-9a-fA-F]{32,}"

_PART_OF_SUBDOMAIN = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SBATCH_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:[= ].+)?", re.ASCII)

# Mounted by the operator or by the pods themselves; needed by the image; the kernel's.
_TAKEN_PATHS = (
    *("/home/hvkit/.ssh", "/etc/mpi", "/dev/shm"),
    *("/opt/venv", "/usr/bin", "/home/hvkit/.sshd_config"),
    *("/proc", "/sys"),
)


@dataclass(frozen=True)
class Size:
    """The number of ranks, and of slots per host.

    As with ``mpirun``, the last host may run fewer ranks than the others. All of its slots still
    reserve resources: Kubernetes and Slurm describe all hosts at once.

    Attributes:
        ranks: the number of ranks.
        slots: ranks per host, at most.
    """

    ranks: int
    slots: int

    @classmethod
    def of(cls, ranks: int, slots: int) -> "Size":
        """The size for ``ranks`` ranks; a host gets no more slots than there are ranks."""
        return cls(ranks, min(slots, ranks))

    @property
    def hosts(self) -> int:
        """The smallest number of hosts that has a slot for every rank."""
        return -(-self.ranks // self.slots)

    @property
    def idle(self) -> int:
        """Slots of the last host that have no rank."""
        return self.hosts * self.slots - self.ranks


@dataclass(frozen=True)
class HvkitRun:
    """The ``hvkit run`` that a manifest starts.

    Attributes:
        size: ranks, and ranks per host.
        command: the program that every rank runs, with its arguments.
        variables: environment variables for all ranks.
        options: of ``hvkit run``, one word each.
    """

    size: Size
    command: tuple[str, ...]
    variables: Mapping[str, str]
    options: tuple[str, ...]

    def words(self, variables: Iterable[str]) -> list[str]:
        """The arguments of ``hvkit``; ``variables`` are the values of ``-x``."""
        passed = [word for variable in variables for word in ("-x", variable)]
        return ["run", "-np", str(self.size.ranks), *passed, *self.options, *self.command]


@dataclass(frozen=True)
class Quantity:
    """A number with the unit it was written in."""

    number: Decimal
    unit: str

    def __str__(self) -> str:
        text = f"{self.number:f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + self.unit

    @property
    def value(self) -> Decimal:
        """A Kubernetes quantity as a number of cores or bytes."""
        return self.number * _UNITS[self.unit]

    def times(self, count: int) -> "Quantity":
        """This quantity multiplied by ``count``, in the same unit."""
        return Quantity(self.number * count, self.unit)


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim that all pods mount.

    Attributes:
        claim: the name of the claim, in the job's namespace.
        path: where pods mount it, absolute.
    """

    claim: str
    path: PurePosixPath


def _matching(pattern: str, accepted: str) -> Callable[[str], str]:
    """A check for text that the whole pattern matches; ``accepted`` describes it in words."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"must be {accepted}, got {text!r}")
        return text

    return check


def _amount(
    number: str, unit: str, accepted: str, step: Decimal | None = None
) -> Callable[[str], Quantity]:
    """A check for a positive amount, a multiple of ``step``; ``accepted`` describes it in words."""
    compiled = re.compile(f"(?P<number>{number})(?P<unit>{unit})", re.ASCII)

    def check(text: str) -> Quantity:
        if found := compiled.fullmatch(text):
            quantity = Quantity(Decimal(found["number"]), found["unit"])
            if quantity.number and (step is None or not quantity.value % step):
                return quantity
        raise ValueError(f"must be {accepted}, got {text!r}")

    return check


_DECIMAL = r"\d{1,12}(?:\.\d{1,9})?"

cpus = _amount(_DECIMAL, "m?", "a number of cores such as 4, 0.5 or 500m", _UNITS["m"])
"""A number of cores in Kubernetes' notation, no finer than a thousandth of a core."""

memory = _amount(
    _DECIMAL,
    "[kMGTPE]|[KMGTPE]i",
    "a number and a unit of Kubernetes such as 512Mi or 16Gi (or k, M, G, T for powers of 1000)",
    Decimal(1),
)
"""An amount of memory in Kubernetes' notation, with a unit."""

slurm_memory = _amount(r"\d{1,12}", "[KMGT]", "a whole number and K, M, G or T such as 512M or 16G")
"""An amount of memory in Slurm's notation, with a unit; units are powers of 1024."""

label = _matching(
    "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?",
    "1 to 63 lower-case letters, digits and `-`, with a letter or digit at both ends",
)
"""The name of a Kubernetes namespace: a label of RFC 1123."""

subdomain = _matching(
    rf"(?=.{{1,253}}$){_PART_OF_SUBDOMAIN}(?:\.{_PART_OF_SUBDOMAIN})*",
    "at most 253 lower-case letters, digits, `-` and `.`, with a letter or digit at both ends and "
    "beside each dot",
)
"""The name of most Kubernetes objects, such as a PersistentVolumeClaim (RFC 1123)."""

image = _matching(
    rf"(?:{_DOMAIN}/)?{_PART}(?:/{_PART})*(?:{_TAG})?(?:{_DIGEST})?",
    "an image such as registry.example.com/team/hvkit:1.0, in lower case except for the tag",
)
"""A reference to a container image."""

slurm_name = _matching(
    "[A-Za-z0-9_][A-Za-z0-9_.+@-]*",
    "letters, digits and `_.+@-`, and not begin with one of `.+@-`",
)
"""The name of a Slurm job, account or partition."""

sagemaker_name = _matching(
    "[a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62}",
    "1 to 63 letters, digits and `-`, with a letter or digit at both ends",
)
"""The name of a training job of SageMaker, which no earlier job of the account may have."""

role = _matching(
    r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@/-]+",
    "a role such as arn:aws:iam::123456789012:role/training",
)
"""A role of Amazon's, by its ARN."""

s3 = _matching(r"s3://[^/\s]+(?:/\S*)?", "an S3 URI such as s3://bucket/folder")
"""A place in Amazon S3."""

amazon_id = _matching("[a-zA-Z0-9-]{1,32}", "an ID such as subnet-0123456789abcdef0")
"""A subnet or a security group of Amazon's."""

kms_key = _matching(
    "[a-zA-Z0-9:/_-]{1,2048}", "the ID, ARN or alias/NAME of a key in Amazon's key service (KMS)"
)
"""A key of Amazon's with which data are encrypted."""

instance_type = _matching(
    r"ml\.[a-z0-9-]+\.[a-z0-9-]+", "a type of instance such as ml.p4d.24xlarge"
)
"""A type of SageMaker's instances."""

azure_name = _matching(
    "[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}",
    "1 to 255 letters, digits, `_` and `-`, with a letter or digit first",
)
"""The name of a cluster or an experiment of Azure ML."""

_AZURE_IDENTITIES = {"user": "user_identity", "managed": "managed"}
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_input = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,63})=(.+)", re.ASCII)

duration = _matching(
    r"(?=.*[1-9])(?:\d+-)?\d{1,3}:[0-5]\d:[0-5]\d",
    "HH:MM:SS or DAYS-HH:MM:SS, longer than zero",
)
"""The time limit of a Slurm job, in the form that has only one reading (30 means minutes)."""


def seconds(text: str) -> int:
    """A time limit written as for Slurm, in seconds."""
    days, _, clock = duration(text).rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def docker_memory(text: str) -> str:
    """An amount of memory in Docker's notation, whose units are powers of 1024: ``2g``."""
    amount = memory(text)
    if amount.unit not in ("Ki", "Mi", "Gi") or "." in str(amount):
        raise ValueError(f"must be a whole number and Mi or Gi, such as 2Gi, got {text!r}")
    return str(amount).removesuffix("i").lower()


def one_line(text: str) -> str:
    """Printable text on one line, not empty."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"must be text on one line, got {text!r}")
    return utf8(text)


def s3_input(text: str) -> tuple[str, str]:
    """Data as ``NAME=s3://bucket/folder``: its name and place."""
    name, place = _named_input(text, "train=s3://bucket/mnist")
    return name, s3(place)


def azure_folder(text: str) -> tuple[str, str]:
    """Data as ``NAME=PATH``: its name, and Azure's path of it."""
    return _named_input(text, "train=azureml://datastores/workspaceblobstore/paths/mnist")


def _named_input(text: str, example: str) -> tuple[str, str]:
    found = _input.fullmatch(text)
    if found is None or not text.isprintable():
        raise ValueError(f"must be NAME=PLACE, such as {example}, got {text!r}")
    return found[1], utf8(found[2])


def folders(option: str, options: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, str]:
    """The places that were given with an option ``NAME=PLACE``, by name.

    Raises:
        ValueError: two have one name.
    """
    found = dict(options[option])
    if len(found) < len(options[option]):
        raise ValueError(f"argument --{option}: a name is used twice: give each {option} its own")
    return found


def azure_identity(text: str) -> dict[str, str]:
    """An identity of Azure ML: ``user``, ``managed``, or the client ID of a managed one."""
    if text in _AZURE_IDENTITIES:
        return {"type": _AZURE_IDENTITIES[text]}
    if _UUID.fullmatch(text):
        return {"type": "managed", "client_id": text}
    raise ValueError(
        "must be user (whoever submits the job), managed (the cluster's) or the client ID of one "
        f"of the cluster's identities, got {text!r}"
    )


def sbatch_option(text: str) -> str:
    """A long option of ``sbatch`` on one line."""
    if not _SBATCH_OPTION.fullmatch(text) or not text.isprintable():
        raise ValueError(f"must be one option on one line, such as --qos=high, got {text!r}")
    return text


def slurm_names(text: str) -> str:
    """Names of Slurm partitions, separated by commas."""
    for name in text.split(","):
        slurm_name(name)
    return text


def job_name(text: str) -> str:
    """The name of an MPIJob: a label of RFC 1123 that begins with a letter.

    The operator gives services this name, and service names follow the older RFC 1035.
    """
    if not label(text)[0].isalpha():
        raise ValueError(f"must begin with a letter, as names of services do, got {text!r}")
    return text


def count(text: str) -> int:
    """An integer, 0 or more."""
    if not text.isdecimal():
        raise ValueError(f"must be 0 or a positive integer, got {text!r}")
    return int(text)


def assignment(text: str) -> tuple[str, str]:
    """An environment variable written as ``NAME=VALUE``: its name and value."""
    name, sign, value = text.partition("=")
    if not sign or not _VARIABLE.fullmatch(name):
        raise ValueError(
            "must be NAME=VALUE, with a name of letters, digits and `_` that does not begin with "
            f"a digit, got {text!r}"
        )
    return name, utf8(value)


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a document that have a value, at all depths."""
    kept = {
        name: without_empty(value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return {name: value for name, value in kept.items() if value not in (None, {}, [])}


def utf8(text: str) -> str:
    """Text that UTF-8 can encode; a command line may contain bytes that are not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be text in UTF-8, got {text!r}") from error
    return text


def volume(text: str) -> Volume:
    """A volume from ``CLAIM:PATH``, at a path that the pods do not need for something else."""
    claim, sign, path = text.partition(":")
    if not sign:
        raise ValueError(f"must be CLAIM:PATH, such as datasets:/data, got {text!r}")
    return Volume(subdomain(claim), _mount_point(path))


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
