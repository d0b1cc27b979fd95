"""The part for PyTorch: models, optimizers, schedulers and any other object with a state dict."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.optim import Optimizer

from hvkit.checkpoint.saved_object import (
    LOCAL,
    NOT_IN_FILE,
    SEED,
    ContentReader,
    Fingerprints,
    Part,
)
from hvkit.communication.encoding import copied_bytes
from hvkit.frameworks.pytorch import buffers
from hvkit.frameworks.pytorch.fingerprints import compared_in
from hvkit.frameworks.pytorch.gradients.reducer import is_averaged
from hvkit.frameworks.pytorch.port import is_distributed_parameter
from hvkit.frameworks.pytorch.refusals import is_divided, is_in_mesh
from hvkit.random_states import Arrays
from hvkit.sync.port import Sharded, ShardedObject, Warmup

# The name of the array with a rank's own steps of the warm-up, in a round of local weights.
_WARMUP = f"{LOCAL}warmup-steps"
# Prefix of the names of arrays with random numbers that some ranks draw together.
_NUMBERS = f"{SEED}numbers-"


class TorchPart(Part):
    """An object whose state ``torch.load`` reads with ``weights_only=True``."""

    suffix = ".pt"

    def __init__(self, name: str, obj: Any) -> None:
        # A model wrapped by torch.compile saves the plain model's names, so that it can load them.
        super().__init__(name, getattr(obj, "_orig_mod", obj))

    @property
    def model(self) -> Any:
        return self.object if isinstance(self.object, torch.nn.Module) else None

    @property
    def _warmup(self) -> Warmup | None:
        """The warm-up of a distributed optimizer, whose steps its state dict does not contain."""
        return self.record.warmup if self.record else None

    @property
    def _sharded(self) -> ShardedObject | None:
        """The object itself, if each rank of a mesh holds a part of it."""
        return self.record.sharded if self.record else None

    def facts(self) -> dict[str, Any]:
        return {"warmup_steps": self._warmup.steps_done if self._warmup else None}

    def save(self, path: Path) -> None:
        state = self.object.state_dict()
        if self.model is not None and any(getattr(t, "is_meta", False) for t in state.values()):
            raise ValueError(
                f"{self.name} has no weights before its first batch, when each rank makes its part "
                "of them: save after that"
            )
        _write(path, self, state)

    @property
    def sharded(self) -> Sharded | None:
        parts = self._sharded
        return parts if parts and parts.is_divided else None

    def load_shards(self, files: Sequence[Path], facts: Mapping[str, Any]) -> None:
        from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import SavedState

        saved, parts = SavedState(files), self._sharded
        if parts is None or not parts.reads_shards:
            self._load_state(saved.plain())
        else:
            if self.model is None:
                self._load_state({"state": {}} | saved.plan["rest"])
            parts.load_shards(saved, functools.partial(self._load_state, whole=False))
        self._load_warmup(facts)

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        self._load_state(_read(content))
        self._load_warmup(facts)

    def _load_warmup(self, facts: Mapping[str, Any]) -> None:
        if warmup := self._warmup:
            # A run without a warm-up, or in one process, counts no steps of it. The warm-up then
            # began with the first step of the training, as in Keras.
            done = facts["warmup_steps"]
            warmup.steps_done = facts["step"] if done is None else done

    def _load_state(self, state: Any, *, whole: bool = True) -> None:
        """Load the object's state, or that of this rank's part of a model or an optimizer."""
        if isinstance(self.object, Optimizer):
            _load_optimizer(self.object, state)
        else:
            self.object.load_state_dict(state, **({} if whole else {"strict": False}))

    def rank_state(self) -> Arrays:
        if not self.is_local:
            found = {name: copied_bytes(buffer) for name, buffer in self._buffers().items()}
            return found | self._numbers()
        parts = self._sharded
        state = self.object.state_dict() if parts is None else parts.rank_state()
        content = io.BytesIO()
        torch.save(_without_numpy_scalars(state), content)
        found = {self._whole(): np.frombuffer(content.getvalue(), np.uint8)}
        if warmup := self._warmup:
            found[_WARMUP] = np.array(warmup.steps_done)
        return found | self._numbers()

    def _whole(self) -> str:
        """The name of the array with a rank's whole state, in a round of local weights."""
        in_file = self.model is None and self._sharded is None
        return f"{LOCAL if in_file else NOT_IN_FILE}state"

    def _numbers(self) -> Arrays:
        """Where random numbers go on that the model keeps apart from the global generators."""
        numbers = self.record.numbers if self.record else None
        return {f"{_NUMBERS}{i}": each for i, each in enumerate(numbers.numbers if numbers else ())}

    def load_rank_state(self, arrays: Arrays) -> None:
        rest = {name: array for name, array in arrays.items() if not name.startswith(_NUMBERS)}
        states = [array for name, array in sorted(arrays.items()) if name not in rest]
        if states and self.record and self.record.numbers:
            self.record.numbers.numbers = states
        if (content := rest.pop(self._whole(), None)) is not None:
            state = _read(content.data)
            if (parts := self._sharded) is None:
                self._load_state(state)
            elif state:  # else the model was not divided yet
                parts.load_rank_state(functools.partial(self._load_state, state, whole=False))
        if (steps := rest.pop(_WARMUP, None)) is not None and (warmup := self._warmup):
            warmup.steps_done = int(steps)
        buffers = self._buffers()
        for name, array in rest.items():
            buffer = buffers[name]
            value = torch.from_numpy(array.copy()).view(buffer.dtype).view(buffer.shape)
            with torch.no_grad():
                buffer.copy_(value)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The dense buffers in the state dict, such as batch-norm statistics."""
        if self.model is None or self._in_mesh:  # there the file has the buffers of all ranks
            return {}
        return {
            f"{prefix}{'.' * bool(prefix)}{name}": buffer
            for prefix, module in self.object.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.layout is torch.strided
        }

    @property
    def _in_mesh(self) -> bool:
        if self.model is not None:
            return any(map(is_in_mesh, self.model.parameters()))
        groups = self.object.param_groups if isinstance(self.object, Optimizer) else []
        return any(is_in_mesh(p) for group in groups for p in group["params"])

    def compared(self) -> Fingerprints:
        # Ranks with the same part compare it in training.
        return ([], []) if self._in_mesh else compared_in(self.object, is_averaged)

    def may_differ(self) -> Fingerprints:
        if self.model is None or self._in_mesh:
            return [], []
        return buffers.compared_in(self.model, is_distributed_parameter)


def _write(path: Path, part: Part, state: Any) -> None:
    """Write a state, or this rank's shard of it, for ``torch.load`` with ``weights_only=True``."""
    with path.open("wb") as file:
        torch.save(_without_numpy_scalars(state), file)
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            f"{part.name}: torch.load with weights_only=True cannot read the state of "
            f"{type(part.object).__name__}; use only tensors, numbers, text, None, and dicts "
            f"and lists of them: {error}"
        ) from None


