"""The random state of one rank: Python's, NumPy's and the frameworks' global generators.

Reading it draws nothing.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]


def capture() -> Arrays:
    """The states of all generators that are in use, as arrays of plain dtypes."""
    state: Arrays = {"python": _text(random.getstate()), "numpy": _text(_numpy_state())}
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["torch_cuda"] = torch.cuda.get_rng_state().numpy()
    if "tensorflow" in sys.modules:
        state |= _tensorflow_state()
    if "keras" in sys.modules:
        generator = _keras_generator()
        if generator is not None:
            state["keras"] = np.array(generator.state.numpy())
    return state


def put_back(state: Arrays) -> None:
    """Set the generators to states that :func:`capture` gave."""
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        if "torch_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(state["torch_cuda"].copy()))
    if "tensorflow" in sys.modules and "tensorflow" in state:
        import tensorflow as tf

        tf.random.get_global_generator().state.assign(state["tensorflow"])
    if "keras" in sys.modules:
        _put_back_keras(state.get("keras"))
    # Last, since making Keras's generator draws a seed from Python's.
    version, internal, gauss = json.loads(str(state["python"]))
    random.setstate((version, tuple(internal), gauss))
    numpy_state = json.loads(str(state["numpy"]))
    np.random.set_state(
        {**numpy_state, "state": {k: _plain_array(v) for k, v in numpy_state["state"].items()}}
    )


def _numpy_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    inner = {k: np.asarray(v).tolist() for k, v in state["state"].items()}
    return {**state, "state": inner}


def _plain_array(value: Any) -> Any:
    return np.array(value, np.uint64) if isinstance(value, list) else value


def _tensorflow_state() -> Arrays:
    import tensorflow as tf

    try:
        generator = tf.random.get_global_generator()
    except RuntimeError:  # op determinism is on, and the script has made none
        return {}
    return {"tensorflow": np.array(generator.state.numpy())}


def _keras_generator() -> Any:
    """Keras's global seed generator; None until something has drawn from it."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("global_seed_generator")


def _put_back_keras(state: np.ndarray[Any, Any] | None) -> None:
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import global_seed_generator

    if state is not None:
        global_seed_generator().state.assign(state)
    elif _keras_generator() is not None:
        # It is to be made at its first use, as in the run that was saved.
        global_state.set_global_attribute("global_seed_generator", None)


def _text(value: Any) -> np.ndarray[Any, Any]:
    return np.array(json.dumps(value))
