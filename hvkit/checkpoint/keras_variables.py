"""Values and shapes of Keras's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def shapes_of(variables: Sequence[Any]) -> list[list[int]]:
    """The shapes of variables."""
    return [list(v.shape) for v in variables]


def require_shapes(what: str, saved: list[list[int]], own: list[list[int]]) -> None:
    """Compare the shapes of a checkpoint with those of the objects that it is loaded into.

    Raises:
        ValueError: names the first difference.
    """
    for i, (theirs, ours) in enumerate(zip(saved, own, strict=False)):
        if theirs != ours:
            raise ValueError(f"{what}[{i}] has shape {theirs} there and {ours} here")
    if len(saved) != len(own):
        raise ValueError(f"there are {len(saved)} {what} there and {len(own)} here")


def as_dtype_of(variable: Any, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with the variable's dtype, where a file holds it as plain bytes (bfloat16)."""
    return as_dtype(variable.dtype, array)


def as_dtype(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with the dtype of this name, where a file holds it as plain bytes (bfloat16)."""
    dtype = tf.as_dtype(name).as_numpy_dtype
    return array.view(dtype) if array.dtype.kind == "V" else array