def write_shard(path: Path, part: Part, *, first: bool) -> bool:
    """Write this rank's shard of an object, or of a strategy; return whether there is any.

    The ``first`` rank adds what belongs to no rank's shard.
    """
    assert part.sharded is not None
    state = part.sharded.shards()
    if state or first:
        _write(path, part, {"plan": part.sharded.plan() if first else None, "state": state})
    return bool(state or first)


def _read(content: memoryview) -> Any:
    file = cast(IO[bytes], ContentReader(content))
    return torch.load(file, map_location="cpu", weights_only=True)


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    rates = [group.get("lr") for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, before in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(before, torch.Tensor) and isinstance(group.get("lr"), torch.Tensor):
            group["lr"] = group["lr"].to(before.device)
    _keep_dtypes(optimizer, state["state"])


def _keep_dtypes(optimizer: Optimizer, saved: Mapping[int, Any]) -> None:
    """Undo PyTorch's cast of the state to the parameter's dtype, which may have fewer bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in saved.items():
        if not isinstance(i, int) or not isinstance(values, dict):
            continue
        loaded = optimizer.state.get(parameters[i], {})
        for key, value in values.items():
            cast = loaded.get(key)  # None if another rank owns this part of the state
            if isinstance(value, torch.Tensor) and cast is not None and cast.dtype != value.dtype:
                loaded[key] = _like(value, cast)


def _like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value on the device of this tensor, and divided like it."""
    if not is_divided(like):
        return value.to(like.device)
    from hvkit.frameworks.pytorch.model_parallel.slices import divided_like

    return divided_like(value, like)


def _without_numpy_scalars(state: Any) -> Any:
    """The state with NumPy numbers as Python numbers: a scheduler may have been given one."""
    if isinstance(state, np.generic):
        return state.item()
    if type(state) is dict:
        return {key: _without_numpy_scalars(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_numpy_scalars(value) for value in state)
    return state
