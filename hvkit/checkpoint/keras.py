"""The parts for Keras: models, optimizers, and the callbacks that watch a metric."""

from __future__ import annotations

import json
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvkit.checkpoint.saved_object import (
    LOCAL,
    NOT_IN_FILE,
    SEED,
    ContentReader,
    Fingerprints,
    Part,
    write_arrays,
)
from hvkit.frameworks.keras import buffers
from hvkit.frameworks.keras.backends import backend_variable, numpy_dtype, outside_graphs
from hvkit.frameworks.keras.checks import compared_in
from hvkit.frameworks.keras.divided_state import gathered, unfolded
from hvkit.frameworks.keras.initial_state import has_weights
from hvkit.frameworks.keras.optimizers import inner_optimizer, parts_of, ranks_of_scale
from hvkit.random_states import Arrays
from hvkit.sync.port import Record, record_of

# By class of callback: the attributes to save.
_COUNTERS: Mapping[type[Any], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best",),
}
# Keys in the file, in addition to EarlyStopping's best weights: counters, and the weights' dtypes.
_COUNTED = "counted"
_DTYPES = "dtypes"


class _VariablesPart(Part):
    """An object of whose variables each rank saves some."""

    @abstractmethod
    def _variables(self, *, local: bool) -> dict[str, Any]:
        """The variables that differ between ranks: in local rounds, or with any strategy."""

    def rank_state(self) -> Arrays:
        own = self._variables(local=self.is_local)
        return {name: np.array(v.numpy()) for name, v in own.items()}

    def load_rank_state(self, arrays: Arrays) -> None:
        # The run that saved them may have had another strategy, with other variables.
        variables = self._variables(local=True) | self._variables(local=False)
        for name in arrays.keys() & variables.keys():
            variables[name].assign(_as_dtype(variables[name].dtype, arrays[name]))


class ModelPart(_VariablesPart):
    """A model, in a file for ``model.load_weights``."""

    suffix = ".weights.h5"

    @property
    def model(self) -> Any:
        return self.object

    def facts(self) -> dict[str, Any]:
        self._check_built()
        return {"shapes": _shapes_of(self.model.weights)}

    def save(self, path: Path) -> None:
        self._check_built()
        with _without_optimizer(self.model):
            self.model.save_weights(path)

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        self._check_built()
        _require_shapes("weights", facts["shapes"], _shapes_of(self.model.weights))
        # The file holds rank 0's seeds: keep this rank's own.
        seeds = {name: v.numpy() for name, v in self._seeds().items()}
        with tempfile.TemporaryDirectory() as folder, _without_optimizer(self.model):
            path = Path(folder, self.file)
            path.write_bytes(content)
            self.model.load_weights(path)
        self.load_rank_state(seeds)

    @property
    def _is_divided(self) -> bool:
        """Whether each rank holds the layers of its stage of a pipeline."""
        return self.record is not None and self.record.gathered is not None

    def _variables(self, *, local: bool) -> dict[str, Any]:
        self._check_built()
        if self._is_divided:  # the file has what forward passes learn, from the ranks that hold it
            return self._seeds()
        if local:
            own = {f"{NOT_IN_FILE}weight-{i}": w for i, w in enumerate(self.model.weights)}
        else:
            own = {f"weight-{i}": w for i, w in enumerate(self.model.non_trainable_weights)}
        return own | self._seeds()

    def _seeds(self) -> dict[str, Any]:
        """The states of the seed generators of all layers."""
        others = {id(v) for v in (*self.model.weights, *self.model.metrics_variables)}
        seeds = [v for v in self.model.variables if id(v) not in others]
        return {f"{SEED}{i}": v for i, v in enumerate(seeds)}

    def compared(self) -> Fingerprints:
        return compared_in(self.model)

    def may_differ(self) -> Fingerprints:
        return ([], []) if self._is_divided else buffers.compared_in(self.model)

    def _check_built(self) -> None:
        if not has_weights(self.model):
            raise ValueError(
                f"{self.name}: Keras model {self.model.name!r} has no weights yet: build it first, "
                "with model.build(input_shape), a keras.Input as first layer, or a call on a batch"
            )
        if not self.model.built:
            raise ValueError(
                f"{self.name}: Keras model {self.model.name!r} only wraps other models and cannot "
                "save its weights itself: pass the models inside it, each under its own name, as "
                "in Checkpoint(folder, generator=generator, critic=critic, ...)"
            )


