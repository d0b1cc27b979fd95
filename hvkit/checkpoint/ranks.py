"""What belongs to single ranks: random states, and what layers keep from a rank's own batches.

The random state of one rank: Python's, NumPy's and the frameworks' global generators.

Reading it draws nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.checkpoint.part import Arrays, Part

FILE = "ranks.npz"

_RANDOM = "random"
# Between the rank, the part and the array's name.
_SEPARATOR = "/"


def capture(parts: Sequence[Part]) -> dict[str, Arrays]:
    """This rank's random state and its own arrays of each part, by the part's name."""
    return {_RANDOM: random_state()} | {part.name: part.own() for part in parts}


def compared(parts: Sequence[Part]) -> tuple[list[Compared], list[Rows]]:
    """What all ranks must hold alike of all parts, and the fingerprints; nothing with one rank."""
    found = [(part.name, *part.compared()) for part in parts if runtime.size() > 1]
    named = [
        replace(each, label=f"{each.label} of {name}") for name, kinds, _ in found for each in kinds
    ]
    return named, [row for _, _, rows in found for row in rows]


def digests(own: Mapping[str, Arrays]) -> dict[str, bytes]:
    """What tells arrays apart, for :func:`unlike`."""
    return {
        f"{part}{_SEPARATOR}{name}": hashlib.sha256(array.tobytes()).digest()
        for part, arrays in own.items()
        if part != _RANDOM
        for name, array in arrays.items()
    }


def unlike(own: Mapping[str, Arrays], first: Mapping[str, bytes]) -> dict[str, Arrays]:
    """Without the arrays that are those of rank 0, which are in the parts' own files.

    Seeds stay: a rank that loads keeps its own when the parts' files are loaded.
    """
    mine = digests(own)
    return {
        part: {
            name: array
            for name, array in arrays.items()
            if part == _RANDOM
            or name.startswith("seed-")
            or mine[key := f"{part}{_SEPARATOR}{name}"] != first.get(key)
        }
        for part, arrays in own.items()
    }


def save(path: Path, everyone: Sequence[Mapping[str, Arrays]]) -> None:
    """Write what all ranks have, in rank order."""
    values = {
        _SEPARATOR.join((str(rank), part, name)): array
        for rank, own in enumerate(everyone)
        for part, arrays in own.items()
        for name, array in arrays.items()
    }
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **values)


def put_back(content: bytes, parts: Sequence[Part], rank: int, *, same_size: bool) -> bool:
    """Give this rank what the rank of its number had; returns whether there was one.

    Args:
        content: of the file that :func:`save` wrote.
        parts: those that were loaded.
        rank: this rank.
        same_size: whether as many ranks resume as saved. If not, layers keep rank 0's statistics.
    """
    found: dict[str, Arrays] = {}
    with np.load(io.BytesIO(content)) as values:
        for key in values.files:
            theirs, part, name = key.split(_SEPARATOR, 2)
            if int(theirs) == rank:
                found.setdefault(part, {})[name] = values[key]
    if not found:
        return False
    for part in parts:
        own: dict[str, Any] = found.get(part.name, {})
        part.load_own({n: array for n, array in own.items() if same_size or n.startswith("seed-")})
    set_random_state(found[_RANDOM])
    return True


def random_state() -> Arrays:
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


def set_random_state(state: Arrays) -> None:
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
