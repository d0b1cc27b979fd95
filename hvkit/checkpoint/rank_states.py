"""What differs between ranks: random states, and layer statistics of a rank's own batches.

A checkpoint keeps them for every rank, in one file. Reading a random state draws no number.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import random_states, runtime
from hvkit.checkpoint.saved_object import LOCAL, NOT_IN_FILE, SEED, Arrays, Part, add_array
from hvkit.sync.fingerprints import Compared, Rows

FILE = "ranks.npz"

_RANDOM = "random"
# Prefix of the names of random states at the beginning of the epoch, beside those of now.
_EPOCH = "epoch-"
# Separates the rank, the part and the array's name in a key of the file.
_SEPARATOR = "/"


def capture(parts: Sequence[Part], epoch: Arrays) -> dict[str, Arrays]:
    """This rank's random state and its own arrays of each part, by the part's name.

    Args:
        parts: of this rank.
        epoch: the random state with which ``fit`` shuffled the epoch; none at its end.
    """
    random = random_state() | {f"{_EPOCH}{name}": state for name, state in epoch.items()}
    return {_RANDOM: random} | {part.name: part.own() for part in parts}


def compared(parts: Sequence[Part]) -> tuple[list[Compared], list[Rows]]:
    """The state of all parts that must be equal on all ranks, and its fingerprints.

    Nothing if there is only one rank.
    """
    return _labelled((part.name, *part.compared()) for part in parts if runtime.size() > 1)


def may_differ(parts: Sequence[Part]) -> tuple[list[Compared], list[Rows]]:
    """The state of all parts that may differ between ranks, and its fingerprints."""
    return _labelled((part.name, *part.may_differ()) for part in parts if runtime.size() > 1)


def _labelled(
    found: Iterable[tuple[str, list[Compared], list[Rows]]],
) -> tuple[list[Compared], list[Rows]]:
    named: list[Compared] = []
    every: list[Rows] = []
    for name, kinds, rows in found:
        named += [replace(each, label=f"{each.label} of {name}") for each in kinds]
        every += rows
    return named, every


def digests(own: Mapping[str, Arrays]) -> dict[str, bytes]:
    """Digests of those arrays that the parts' files may hold too, for ``differing``."""
    return {
        f"{part}{_SEPARATOR}{name}": hashlib.sha256(_bytes_of(array)).digest()
        for part, arrays in own.items()
        for name, array in arrays.items()
        if not _is_own(part, name)
    }


def differing(
    own: Mapping[str, Arrays], mine: Mapping[str, bytes], first: Mapping[str, bytes]
) -> dict[str, Arrays]:
    """``own`` without the arrays that are equal to rank 0's, which are in the parts' own files.

    Arrays that are never in a part's file are kept: seeds, and a rank's local weights in a round.

    Args:
        own: this rank's arrays, from ``capture``.
        mine: their digests, from ``digests``.
        first: rank 0's.
    """

    def is_kept(part: str, name: str) -> bool:
        key = f"{part}{_SEPARATOR}{name}"
        return _is_own(part, name) or mine[key] != first.get(key)

    return {
        part: {name: array for name, array in arrays.items() if is_kept(part, name)}
        for part, arrays in own.items()
    }


def _is_own(part: str, name: str) -> bool:
    return part == _RANDOM or name.startswith((SEED, NOT_IN_FILE))


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def save(path: Path, everyone: Iterable[Mapping[str, Arrays]]) -> int:
    """Write the arrays of all ranks to a file as ``numpy.savez`` makes it, and count the ranks.

    Args:
        path: the file.
        everyone: the arrays that each rank adds to the parts' files, in rank order. Each is dropped
            once it is written.
    """
    size, states = 0, iter(everyone)
    with zipfile.ZipFile(path, "w") as archive:
        while (own := next(states, None)) is not None:
            for part, arrays in own.items():
                for name, array in arrays.items():
                    add_array(archive, _SEPARATOR.join((str(size), part, name)), array)
            arrays = array = own = None  # type: ignore[assignment]
            size += 1
    return size


class Saved:
    """What each rank has saved, in a file that ``save`` wrote.

    Args:
        path: the file.
        same_size: whether as many ranks resume as saved. If not, layers keep rank 0's statistics.
        in_round: whether ranks go on in the middle of the saved round, with their local weights.
    """

    def __init__(self, path: Path, *, same_size: bool, in_round: bool) -> None:
        self._values = np.load(path)
        self._same_size = same_size
        self._in_round = in_round
        self._keys: dict[int, list[str]] = {}
        for key in self._values.files:
            self._keys.setdefault(int(key.partition(_SEPARATOR)[0]), []).append(key)

    def of(self, rank: int) -> dict[str, Arrays]:
        """The arrays for this rank, by part; none if there was no such rank when it was saved."""
        found: dict[str, Arrays] = {}
        for key in self._keys.get(rank, []):
            _, part, name = key.split(_SEPARATOR, 2)
            of_part = found.setdefault(part, {})
            if part == _RANDOM or self._is_wanted(name):
                of_part[name] = self._values[key]
        return found

    def _is_wanted(self, name: str) -> bool:
        if name.startswith(SEED):
            return True
        return self._in_round if name.startswith(LOCAL) else self._same_size

    def close(self) -> None:
        self._values.close()


def put_back(saved: Mapping[str, Arrays], parts: Sequence[Part]) -> Arrays:
    """Set this rank's state to what it saved; does nothing for a rank that has saved nothing.

    Returns:
        The random state with which ``fit`` shuffled the epoch, if it was saved inside one.
    """
    if not saved:
        return {}
    for part in parts:
        part.load_own(saved.get(part.name, {}))
    random = saved[_RANDOM]
    set_random_state(random)
    return {
        name.removeprefix(_EPOCH): state
        for name, state in random.items()
        if name.startswith(_EPOCH)
    }


def random_state() -> Arrays:
    """The states of Python's, NumPy's and the frameworks' global generators, as plain arrays."""
    found = random_states.global_states()
    state: Arrays = {
        name: np.array(random_states.as_text(name, found[name])) for name in ("python", "numpy")
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = found["torch"].numpy()
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
    random_states.set_global_states(
        {name: random_states.from_text(name, str(state[name])) for name in ("python", "numpy")}
    )


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