@contextmanager
def _without_optimizer(model: Any) -> Iterator[None]:
    """Hide a compiled model's optimizer: Keras would write it into the weights file too."""
    attributes = vars(model)
    optimizer = attributes.pop("optimizer", None)
    try:
        with warnings.catch_warnings():
            # Keras warns when a model was compiled and the file's model was not.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            yield
    finally:
        if optimizer is not None:
            attributes["optimizer"] = optimizer


class OptimizerPart(_VariablesPart):
    """An optimizer, which may update weights of ``models``: its variables, in their order."""

    suffix = ".npz"

    def __init__(self, name: str, optimizer: Any, models: Sequence[Any]) -> None:
        super().__init__(name, optimizer)
        self.optimizer = optimizer
        self._models = models

    @property
    def record(self) -> Record | None:
        return super().record or record_of(inner_optimizer(self.optimizer))

    def facts(self) -> dict[str, Any]:
        self._check_not_wrapped()
        weights = [id(w) for w in map(backend_variable, self._weights())]
        trained = None
        if self.optimizer.built:
            updated = map(backend_variable, inner_optimizer(self.optimizer)._trainable_variables)
            trained = [weights.index(id(v)) if id(v) in weights else None for v in updated]
        return {
            "trained": trained,
            "shapes": _shapes_of(self.optimizer.variables),
            "ranks_of_scale": ranks_of_scale(self.optimizer),
        }

    def save(self, path: Path) -> None:
        write_arrays(path, {str(i): v.numpy() for i, v in enumerate(self.optimizer.variables)})

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        self._check_not_wrapped()
        with outside_graphs():
            self._build(facts["trained"])
        with outside_graphs(), unfolded(self.optimizer):
            variables = self.optimizer.variables
            _require_shapes("variables", facts["shapes"], _shapes_of(variables))
            with np.load(ContentReader(content)) as values:
                for i, variable in enumerate(variables):
                    variable.assign(_as_dtype(variable.dtype, values[str(i)]))
            now = ranks_of_scale(self.optimizer)
            if (saved := facts.get("ranks_of_scale", now)) != now and self.optimizer.built:
                scale = self.optimizer.dynamic_scale
                scale.assign(scale * (saved / now))

    def _build(self, trained: Sequence[int | None] | None) -> None:
        """Create the variables, for the weights that the saved optimizer updated."""
        if self.optimizer.built or trained is None:
            return
        weights = self._weights()
        if any(i is None or i >= len(weights) for i in trained):
            raise ValueError(
                "it updates variables that are not weights of the checkpoint's models: build it "
                "before restore(), with optimizer.build(variables)"
            )
        self.optimizer.build([weights[i] for i in trained if i is not None])

    def gathered(self) -> AbstractContextManager[None]:
        return gathered(self.optimizer)

    def _variables(self, *, local: bool) -> dict[str, Any]:
        """In no round, the gradients accumulated since the last update, not averaged yet."""
        if local:
            return {f"{LOCAL}variable-{i}": v for i, v in enumerate(self.optimizer.variables)}
        found = [
            variable
            for part in parts_of(inner_optimizer(self.optimizer))
            if part.built and part.gradient_accumulation_steps
            for variable in part._accumulated_gradients
        ]
        return {f"accumulator-{i}": v for i, v in enumerate(found)}

    def compared(self) -> Fingerprints:
        return compared_in(self.optimizer)

    def _weights(self) -> list[Any]:
        return [w for model in self._models for w in getattr(model, "weights", ())]

    def _check_not_wrapped(self) -> None:
        """Reject an optimizer that a model wraps, as ``compile`` does under ``mixed_float16``.

        The wrapper has a state of its own.
        """
        for model in self._models:
            used = getattr(model, "optimizer", None)
            if used is not self.optimizer and inner_optimizer(used) is self.optimizer:
                raise ValueError(
                    f"model {model.name!r} trains with a {type(used).__name__} around this "
                    f"{type(self.optimizer).__name__}: pass model.optimizer to Checkpoint, after "
                    "compile()"
                )


