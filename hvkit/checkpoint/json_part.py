"""An object with a small state, beside a Keras model: in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.checkpoint.parts import Arrays, end_epoch_of


class JsonPart:
    """An object with ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name = name
        self.file = f"{name}.json"
        self._thing = thing

    def facts(self) -> dict[str, Any]:
        return {}

    def save(self, path: Path) -> None:
        state = self._thing.state_dict()
        try:
            text = json.dumps(state)
            if json.loads(text) != state:
                raise TypeError("it would not come back the same")
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.name}: beside a Keras model a checkpoint holds states of dicts with str "
                f"keys, lists, str, int, float, bool and None; {type(self._thing).__name__} gives "
                f"another: {error}"
            ) from None
        path.write_text(text + "\n")

    def load(self, content: bytes, facts: Mapping[str, Any]) -> None:
        self._thing.load_state_dict(json.loads(content))

    def own(self) -> Arrays:
        return {}

    def load_own(self, arrays: Arrays) -> None:
        pass

    def compared(self) -> tuple[list[Compared], list[Rows]]:
        return [], []

    def end_epoch(self) -> None:
        end_epoch_of(self._thing)
