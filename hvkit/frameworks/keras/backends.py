"""The differences between Keras's backends, for code that serves all of them.

TensorFlow is imported only where Keras runs on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import keras
import ml_dtypes
import numpy as np
from keras.src.backend import Variable as KerasVariable
from keras.src.utils import module_utils

Function = TypeVar("Function", bound=Callable[..., Any])

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if ON_TENSORFLOW:
    import tensorflow as tf
    from tensorflow.python.eager import record


def outside_graphs() -> AbstractContextManager[None]:
    """A context for eager code, also while TensorFlow traces a graph."""
    scope: AbstractContextManager[None] = tf.init_scope() if ON_TENSORFLOW else nullcontext()
    return scope


@contextmanager
def tensorflow_not_imported() -> Iterator[None]:
    """A context in which Keras serialises objects without importing TensorFlow for its types."""
    tensorflow = module_utils.tensorflow
    before = tensorflow._available
    if "tensorflow" not in sys.modules:
        tensorflow._available = False
    try:
        yield
    finally:
        tensorflow._available = before


def is_symbolic(value: Any) -> bool:
    return ON_TENSORFLOW and bool(tf.is_symbolic_tensor(value))


def may_be_differentiated(tensor: Any) -> bool:
    if ON_TENSORFLOW:
        return bool(record.could_possibly_record())
    return bool(getattr(tensor, "requires_grad", False))


def not_converted(function: Function) -> Function:
    if not ON_TENSORFLOW:
        return function
    plain: Function = tf.autograph.experimental.do_not_convert(function)
    return plain


def backend_variable(variable: Any) -> Any:
    """The backend's own variable behind a Keras one: TensorFlow's, or a parameter of PyTorch."""
    # Not keras.Variable: in Keras 3.5 that is a subclass of this class.
    return variable._value if isinstance(variable, KerasVariable) else variable


def quickly_read(variable: Any) -> Any:
    """``variable.numpy()`` in a quarter of its time, of a variable of TensorFlow."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy()


def number_of(variable: Any) -> Any:
    """The value of a Keras variable that holds one number."""
    return quickly_read(variable.value) if ON_TENSORFLOW else variable.numpy()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name, also ``bfloat16`` and ``float8_e4m3fn``."""
    return np.dtype(getattr(ml_dtypes, name, name))


def set_anew(variable: Any, array: np.ndarray[Any, Any]) -> None:
    """Set a variable of an optimizer to an array of another shape, which Keras cannot do."""
    variable._shape = array.shape
    if ON_TENSORFLOW:
        with tf.init_scope():
            variable._value = tf.Variable(array, trainable=False)
    else:
        variable._initialize(array)


def have_values(variables: Sequence[Any]) -> bool:
    """Whether variables are initialised: not while TensorFlow first traces what creates them."""
    if not ON_TENSORFLOW:
        return all(backend_variable(v) is not None for v in variables)
    with tf.init_scope():
        return all(bool(backend_variable(v).is_initialized()) for v in variables)
