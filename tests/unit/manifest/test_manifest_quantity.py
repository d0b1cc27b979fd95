"""Amounts of CPU and memory."""

import re
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.manifest.quantity import Quantity, cpus, memory, slurm_memory

# The pattern of the resource definition.
KUBERNETES = re.compile(
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)


@pytest.mark.parametrize(
    ("read", "text", "count", "product"),
    [
        (cpus, "4", 3, "12"),
        (cpus, "0.5", 3, "1.5"),
        (cpus, "0.5", 4, "2"),
        (cpus, "500m", 4, "2000m"),
        (memory, "16Gi", 4, "64Gi"),
        (memory, "1.5Gi", 2, "3Gi"),
        (memory, "512M", 10, "5120M"),
        (slurm_memory, "16G", 4, "64G"),
    ],
)
def test_products_keep_the_unit(
    read: Callable[[str], Quantity], text: str, count: int, product: str
) -> None:
    assert str(read(text).times(count)) == product


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (cpus("4"), 4),
        (cpus("250m"), Decimal("0.25")),
        (memory("1k"), 1000),
        (memory("1Ki"), 1024),
        (memory("1.5Gi"), 3 * 2**29),
        (memory("2E"), 2 * 10**18),
        (memory("2Ei"), 2 * 2**60),
    ],
)
def test_values_are_cores_and_bytes(quantity: Quantity, value: int) -> None:
    assert quantity.value == value


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from("kMGTPE"), st.integers(1, 512))
def test_products_are_exact_and_quantities_of_kubernetes(
    whole: int, thousandths: int, unit: str, count: int
) -> None:
    quantity = memory(f"{whole}.{thousandths:03}{unit}")
    product = str(quantity.times(count))
    assert KUBERNETES.match(product)
    assert memory(product).value == quantity.value * count


REFUSED: list[tuple[Callable[[str], Quantity], str, list[str]]] = [
    (cpus, "a number of cores such as 4, 0.5 or 500m", ["", "0", "0m", "-1", "+1", "four", "4 "]),
    (
        cpus,
        "a number of cores",
        ["4Gi", "0.0005", "0.5m", "1e3", ".5", "4.", "1,5", "\u0664", "nan"],
    ),
    (memory, "a number and a unit of Kubernetes such as 512Mi or 16Gi", ["", "16", "0Gi", "16GB"]),
    (memory, "a number and a unit", ["16g", "16 Gi", "-1Gi", "16K", "400m", "1.5.2Gi", "16gi"]),
    (memory, "a number and a unit", ["0.00001k", "1e3", "Gi", "16Gi\n"]),
    (slurm_memory, "a whole number and K, M, G or T such as 512M or 16G", ["", "16", "0G", "16GB"]),
    (slurm_memory, "a whole number and K, M, G or T", ["16Gi", "1.5G", "16g", "-1G", "\u0664G"]),
]


@pytest.mark.parametrize(
    ("read", "accepted", "text"),
    [(read, accepted, text) for read, accepted, texts in REFUSED for text in texts],
)
def test_other_amounts_are_refused(
    read: Callable[[str], Quantity], accepted: str, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"must be {accepted}")) as caught:
        read(text)
    assert str(caught.value).endswith(f"got {text!r}")
