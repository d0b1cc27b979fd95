"""Which part saves which object, by its framework and what it can do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from hvkit.checkpoint.saved_object import JsonPart, MonitorPart, Part
from hvkit.monitor.monitor import Monitor
from hvkit.registry import JAX, KERAS_ON_TENSORFLOW, framework_of

# Every checkpoint has files manifest.json and ranks.npz, and the latter an entry "random".
_RESERVED = ("manifest", "random", "ranks")


def parts_of(given: Mapping[str, Any]) -> list[Part]:
    """The parts for the objects that were passed to ``Checkpoint``, models first.

    Raises:
        TypeError: an object is of a kind that cannot be saved.
        ValueError: there is no object, or a name cannot be a file's.
    """
    named = dict(_named(given))
    if not named:
        raise ValueError("nothing to save: pass at least model=... and optimizer=...")
    for name in named:
        if name in _RESERVED or not name.replace("-", "_").isidentifier():
            raise ValueError(
                f"{name!r} cannot be the name of a part: use a Python identifier other than "
                f"{', '.join(_RESERVED)}"
            )
    models = {name: each for name, each in named.items() if framework_of(each) not in (None, JAX)}
    rest = {name: each for name, each in named.items() if name not in models}
    return [part_for(name, each, list(models.values())) for name, each in (models | rest).items()]


def _named(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every object with its name; those in lists and dicts as ``optimizer-0``, ``model-critic``."""
    for name, thing in given.items():
        if _has_state(thing) or framework_of(thing) is JAX:
            yield name, thing
        elif isinstance(thing, Mapping):
            yield from ((f"{name}-{key}", each) for key, each in thing.items())
        elif isinstance(thing, list | tuple):
            yield from ((f"{name}-{i}", each) for i, each in enumerate(thing))
        else:
            yield name, thing


def part_for(name: str, thing: Any, models: list[Any]) -> Part:
    """The part that saves this object, from the module of its framework."""
    if isinstance(thing, Monitor):
        return MonitorPart(name, thing)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(thing, keras.Model | keras.optimizers.Optimizer):
        from hvkit.checkpoint.keras import ModelPart, OptimizerPart

        if isinstance(thing, keras.Model):
            return ModelPart(name, thing)
        return OptimizerPart(name, thing, models)
    if keras is not None and isinstance(thing, keras.callbacks.Callback) and not _has_state(thing):
        from hvkit.checkpoint.keras import CallbackPart

        return CallbackPart(name, thing)
    if "jax" in sys.modules and not _has_state(thing):
        from hvkit.frameworks.jax.arrays import is_nnx

        if is_nnx(thing) or isinstance(thing, SimpleNamespace):
            from hvkit.checkpoint.jax import ArraysPart

            return ArraysPart(name, thing)
        if framework_of(thing) is JAX:
            raise TypeError(
                f"{name} is a pytree ({type(thing).__name__}), which steps replace and restore() "
                "cannot set: hold it in an object that your loop updates, run = "
                "types.SimpleNamespace(params=params, opt_state=opt_state), and pass run=run"
            )
    if not _has_state(thing):
        raise TypeError(
            f"{name} is of type {type(thing).__module__}.{type(thing).__qualname__}, which a "
            "checkpoint cannot save: it takes models and optimizers of PyTorch, Keras and Flax "
            "NNX, objects with state_dict() and load_state_dict(), lists and dicts of these, and a "
            "types.SimpleNamespace of JAX's pytrees; pass numbers and text to save(..., "
            "extras={...})"
        )
    on_tensorflow = any(framework_of(model) is KERAS_ON_TENSORFLOW for model in models)
    if "torch" in sys.modules and not on_tensorflow:
        from hvkit.checkpoint.pytorch import TorchPart

        return TorchPart(name, thing)
    return JsonPart(name, thing)


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, each, None)) for each in ("state_dict", "load_state_dict"))
