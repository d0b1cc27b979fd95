"""The parts of a checkpoint: what is saved under which name, and by which framework's means."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvkit.adapters.adapter import framework_of
from hvkit.adapters.fingerprints import Compared, Rows

Arrays = dict[str, np.ndarray[Any, Any]]

# Files of the checkpoint that are no part's.
_RESERVED = {"manifest", "ranks"}


class Part(Protocol):
    """One object that is saved into one file."""

    name: str
    file: str
    """The file's name in the checkpoint's folder."""

    def facts(self) -> dict[str, Any]:
        """What loading has to know beside the file; JSON holds it."""

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            TypeError, ValueError: the object cannot be saved; says why.
        """

    def load(self, content: bytes, facts: Mapping[str, Any]) -> None:
        """Load the file's content.

        Raises:
            Exception: the content does not fit the object.
        """

    def own(self) -> Arrays:
        """What may differ between ranks: statistics of layers, seeds."""

    def load_own(self, arrays: Arrays) -> None:
        """Put back what :meth:`own` gave."""

    def compared(self) -> tuple[list[Compared], list[Rows]]:
        """What all ranks must hold alike of it, and its fingerprints."""

    def end_epoch(self) -> None:
        """The epoch is over, also where data has not come to its end."""


def parts_of(given: Mapping[str, Any]) -> list[Part]:
    """The parts for what was passed to ``Checkpoint``, models first.

    Raises:
        TypeError: an object is of no kind that can be saved.
        ValueError: there are none, or a name cannot be a file's.
    """
    named = dict(_named(given))
    if not named:
        raise ValueError("nothing to save: pass at least model=... and optimizer=...")
    for name in named:
        if name in _RESERVED or not name.replace("-", "_").isidentifier():
            raise ValueError(
                f"part {name!r} cannot be named so: names are Python identifiers other than "
                f"{', '.join(sorted(_RESERVED))}"
            )
    models = {name: each for name, each in named.items() if framework_of(each) is not None}
    rest = {name: each for name, each in named.items() if name not in models}
    return [_part(name, each, list(models.values())) for name, each in (models | rest).items()]


def _named(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists and dicts of objects taken apart: ``optimizer-0``, ``model-generator``."""
    for name, thing in given.items():
        if _has_state(thing):
            yield name, thing
        elif isinstance(thing, Mapping):
            yield from ((f"{name}-{key}", each) for key, each in thing.items())
        elif isinstance(thing, list | tuple):
            yield from ((f"{name}-{i}", each) for i, each in enumerate(thing))
        else:
            yield name, thing


def _part(name: str, thing: Any, models: list[Any]) -> Part:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(thing, keras.Model | keras.optimizers.Optimizer):
        from hvkit.checkpoint.keras_model import ModelPart
        from hvkit.checkpoint.keras_optimizer import OptimizerPart

        if isinstance(thing, keras.Model):
            return ModelPart(name, thing)
        return OptimizerPart(name, thing, models)
    if keras is not None and isinstance(thing, keras.callbacks.Callback) and not _has_state(thing):
        from hvkit.checkpoint.keras_callback import CallbackPart

        return CallbackPart(name, thing)
    if not _has_state(thing):
        raise TypeError(
            f"{name} is of type {type(thing).__module__}.{type(thing).__qualname__}, which a "
            "checkpoint cannot hold: it takes PyTorch and Keras models and optimizers, objects "
            "with state_dict() and load_state_dict(), and lists and dicts of these; numbers and "
            "text go into save(..., extras={...})"
        )
    in_keras = any(framework_of(model) == "tensorflow" for model in models)
    if "torch" in sys.modules and not in_keras:
        from hvkit.checkpoint.pytorch_part import TorchPart

        return TorchPart(name, thing)
    from hvkit.checkpoint.json_part import JsonPart

    return JsonPart(name, thing)


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, each, None)) for each in ("state_dict", "load_state_dict"))


def end_epoch_of(thing: Any) -> None:
    """Tell data that a loop has left before its end, if this is such data."""
    if callable(end := getattr(thing, "end_epoch", None)):
        end()
