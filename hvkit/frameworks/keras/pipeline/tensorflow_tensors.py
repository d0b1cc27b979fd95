"""What a pipeline does with tensors of TensorFlow, as ``pytorch_tensors`` does with PyTorch's.

Tapes record what stages compute; gradients are what ``tape.gradient`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

COMPILER = "tf.function"


def in_graph() -> bool:
    """Whether TensorFlow traces a graph, in which nothing can be sent."""
    return not tf.executing_eagerly()


def is_recording() -> bool:
    """Whether the script may want gradients of what is computed now."""
    return bool(record.could_possibly_record())


def is_dense(value: Any) -> bool:
    """Whether this is a tensor that can be divided into micro-batches."""
    return isinstance(value, tf.Tensor)


def wants_gradient(tensor: Any) -> bool:
    """Whether the script asks for the gradient of an input; a tape does not say, and finds none."""
    return False


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made faster where the backend can."""
    made: Callable[..., Any] = tf.function(run, autograph=False, reduce_retracing=True)
    return made


@contextmanager
def unwatched(variables: Sequence[Any]) -> Iterator[None]:
    """Keep tapes of the script from recording a stage, which has one of its own.

    A tape watches all variables that TensorFlow calls trainable. Under two tapes TensorFlow would
    prepare for second derivatives.
    """
    held = [v._value for v in variables]
    before = [v._trainable for v in held]
    for v in held:
        v._trainable = False
    try:
        yield
    finally:
        for v, trainable in zip(held, before, strict=True):
            v._trainable = trainable


def recorded(run: Callable[[], Any], watched: Sequence[Any]) -> tuple[Any, Callable[..., Any]]:
    """What a function returns, and what gives gradients of it.

    Args:
        run: computes tensors.
        watched: the backend's variables, and tensors that the function uses.

    Returns:
        The second is called with some of the tensors and their gradients. It returns those of what
        is watched, None for what has none.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(watched)
        results = run()

    def gradients(targets: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        return list(tape.gradient(list(targets), list(watched), output_gradients=list(given)))

    return results, gradients


def connected(
    results: Sequence[Any], variables: Sequence[Any], backward: Callable[[Sequence[Any]], list[Any]]
) -> list[Any]:
    """The tensors as results of an operation on all these variables of Keras.

    Args:
        results: computed apart.
        variables: that are trained.
        backward: gives the gradients of the variables, from those of the results.
    """
    read = [tf.convert_to_tensor(v._value) for v in variables]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def operation(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        return [tf.identity(t) for t in results], lambda *given: backward(given)

    return list(operation(*read))


def added(a: Any, b: Any) -> Any:
    """The sum of two gradients, each of which may be missing, or of a few rows."""
    given = [g for g in (a, b) if g is not None]
    if len(given) < 2:
        return given[0] if given else None
    if all(isinstance(g, tf.IndexedSlices) for g in given):
        values = tf.concat([g.values for g in given], 0)
        indices = tf.concat([g.indices for g in given], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return tf.add_n([tf.convert_to_tensor(g) for g in given])


def norm_of(gradient: Any) -> float:
    """The norm of a gradient, in float64: squares of float32 may overflow.

    Of rows, as TensorFlow's and Keras's clipping computes it: without adding equal rows up.
    """
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return float(tf.norm(tf.cast(values, tf.float64)))


def add_gradients(
    variables: Sequence[Any], gradients: Sequence[Any], begin: Callable[[], Callable[[], None]]
) -> list[Any]:
    """Those gradients: a variable of TensorFlow keeps none, and updates average them.

    Args:
        variables: of Keras.
        gradients: None for what has none.
        begin: called before, and what it returns afterwards.
    """
    begin()()
    return list(gradients)


def remainder(variable: Any, total: Any) -> Any:
    """What to return for a variable from a backward pass, so that the script finds the total."""
    return total


def placeholder_of(variable: Any) -> Any:
    """What stands for the values of a variable that other ranks hold: one without elements."""
    dtype = variable._dtype
    return tf.Variable(tf.zeros((0,), dtype), trainable=variable.trainable)


def values_for(variable: Any, array: Any) -> Any:
    """An array, as ``hold`` takes it."""
    return tf.Variable(array, trainable=variable.trainable)


def hold(variable: Any, values: Any) -> None:
    """Let a variable of Keras hold a placeholder, or values."""
    variable._value = values
