"""Refuses updates that TensorFlow would compile with XLA or divide among devices.

XLA has no kernels for Horovod's operations. A strategy of ``tf.distribute`` would divide the work
and average gradients a second time.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def refuse_xla(call: str) -> None:
    """Raise if XLA will compile the code that TensorFlow is tracing, or a function around it.

    Args:
        call: the call that needs the other ranks.

    Raises:
        ValueError: XLA will compile it.
    """
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"{call} is inside a tf.function with jit_compile=True, but XLA cannot compile the "
            "communication between ranks: remove jit_compile=True from the tf.function that "
            f"contains {call}. A separate tf.function with the forward and backward pass may keep "
            "it"
        )


def refuse_tf_distribute(model: Any = None) -> None:
    """Raise where a strategy of ``tf.distribute`` would divide the work, too.

    Args:
        model: one that may have been made in such a strategy's scope; None for the update of one.

    Raises:
        ValueError: names the strategy.
    """
    made_in = getattr(model, "_distribute_strategy", None)
    if made_in is None and not tf.distribute.has_strategy():
        return
    found = type(made_in or tf.distribute.get_strategy()).__name__
    raise ValueError(
        f"{'an update' if model is None else f'model {model.name!r}'} is in the scope of "
        f"tf.distribute.{found}, which would divide the work and average gradients, too: remove "
        f"the strategy and `with strategy.scope():`, as hvkit starts one process for each device"
    )
