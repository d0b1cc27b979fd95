"""The states of random generators: the same numbers on every rank, and again when a run resumes.

Reading a state draws no number.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

States = dict[str, Any]  # states of generators by name

Arrays = dict[str, np.ndarray[Any, Any]]

_GLOBAL = frozenset({"python", "numpy", "torch"})


def global_states() -> States:
    """The states of the global generators: ``python``, ``numpy``, and ``torch`` if imported."""
    states: States = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
    return states


def set_global_states(states: States) -> None:
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other if isinstance(one, tuple) else np.array_equal(one, other))


def as_text(states: States) -> dict[str, str]:
    """States as text, for messages and files."""
    return {name: _as_text(name, state) for name, state in states.items()}


def from_text(text: Mapping[str, str]) -> States:
    return {name: _from_text(name, each) for name, each in text.items()}


def states_of_data(text: Mapping[str, str]) -> States:
    """The states of the data's generators among all that ``as_text`` returned."""
    return from_text({name: each for name, each in text.items() if name not in _GLOBAL})


def begins_an_epoch(text: Mapping[str, str]) -> bool:
    """Whether these are the states of all generators, and not only of the data's."""
    return "python" in text


def _as_text(name: str, state: Any) -> str:
    if name == "python":
        return json.dumps(state)
    if name == "numpy":
        inner = {key: np.asarray(value).tolist() for key, value in state["state"].items()}
        return json.dumps({**state, "state": inner})
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(name: str, text: str) -> Any:
    if name == "python":
        version, internal, gauss = json.loads(text)
        return version, tuple(internal), gauss
    if name == "numpy":
        state = json.loads(text)
        inner = {
            key: np.array(value, np.uint64) if isinstance(value, list) else value
            for key, value in state["state"].items()
        }
        return {**state, "state": inner}
    content = np.frombuffer(base64.b64decode(text), np.uint8).copy()
    return sys.modules["torch"].from_numpy(content)


class Generators:
    """The generators that some data may draw from: the global ones, and those of its samplers."""

    def __init__(self, own: Iterable[Any] = ()) -> None:
        distinct = {id(each): each for each in own}.values()
        self.own = {f"generator-{number}": each for number, each in enumerate(distinct)}

    def states(self) -> States:
        own = {name: generator.get_state() for name, generator in self.own.items()}
        return global_states() | own

    def set(self, states: States) -> None:
        """Set the generators that ``states`` names; the others do not change."""
        set_global_states(states)
        for name, generator in self.own.items():
            if name in states:
                generator.set_state(states[name])

    def seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.manual_seed(seed)
        for generator in self.own.values():
            generator.manual_seed(seed)


class FixedRandomness:
    """A context in which code draws random numbers from a given state on, for example rank 0's.

    The first time, the generators begin in that state; each further time, in the state that they
    had when the context was left. On exit they get back their state from before. But a generator
    that was already in the right state when the context was entered is not set back. So if all
    ranks use the state of rank 0, rank 0 draws as one process does.

    The state is a seed of 63 bits, or states; generators without one there do not change. It may be
    entered while it is active.
    """

    def __init__(self, start: int | States, generators: Generators | None = None) -> None:
        self._generators = generators or Generators()
        self._inside: int | States = start
        self._outside: States = {}
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        outside = self._generators.states()
        if isinstance(self._inside, int):
            self._outside = outside
            self._generators.seed(self._inside)
            return
        inside = self._inside
        self._outside = {
            name: state
            for name, state in outside.items()
            if name in inside and not _equal(state, inside[name])
        }
        self._generators.set({name: inside[name] for name in self._outside})

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._inside = self._generators.states()
            self._generators.set(self._outside)


def as_arrays() -> Arrays:
    """The states of Python's, NumPy's and the frameworks' global generators, for checkpoints."""
    found = global_states()
    state: Arrays = {name: np.array(_as_text(name, found[name])) for name in ("python", "numpy")}
    torch, tf = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None:
        state["torch"] = found["torch"].numpy()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["torch_cuda"] = torch.cuda.get_rng_state().numpy()
    if tf is not None:
        # If op determinism is on, there may be no generator.
        with contextlib.suppress(RuntimeError):
            state["tensorflow"] = np.array(tf.random.get_global_generator().state.numpy())
    if (generator := _keras_generator()) is not None:
        state["keras"] = np.array(generator.state.numpy())
    return state


def set_from_arrays(state: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Set the generators to the states that ``as_arrays`` returned."""
    torch, tf = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        if "torch_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(state["torch_cuda"].copy()))
    if tf is not None and "tensorflow" in state:
        tf.random.get_global_generator().state.assign(state["tensorflow"])
    if "keras" in sys.modules and "keras" in state:
        from keras.src.random.seed_generator import global_seed_generator

        global_seed_generator().state.assign(state["keras"])
    elif _keras_generator() is not None:
        from keras.src.backend.common import global_state

        # As in the saved run, its first use creates it.
        global_state.set_global_attribute("global_seed_generator", None)
    # Last, because creating Keras's generator draws a seed from Python's.
    set_global_states(from_text({name: str(state[name]) for name in ("python", "numpy")}))


def _keras_generator() -> Any:
    """Keras's global seed generator; None until something draws from it."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("global_seed_generator")
