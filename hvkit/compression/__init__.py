"""How gradients and weights are compressed between ranks.

::

    compression    the base classes, and what a compression may use of the ranks
    rounding       fewer bits: fp16, bf16 and int8
    residuals      TopK: the largest values only; PowerSGD: low-rank factors

A compression is a frozen dataclass. It holds the mathematics; ``ops.py`` of each port has the
functions on tensors that it uses.
"""

from __future__ import annotations

from typing import Literal

from hvkit.compression.compression import Compression
from hvkit.compression.residuals import PowerSGD, TopK
from hvkit.compression.rounding import BFloat16, Float16, Int8, Rounding

CompressionName = Literal["none", "fp16", "bf16", "int8"]

# The compressions that ``hvkit.distribute`` takes by name.
BY_NAME: dict[str, Compression | None] = {
    "none": None,
    "fp16": Float16(),
    "bf16": BFloat16(),
    "int8": Int8(),
}


def for_rows(compression: Compression | None) -> Rounding | None:
    """The compression, if it suits the values of row-sparse gradients: one value at a time."""
    if isinstance(compression, Rounding) and compression.block == 1:
        return compression
    return None


__all__ = [
    "BY_NAME",
    "BFloat16",
    "Compression",
    "CompressionName",
    "Float16",
    "Int8",
    "PowerSGD",
    "Rounding",
    "TopK",
    "for_rows",
]
