"""Collectives outside of graphs, by name.

In eager code Horovod gives operations of one kind one name, whatever they are called: it would mix
up those of two threads, and those of ranks that are at different points of the script. So each of
these collectives is a small graph, where names count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkit.communication.exchanges import Exchange, Mean
from hvkit.frameworks.keras.collectives.wire import Wire


class NamedCollectives:
    """Collectives in graphs of their own; not for functions that a graph calls.

    Such a function may occupy the only thread that TensorFlow has for graphs.

    Args:
        wire: counts the bytes.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._functions: dict[Any, Any] = {}

    def exchange(self, exchange: Exchange, name: str) -> tf.Tensor:
        """As ``Wire.exchange``."""
        field = "vector" if isinstance(exchange, Mean) else "rows"
        sent = getattr(exchange, field)
        left_out: Any = None
        form = replace(exchange, **{field: left_out})  # the graph must not keep the tensor
        key = name, form, sent.dtype, tuple(sent.shape)
        if key not in self._functions:

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def function(tensor: tf.Tensor) -> tf.Tensor:
                return self._wire.exchange(replace(form, **{field: tensor}), name)

            # Concrete: else TensorFlow warns that one code is traced too often.
            spec = tf.TensorSpec(sent.shape, sent.dtype)
            self._functions[key] = tf.function(function).get_concrete_function(spec)
        return self._functions[key](sent)
