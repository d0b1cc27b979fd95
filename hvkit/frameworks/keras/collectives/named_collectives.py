"""Collectives outside of graphs, by name.

In eager code Horovod gives operations of one kind one name, whatever they are called: it would mix
up those of two threads, and those of ranks that are at different points of the script. So each of
these collectives is a small graph, where names count.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf

from hvkit.communication.exchanges import Exchange, Mean
from hvkit.frameworks.keras.collectives.wire import Wire

# Graphs that are kept: more than the pieces of most models times the collectives of a compression.
_MOST = 256


class NamedCollectives:
    """Collectives in graphs of their own; not for functions that a graph calls.

    Such a function may occupy the only thread that TensorFlow has for graphs.

    Args:
        wire: counts the bytes.
    """

    def __init__(self, wire: Wire) -> None:
        self._function = lru_cache(_MOST)(partial(_function, wire))

    def exchange(self, exchange: Exchange, name: str) -> tf.Tensor:
        """As ``Wire.exchange``."""
        field = "vector" if isinstance(exchange, Mean) else "rows"
        sent = getattr(exchange, field)
        left_out: Any = None
        form = replace(exchange, **{field: left_out})  # the graph must not keep the tensor
        return self._function(name, form, field, sent.dtype, tuple(sent.shape))(sent)


def _function(
    wire: Wire, name: str, form: Exchange, field: str, dtype: tf.DType, shape: tuple[int, ...]
) -> Any:
    """A graph that makes one collective, of a tensor that takes the place of a field."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def function(tensor: tf.Tensor) -> tf.Tensor:
        return wire.exchange(replace(form, **{field: tensor}), name)

    # Concrete: else TensorFlow warns that one code is traced too often.
    return tf.function(function).get_concrete_function(tf.TensorSpec(shape, dtype))
