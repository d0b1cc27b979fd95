"""Which part saves which object; and the parts for small states and for what strategies keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.checkpoint.saved_object import NOT_IN_FILE, ContentReader, Part, write_arrays
from hvkit.log import logger
from hvkit.monitor.monitor import Monitor
from hvkit.random_states import Arrays
from hvkit.registry import JAX, KERAS_ON_TENSORFLOW, framework_of
from hvkit.sync.port import Sharded, ShardedSync, Sync, syncs_of

# Every checkpoint has files manifest.json and ranks.npz, and the latter an entry "random".
_RESERVED = ("manifest", "random", "ranks")


def parts_for(given: Mapping[str, Any]) -> list[Part]:
    """The parts for the objects that were passed to ``Checkpoint``, models first."""
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


def part_for(name: str, obj: Any, models: list[Any]) -> Part:
    if isinstance(obj, Monitor):
        return MonitorPart(name, obj)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(obj, keras.Model):
        from hvkit.checkpoint.keras import ModelPart

        return ModelPart(name, obj)
    if keras is not None and isinstance(obj, keras.optimizers.Optimizer):
        from hvkit.checkpoint.keras import OptimizerPart

        return OptimizerPart(name, obj, models)
    if _has_state(obj):
        if "torch" not in sys.modules or KERAS_ON_TENSORFLOW in map(framework_of, models):
            return JsonPart(name, obj)
        from hvkit.checkpoint.pytorch import TorchPart

        return TorchPart(name, obj)
    if keras is not None and isinstance(obj, keras.callbacks.Callback):
        from hvkit.checkpoint.keras import CallbackPart

        return CallbackPart(name, obj)
    if "jax" in sys.modules:
        from hvkit.frameworks.jax.trees import is_nnx

        if is_nnx(obj) or isinstance(obj, SimpleNamespace):
            from hvkit.checkpoint.jax import ArraysPart

            return ArraysPart(name, obj)
    if framework_of(obj) is JAX:
        raise TypeError(
            f"{name} is a pytree ({type(obj).__name__}), which steps replace and restore() "
            "cannot set: hold it in an object that your loop updates, run = "
            "types.SimpleNamespace(params=params, opt_state=opt_state), and pass run=run"
        )
    raise TypeError(
        f"{name} is of type {type(obj).__module__}.{type(obj).__qualname__}, which a checkpoint "
        "cannot save: it takes models and optimizers of PyTorch, Keras and Flax NNX, objects with "
        "state_dict() and load_state_dict(), lists and dicts of these, and a "
        "types.SimpleNamespace of JAX's pytrees; pass numbers and text to save(..., extras={...})"
    )


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, each, None)) for each in ("state_dict", "load_state_dict"))


class JsonPart(Part):
    """An object with ``state_dict()`` and ``load_state_dict()``, next to a Keras model."""

    suffix = ".json"

    def save(self, path: Path) -> None:
        state = self.object.state_dict()
        try:
            text = json.dumps(state)
            if json.loads(text) != state:
                raise TypeError("JSON would change it")
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.name}: next to a Keras model, a state may hold dicts with str keys, lists, "
                f"str, int, float, bool and None; {type(self.object).__name__}.state_dict() "
                f"returned something else: {error}"
            ) from None
        path.write_text(text + "\n")

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        self.object.load_state_dict(json.loads(bytes(content)))


class MonitorPart(JsonPart):
    """A ``hvkit.Monitor``, which may be added or left out when a run resumes."""

    optional = True

    def begin_after(self, step: int) -> None:
        self.object.load_state_dict({"step": step})


class StrategyPart(Part):
    """The state that a strategy and a compression keep for a model, in a plain ``.npz`` file."""

    suffix = ".npz"
    optional = True

    def __init__(self, model: str, sync: Sync, sharded: ShardedSync | None) -> None:
        super().__init__(f"{model}-strategy", sync)
        self.sync = sync
        self._sharded = sharded
        self._identity = {name: repr(getattr(sync, name)) for name in ("strategy", "compression")}
        self.in_round = True
        """Whether ``load`` continues the saved round, with each rank's local weights."""

    def facts(self) -> dict[str, Any]:
        divided = self._sharded
        where = {"mesh": divided.mesh, "layout": divided.layout} if divided else {}
        return self._identity | where

    def gathered(self) -> AbstractContextManager[None]:
        return self._sharded.gathered() if self._sharded else nullcontext()

    def rank_state(self) -> Arrays:
        return {f"{NOT_IN_FILE}{n}": array for n, array in self.sync.rank_state().items()}

    def load_rank_state(self, arrays: Arrays) -> None:
        self.sync.load_rank_state({n.removeprefix(NOT_IN_FILE): a for n, a in arrays.items()})

    def may_go_on(self, facts: Mapping[str, Any]) -> bool:
        """Whether as many ranks as saved, in the same mesh, can go on in the saved round."""
        mesh = self._sharded.mesh if self._sharded else None
        return facts.items() >= self._identity.items() and facts.get("mesh") == mesh

    def save(self, path: Path) -> None:
        write_arrays(path, self.sync.state())

    @property
    def sharded(self) -> Sharded | None:
        return self._sharded if self._sharded and self._sharded.is_divided else None

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        if self._begins_with(facts):
            with np.load(ContentReader(content)) as values:
                arrays = {name: values[name] for name in values.files}
            self.sync.load_state(arrays, in_round=self.in_round)

    def load_shards(self, files: Sequence[Path], facts: Mapping[str, Any]) -> None:
        from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import SavedState

        if not self._begins_with(facts):
            return
        saved = SavedState(files)
        if self._sharded:
            self._sharded.load_shards(saved, in_round=self.in_round)
        else:
            self.sync.load_state(saved.plain(), in_round=self.in_round)

    def _begins_with(self, facts: Mapping[str, Any]) -> bool:
        if not facts.items() >= self._identity.items():
            self.start_over(f"saved with {facts['strategy']}, compression {facts['compression']}")
            return False
        if not self.in_round:
            self._log("begins a new round: other ranks or mesh, or another model's strategy")
        if self._sharded:
            self._sharded.saved_layout = facts.get("layout")
        return True

    def start_over(self, reason: str) -> None:
        """Begin with the weights that all ranks have loaded."""
        self.sync.start_over()
        self._log(f"begins anew with the loaded weights: {reason}")

    def _log(self, text: str) -> None:
        if runtime.rank() == 0:
            logger.info("%s, compression %s, %s", *self._identity.values(), text)


def parts_of_strategies(parts: Sequence[Part]) -> list[StrategyPart]:
    """A part for each sync of the models; also sets ``is_local`` of the given parts."""
    models = {part: syncs_of(part.model) for part in parts if part.model is not None}
    # Once each: several parts may be parts of one distributed model.
    names = {
        sync: part.name + (f"-{number}" if number else "")
        for part, syncs in reversed(models.items())
        for number, sync in enumerate(syncs)
    }
    for part in parts:
        if part.model is None and part.record:
            part.is_local = part.record.local
        else:  # a scheduler, for example, is local if any of the models is
            part.is_local = any(sync.local for sync in models.get(part, names))
    sharded = {
        sync: part.record.sharded_sync if part.record else None
        for part, syncs in models.items()
        for sync in syncs
    }
    return [StrategyPart(name, sync, sharded[sync]) for sync, name in names.items()]
