"""The states of Python's, NumPy's and PyTorch's random generators, also as text for files.

Reading a state draws no number.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import numpy as np

States = dict[str, Any]
"""States of generators by name."""


def global_states() -> States:
    """The states of the global generators: ``python``, ``numpy``, and ``torch`` if imported."""
    states: States = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
    return states


def set_global_states(states: States) -> None:
    """Set those of the global generators that ``states`` names."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def seed_global(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


def equal(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


def as_text(name: str, state: Any) -> str:
    """The state of a generator as text; the name says what kind it is."""
    if name == "python":
        return json.dumps(state)
    if name == "numpy":
        inner = {key: np.asarray(value).tolist() for key, value in state["state"].items()}
        return json.dumps({**state, "state": inner})
    return base64.b64encode(state.numpy().tobytes()).decode()


def from_text(name: str, text: str) -> Any:
    """The state that ``as_text`` returned as text."""
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