class CallbackPart(Part):
    """The counters of a callback that watches a metric; ``fit`` resets them when it begins."""

    suffix = ".npz"

    def __init__(self, name: str, callback: Any) -> None:
        super().__init__(name, callback)
        for kind, counters in _COUNTERS.items():
            if isinstance(callback, kind):
                self._kind, self._counters = kind.__name__, counters
                return
        raise TypeError(
            f"{name} is a {type(callback).__name__}: a checkpoint saves only these callbacks: "
            f"{', '.join(kind.__name__ for kind in _COUNTERS)}, and your own with "
            "state_dict() and load_state_dict()"
        )

    def facts(self) -> dict[str, Any]:
        return {"kind": self._kind}

    def save(self, path: Path) -> None:
        # Some counters do not exist before the first fit.
        counted = {
            name: _plain(getattr(self.object, name))
            for name in self._counters
            if hasattr(self.object, name)
        }
        weights = getattr(self.object, "best_weights", None) or []
        if weights and getattr(self.object.model, "is_in_parts", False):
            raise ValueError(
                f"{self.name}: {self._kind} keeps on each rank the best weights of its stage of a "
                "pipeline, which a checkpoint cannot save: leave it out of the checkpoint, or pass "
                "restore_best_weights=False"
            )
        texts = {_COUNTED: counted, _DTYPES: [array.dtype.name for array in weights]}
        arrays = {name: np.array(json.dumps(text)) for name, text in texts.items()}
        write_arrays(path, {**arrays, **{str(i): array for i, array in enumerate(weights)}})

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        if facts["kind"] != self._kind:
            raise ValueError(f"it was of class {facts['kind']}, here it is of class {self._kind}")
        with np.load(ContentReader(content)) as values:
            state = json.loads(str(values[_COUNTED]))
            dtypes = json.loads(str(values[_DTYPES]))
            if dtypes:
                state["best_weights"] = [
                    _as_dtype(dtype, values[str(i)]) for i, dtype in enumerate(dtypes)
                ]
        _set(self.object, state)
        _set_after(self.object, "on_train_begin", state)  # with which ``fit`` resets it
        if "best" in state and getattr(self.object, "monitor_op", self) is None:
            # EarlyStopping of Keras before 3.7 resets this at the end of its first epoch.
            _set_after(self.object, "_set_monitor_op", {"best": state["best"]})


def _set(callback: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(callback, name, value)


def _set_after(callback: Any, method: str, state: Mapping[str, Any]) -> None:
    """Set the callback's state again after the next call of a method that resets it."""
    reset = getattr(callback, method)

    def reset_and_set(*args: Any, **kwargs: Any) -> None:
        setattr(callback, method, reset)
        reset(*args, **kwargs)
        _set(callback, state)

    setattr(callback, method, reset_and_set)


def _plain(value: Any) -> Any:
    """A NumPy number as a Python number, for JSON."""
    return value.item() if hasattr(value, "item") else value


def _shapes_of(variables: Sequence[Any]) -> list[list[int]]:
    return [list(v.shape) for v in variables]


def _require_shapes(what: str, saved: list[list[int]], shapes: list[list[int]]) -> None:
    for i, (in_file, here) in enumerate(zip(saved, shapes, strict=False)):
        if in_file != here:
            raise ValueError(f"{what}[{i}] has shape {in_file} in the file and {here} here")
    if len(saved) != len(shapes):
        raise ValueError(f"the file has {len(saved)} {what}, there are {len(shapes)} here")


def _as_dtype(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in the dtype of this name: a file holds bfloat16 as plain bytes."""
    dtype = numpy_dtype(name)
    return array.view(dtype) if array.dtype.kind == "V" else array
