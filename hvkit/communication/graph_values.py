"""Which values a framework only traces: they have no numbers that a rank could send."""

from __future__ import annotations

import sys
from typing import Any

from hvkit.registry import tensor_in

# Of the script's calls that may be in a loss.
calls = 0


def note_call() -> None:
    """Count a call of the script's that needs all ranks to make it."""
    global calls
    calls += 1


def in_graph(call: str, *values: Any) -> bool:
    """Whether TensorFlow is tracing a graph, with one of these as a tensor or variable.

    Args:
        call: the user's.
        values: what the user passes to it.

    Raises:
        TypeError: one of them is an array that JAX is tracing.
    """
    note_call()
    jax, tf = map(sys.modules.get, ("jax", "tensorflow"))
    # TensorFlow looks for JAX, and may find a folder of that name.
    tracer = getattr(getattr(jax, "core", None), "Tracer", ())
    if any(isinstance(v, tracer) for v in values):
        raise TypeError(
            f"{call} needs the values of an array, which has none inside a compiled function of "
            "JAX, where arrays belong to all ranks, as do sums and means of them: leave the call "
            "out there, or make it outside, on the function's result"
        )
    if tf is None or not hasattr(tf, "executing_eagerly") or tf.executing_eagerly():
        return False
    return any(tensor_in(value)[0] == "tensorflow" for value in values)
