"""What Keras's own callbacks count from epoch to epoch, and forget when ``fit`` begins."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.checkpoint.keras_variables import as_dtype
from hvkit.checkpoint.parts import Arrays

_COUNTERS: Mapping[type[Any], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best",),
}
# In the file, beside EarlyStopping's best weights: what was counted, and the weights' dtypes.
_COUNTED = "counted"
_DTYPES = "dtypes"


class CallbackPart:
    """One of the callbacks that watch a metric, in a plain ``.npz`` file.

    Raises:
        TypeError: it is of a class without counters that are known here.
    """

    def __init__(self, name: str, callback: Any) -> None:
        self.name = name
        self.file = f"{name}.npz"
        self._callback = callback
        for kind, counters in _COUNTERS.items():
            if isinstance(callback, kind):
                self._kind, self._counters = kind.__name__, counters
                return
        raise TypeError(
            f"{name} is a {type(callback).__name__}: of Keras's callbacks a checkpoint holds "
            f"{', '.join(kind.__name__ for kind in _COUNTERS)}, and those of your own that have "
            "state_dict() and load_state_dict()"
        )

    def facts(self) -> dict[str, Any]:
        return {"kind": self._kind}

    def save(self, path: Path) -> None:
        # Before the first fit some are not there.
        counted = {
            name: _plain(getattr(self._callback, name))
            for name in self._counters
            if hasattr(self._callback, name)
        }
        weights = getattr(self._callback, "best_weights", None) or []
        texts = {_COUNTED: counted, _DTYPES: [array.dtype.name for array in weights]}
        with path.open("wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                **{name: np.array(json.dumps(text)) for name, text in texts.items()},
                **{str(i): array for i, array in enumerate(weights)},
            )

    def load(self, content: bytes, facts: Mapping[str, Any]) -> None:
        if facts["kind"] != self._kind:
            raise ValueError(f"it was of class {facts['kind']}, here it is of class {self._kind}")
        with np.load(io.BytesIO(content)) as values:
            state = json.loads(str(values[_COUNTED]))
            dtypes = json.loads(str(values[_DTYPES]))
            if dtypes:
                state["best_weights"] = [
                    as_dtype(dtype, values[str(i)]) for i, dtype in enumerate(dtypes)
                ]
        _set(self._callback, state)
        _set_after_reset(self._callback, state)

    def own(self) -> Arrays:
        return {}

    def load_own(self, arrays: Arrays) -> None:
        pass

    def compared(self) -> tuple[list[Compared], list[Rows]]:
        return [], []

    def end_epoch(self) -> None:
        pass


def _set(callback: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(callback, name, value)


def _set_after_reset(callback: Any, state: Mapping[str, Any]) -> None:
    """Give the callback this state once ``fit`` has reset it, which it does when it begins."""
    begin = callback.on_train_begin

    def on_train_begin(logs: Any = None) -> None:
        callback.on_train_begin = begin
        begin(logs)
        _set(callback, state)

    callback.on_train_begin = on_train_begin


def _plain(value: Any) -> Any:
    """A number as JSON writes it."""
    return value.item() if hasattr(value, "item") else value
