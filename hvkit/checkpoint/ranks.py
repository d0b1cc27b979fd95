"""What differs between ranks: random states, and layer statistics of a rank's own batches.

A checkpoint keeps them for every rank, in one file. Reading a random state draws no number.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.checkpoint.part import ALONE, NOT_IN_FILE, SEED, Arrays, Part

FILE = "ranks.npz"

_RANDOM = "random"
# Separates the rank, the part and the array's name in a key of the file.
_SEPARATOR = "/"


def capture(parts: Sequence[Part]) -> dict[str, Arrays]:
    """This rank's random state and its own arrays of each part, by the part's name."""
    return {_RANDOM: random_state()} | {part.name: part.own() for part in parts}


def compared(parts: Sequence[Part]) -> tuple[list[Compared], list[Rows]]:
    """The state of all parts that must be equal on all ranks, and its fingerprints.

    Nothing if there is only one rank.
    """
    found = [(part.name, *part.compared()) for part in parts if runtime.size() > 1]
    named = [
        replace(each, label=f"{each.label} of {name}") for name, kinds, _ in found for each in kinds
    ]
    return named, [row for _, _, rows in found for row in rows]


def digests(own: Mapping[str, Arrays]) -> dict[str, bytes]:
    """A digest of each of the parts' arrays, for ``unlike``."""
    return {
        f"{part}{_SEPARATOR}{name}": hashlib.sha256(array.tobytes()).digest()
        for part, arrays in own.items()
        if part != _RANDOM
        for name, array in arrays.items()
    }


def unlike(own: Mapping[str, Arrays], first: Mapping[str, bytes]) -> dict[str, Arrays]:
    """``own`` without the arrays equal to rank 0's, which the parts' own files hold.

    Those that a part's file does not hold stay in it: seeds, and the weights of a rank that trains
    alone.

    Args:
        own: this rank's arrays, from ``capture``.
        first: rank 0's digests, from ``digests``.
    """
    mine = digests(own)
    return {
        part: {
            name: array
            for name, array in arrays.items()
            if part == _RANDOM
            or name.startswith((SEED, NOT_IN_FILE))
            or mine[key := f"{part}{_SEPARATOR}{name}"] != first.get(key)
        }
        for part, arrays in own.items()
    }


def save(path: Path, everyone: Iterable[Mapping[str, Arrays]]) -> int:
    """Write the arrays of all ranks to a file as ``numpy.savez`` makes it, and count the ranks.

    Args:
        path: the file.
        everyone: the arrays that each rank adds to the parts' files, in rank order. None is held
            longer than it takes to write it.
    """
    size = 0
    with zipfile.ZipFile(path, "w") as archive:
        for rank, own in enumerate(everyone):
            for part, name in [(part, name) for part, arrays in own.items() for name in arrays]:
                key = _SEPARATOR.join((str(rank), part, name))
                with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                    array = np.asanyarray(own[part][name])
                    np.lib.format.write_array(file, array, allow_pickle=False)
            size += 1
    return size


def read(path: Path, rank: int) -> dict[str, Arrays]:
    """What a rank has saved, by part; nothing if it took no part in the save."""
    found: dict[str, Arrays] = {}
    with np.load(path) as values:
        for key in values.files:
            owner, part, name = key.split(_SEPARATOR, 2)
            if int(owner) == rank:
                found.setdefault(part, {})[name] = values[key]
    return found


def put_back(
    saved: Mapping[str, Arrays], parts: Sequence[Part], *, same_size: bool, in_round: bool
) -> None:
    """Set this rank's state.

    Args:
        saved: by the same rank, from ``read``.
        parts: the parts that were loaded.
        same_size: whether as many ranks resume as saved. If not, layers keep rank 0's statistics.
        in_round: whether ranks that trained alone go on in the middle of their round.
    """

    def wanted(name: str) -> bool:
        if name.startswith(SEED):
            return True
        return in_round if name.startswith(ALONE) else same_size

    if not saved:
        return
    for part in parts:
        own: dict[str, Any] = saved.get(part.name, {})
        part.load_own({name: array for name, array in own.items() if wanted(name)})
    set_random_state(saved[_RANDOM])


def random_state() -> Arrays:
    """The states of Python's, NumPy's and the frameworks' global generators, as plain arrays."""
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
    """Set the generators to the states that ``random_state`` returned."""
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
    # Last, because creating Keras's generator draws a seed from Python's.
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
    except RuntimeError:  # op determinism is on, and the script created no generator
        return {}
    return {"tensorflow": np.array(generator.state.numpy())}


def _keras_generator() -> Any:
    """Keras's global seed generator; None until something draws from it."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("global_seed_generator")


def _put_back_keras(state: np.ndarray[Any, Any] | None) -> None:
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import global_seed_generator

    if state is not None:
        global_seed_generator().state.assign(state)
    elif _keras_generator() is not None:
        # As in the saved run, its first use creates it.
        global_state.set_global_attribute("global_seed_generator", None)


def _text(value: Any) -> np.ndarray[Any, Any]:
    return np.array(json.dumps(value))
