"""Amounts of CPU and memory, as Kubernetes and Slurm write them."""

import re
from dataclasses import dataclass
from decimal import Decimal

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
class Quantity:
    """A number and its unit, which stays the one that it was written with."""

    number: Decimal
    unit: str

    def __str__(self) -> str:
        text = f"{self.number:f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text) + self.unit

    @property
    def value(self) -> Decimal:
        """The number of cores or bytes, of a quantity of Kubernetes."""
        return self.number * _UNITS[self.unit]

    def times(self, count: int) -> "Quantity":
        """So many times this."""
        return Quantity(self.number * count, self.unit)


def cpus(text: str) -> Quantity:
    """A number of cores as Kubernetes writes it.

    Raises:
        ValueError: it is not one, or finer than a thousandth of a core.
    """
    quantity = _quantity(_CPUS, text)
    if quantity is None or quantity.value % _UNITS["m"]:
        raise ValueError(f"must be a number of cores such as 4, 0.5 or 500m, got {text!r}")
    return quantity


def memory(text: str) -> Quantity:
    """An amount of memory as Kubernetes writes it.

    Raises:
        ValueError: it is not one, or has no unit.
    """
    quantity = _quantity(_MEMORY, text)
    if quantity is None or quantity.value % 1:
        raise ValueError(
            "must be a number and a unit of Kubernetes such as 512Mi or 16Gi (or k, M, G, T for "
            f"powers of 1000), got {text!r}"
        )
    return quantity


def slurm_memory(text: str) -> Quantity:
    """An amount of memory as Slurm writes it; its units are powers of 1024.

    Raises:
        ValueError: it is not one, or has no unit.
    """
    quantity = _quantity(_SLURM_MEMORY, text)
    if quantity is None:
        raise ValueError(
            f"must be a whole number and K, M, G or T such as 512M or 16G, got {text!r}"
        )
    return quantity


def _quantity(pattern: re.Pattern[str], text: str) -> Quantity | None:
    """What the pattern finds in all of ``text``, if it is more than nothing."""
    found = pattern.fullmatch(text)
    if found is None or not (number := Decimal(found["number"])):
        return None
    return Quantity(number, found["unit"])
