"""The values in a manifest: the size of the run, names, and amounts of CPU and memory.

A function here takes the text that a user wrote, checks it, and returns the value. All raise
``ValueError`` for text they do not accept, and name in the message what they accept and what they
got.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_PART_OF_SUBDOMAIN = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_PART_OF_SUBDOMAIN}(?:\.{_PART_OF_SUBDOMAIN})*", re.ASCII)
_LONGEST_SUBDOMAIN = 253
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SLURM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*", re.ASCII)
_SBATCH_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:[= ].+)?", re.ASCII)
_DURATION = re.compile(r"(?:\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", re.ASCII)

# registry.example.com:5000/team/hvkit:1.0@sha256:...
# The part before the first slash is a host only if it has a dot or a port.
_DOMAIN = r"[A-Za-z0-9-]+(?:(?:\.[A-Za-z0-9-]+)+(?::\d+)?|:\d+)"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r":\w[\w.-]{0,127}"
_DIGEST = r"@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z0-9]+)*:[0-9a-fA-F]{32,}"
_IMAGE = re.compile(rf"(?:{_DOMAIN}/)?{_PART}(?:/{_PART})*(?:{_TAG})?(?:{_DIGEST})?", re.ASCII)

_PREFIXES = "kMGTPE"
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix.upper()}i": Decimal(1024) ** n for n, prefix in enumerate(_PREFIXES, 1)},
}
_NUMBER = r"(?P<number>\d{1,12}(?:\.\d{1,9})?)"
_CPUS = re.compile(rf"{_NUMBER}(?P<unit>m?)", re.ASCII)
_MEMORY = re.compile(rf"{_NUMBER}(?P<unit>[kMGTPE]|[KMGTPE]i)", re.ASCII)
_SLURM_MEMORY = re.compile(r"(?P<number>\d{1,12})(?P<unit>[KMGT])", re.ASCII)


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


def cpus(text: str) -> Quantity:
    """A number of cores in Kubernetes' notation, no finer than a thousandth of a core."""
    quantity = _quantity(_CPUS, text)
    if quantity is None or quantity.value % _UNITS["m"]:
        raise ValueError(f"must be a number of cores such as 4, 0.5 or 500m, got {text!r}")
    return quantity


def memory(text: str) -> Quantity:
    """An amount of memory in Kubernetes' notation, with a unit."""
    quantity = _quantity(_MEMORY, text)
    if quantity is None or quantity.value % 1:
        raise ValueError(
            "must be a number and a unit of Kubernetes such as 512Mi or 16Gi (or k, M, G, T for "
            f"powers of 1000), got {text!r}"
        )
    return quantity


def slurm_memory(text: str) -> Quantity:
    """An amount of memory in Slurm's notation, with a unit; units are powers of 1024."""
    quantity = _quantity(_SLURM_MEMORY, text)
    if quantity is None:
        raise ValueError(
            f"must be a whole number and K, M, G or T such as 512M or 16G, got {text!r}"
        )
    return quantity


def _quantity(pattern: re.Pattern[str], text: str) -> Quantity | None:
    """The quantity if all of ``text`` matches the pattern and is more than zero."""
    found = pattern.fullmatch(text)
    if found is None or not (number := Decimal(found["number"])):
        return None
    return Quantity(number, found["unit"])


def label(text: str) -> str:
    """The name of a Kubernetes namespace: a label of RFC 1123."""
    if not _LABEL.fullmatch(text):
        raise ValueError(
            "must be 1 to 63 lower-case letters, digits and `-`, with a letter or digit at both "
            f"ends, got {text!r}"
        )
    return text


def job_name(text: str) -> str:
    """The name of an MPIJob: a label of RFC 1123 that begins with a letter.

    The operator gives services this name, and service names follow the older RFC 1035.
    """
    if not label(text)[0].isalpha():
        raise ValueError(f"must begin with a letter, as names of services do, got {text!r}")
    return text


def subdomain(text: str) -> str:
    """The name of most Kubernetes objects, such as a PersistentVolumeClaim (RFC 1123)."""
    if len(text) > _LONGEST_SUBDOMAIN or not _SUBDOMAIN.fullmatch(text):
        raise ValueError(
            f"must be at most {_LONGEST_SUBDOMAIN} lower-case letters, digits, `-` and `.`, with "
            f"a letter or digit at both ends and beside each dot, got {text!r}"
        )
    return text


def image(text: str) -> str:
    """A reference to a container image."""
    if not _IMAGE.fullmatch(text):
        raise ValueError(
            "must be an image such as registry.example.com/team/hvkit:1.0, in lower case except "
            f"for the tag, got {text!r}"
        )
    return text


def assignment(text: str) -> tuple[str, str]:
    """An environment variable written as ``NAME=VALUE``: its name and value."""
    name, sign, value = text.partition("=")
    if not sign or not _VARIABLE.fullmatch(name):
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


def slurm_name(text: str) -> str:
    """The name of a Slurm job, account or partition."""
    if not _SLURM_NAME.fullmatch(text):
        raise ValueError(
            f"must be letters, digits and `_.+@-`, and not begin with one of `.+@-`, got {text!r}"
        )
    return text


def slurm_names(text: str) -> str:
    """Names of Slurm partitions, separated by commas."""
    for name in text.split(","):
        slurm_name(name)
    return text


def sbatch_option(text: str) -> str:
    """A long option of ``sbatch`` on one line."""
    if not _SBATCH_OPTION.fullmatch(text) or not text.isprintable():
        raise ValueError(f"must be one option on one line, such as --qos=high, got {text!r}")
    return text


def duration(text: str) -> str:
    """The time limit of a Slurm job, in the form that has only one reading (30 means minutes)."""
    if not _DURATION.fullmatch(text) or not text.strip("0:-"):
        raise ValueError(f"must be HH:MM:SS or DAYS-HH:MM:SS, longer than zero, got {text!r}")
    return text
