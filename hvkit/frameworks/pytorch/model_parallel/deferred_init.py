"""Records how a model is built that fits no rank: ``hvkit.deferred_init``.

Each rank then makes its own part (``init_recording.py``), with the same bits as one process with
the same random state. The method is that of torchdistX's ``deferred_init``, which PyTorch no longer
maintains, on PyTorch's dispatch modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hvkit.frameworks.pytorch.model_parallel.init_recording import (
    Call,
    InitRecording,
    ScriptTensor,
    View,
    set_tag,
    tag_of,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in, version_of

_META, _CPU = torch.device("meta"), torch.device("cpu")
_aten = torch.ops.aten
# They fill a tensor without reading it.
_FILLS = {
    *(_aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_),
    *(_aten.cauchy_, _aten.geometric_, _aten.zero_, _aten.fill_, _aten.copy_),
    _aten.bernoulli_.float,
}
# They draw as many numbers as the first tensor has, without reading it.
_DRAWN_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.bernoulli.p}
_ATTRIBUTES: dict[Any, Any] = {
    vars(torch._C.TensorBase)["device"].__get__: _CPU,
    vars(torch._C.TensorBase)["is_cpu"].__get__: True,
    vars(torch._C.TensorBase)["is_meta"].__get__: False,
}
_READS_VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_COPIED_BYTES = 1 << 20
_in_block = False


@contextmanager
def deferred_init() -> Iterator[None]:
    """The block of ``hvkit.deferred_init``."""
    global _in_block
    if _in_block:  # a part of the model defers itself
        yield
        return
    start, recording = torch.get_rng_state(), InitRecording()
    recorder = _Recorder(recording)
    _in_block = True
    try:
        with recorder, _LooksReal(recorder), _recorded_whole(recorder):
            yield
        recording.finish()
    except BaseException:
        torch.set_rng_state(start)
        raise
    finally:
        _in_block = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs calls on the meta device and records them."""

    def __init__(self, recording: InitRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._storages = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        deferred = any(t.is_meta for t in tensors)
        random = torch.Tag.nondeterministic_seeded in func.tags
        makes = not tensors and "device" in _arguments(func)
        if func is _aten.lift_fresh.default and not deferred and tensors[0].numel():
            # torch.tensor([1.0]): on meta like all others, so that they can be used together.
            func = _aten.clone.default
        # The storage of a tensor shows what Tensor.set_ has done.
        elif not (deferred or random or makes) or func.overloadpacket is _aten.set_:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if random and not deferred and any(t.numel() == 0 for t in written):
            return func(*args, **kwargs)
        _refuse(func, args, kwargs, makes=makes, written=written)
        arguments, named = tree_map_only(torch.Tensor, self._argument, (args, kwargs))
        on_meta, named_on_meta = tree_map_only(torch.Tensor, lambda t: t.to(_META), (args, kwargs))
        if makes or kwargs.get("device") is not None:
            named, named_on_meta = {**named, "device": _CPU}, {**named_on_meta, "device": _META}
        try:
            result = func(*on_meta, **named_on_meta)
        except RuntimeError as error:
            missing = isinstance(error, NotImplementedError)
            if missing and (random or written):
                raise ValueError(
                    f"{_name(func)} does not work on PyTorch's meta device, so that "
                    "hvkit.deferred_init() cannot record it: use another function, or call it "
                    "before the block"
                ) from error
            if not missing and torch.Tag.data_dependent_output not in func.tags:
                raise
            args, kwargs = self.computed((args, kwargs), _name(func))
            return func(*args, **kwargs)
        # Empty tensors cost nothing, and torch.load lets them take over a storage of its file.
        if makes and all(t.numel() == 0 for t in tensors_in(result)):
            return func(*args, **kwargs)
        call = Call(func, arguments, named, state=torch.get_rng_state() if random else None)
        self._record(call, args, written, tensors_in(result))
        return result

    def _record(
        self,
        call: Call,
        args: tuple[Any, ...],
        written: list[torch.Tensor],
        returned: list[torch.Tensor],
    ) -> None:
        """Add a call, but for views, with what it reads and writes; it has run on meta."""
        views = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, View)]
        call.reads = frozenset(view.storage for view in views)
        names = {call.function, cast(Any, call.function).overloadpacket}
        if not names.isdisjoint(_FILLS):
            call.fills, call.reads = _filled(args[0], views)
        elif not names.isdisjoint(_DRAWN_LIKE) and views and call.args[0] is views[0]:
            # Memory of the same shape takes its place.
            like = replace(views[0], storage=self._storages, offset=0)
            self._storages += 1
            call.args, call.fills = (like, *call.args[1:]), {like.storage: like.bytes}
            call.reads = frozenset(view.storage for view in views[1:])
        new = self._number_new(call.function, returned)
        call.writes = frozenset([*new, *call.fills, *map(self._storage_of, written)])
        if call.writes:
            call.outputs = [View.of(t, self._storage_of(t)) for t in returned]
            self._recording.add(call)

    def computed(self, values: Any, operation: str) -> Any:
        """Nested values with computed tensors in place of deferred ones."""

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return tensor
            return self._recording.values(View.of(tensor, self._storage_of(tensor)), operation)

        return tree_map_only(torch.Tensor, real, values)

    def record_fill(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a Python function that fills a deferred tensor with random numbers."""
        with torch._C.DisableTorchFunction():
            view = View.of(target, self._storage_of(target))
            fills, reads = _filled(target, [view])
        call = Call(func, (view, *args), kwargs, torch.get_rng_state(), [view], reads)
        call.fills, call.writes = fills, frozenset(fills)
        self._recording.add(call)

    def _argument(self, tensor: torch.Tensor) -> View | ScriptTensor:
        if tensor.is_meta:
            return View.of(tensor, self._storage_of(tensor))
        # A script may fill the same small tensor again and again.
        small = tensor.numel() * tensor.element_size() <= _COPIED_BYTES
        kept = tensor.detach().clone() if small else tensor
        return ScriptTensor(kept, version_of(kept))

    def _storage_of(self, tensor: torch.Tensor) -> int:
        tag = tag_of(tensor)
        if tag is None or tag[0] is not self._recording:
            raise ValueError(
                f"hvkit.deferred_init() got a tensor of shape {tuple(tensor.shape)} on the meta "
                "device that was not made in this block: make the whole model in one block"
            )
        return tag[1]

    def _number_new(self, func: Any, tensors: Sequence[torch.Tensor]) -> list[int]:
        new = []
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise ValueError(
                    f"{_name(func)} makes a tensor of layout {tensor.layout}, but "
                    "hvkit.deferred_init() takes dense ones: make it before the block"
                )
            if tag_of(tensor) is None:
                set_tag(tensor, self._recording, self._storages)
                new.append(self._storages)
                self._storages += 1
        return new


class _LooksReal(TorchFunctionMode):
    """Makes deferred tensors claim to be on the CPU, as they would be without the block.

    ``nn.init.orthogonal_`` and others do nothing to tensors on the meta device. Some functions read
    values past PyTorch's dispatcher: they get computed tensors.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTRIBUTES and tag_of(args[0]):
            return _ATTRIBUTES[func]
        if func in _READS_VALUES or (func is torch.tensor and _lists_deferred(args)):
            with _disable_current_modes():
                args = self._recorder.computed(args, f"torch's {func.__name__}")
        return func(*args, **kwargs)


@contextmanager
def _recorded_whole(recorder: _Recorder) -> Iterator[None]:
    """Record ``nn.init.trunc_normal_`` as one call.

    It draws again until no number is out of bounds: its operations depend on random values.
    """
    plain = nn.init._no_grad_trunc_normal_

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
        with torch._C.DisableTorchFunction():
            deferred = tag_of(tensor) is not None
        if own or not deferred:
            return plain(tensor, *args, **kwargs)
        recorder.record_fill(plain, tensor, args, kwargs)
        return tensor

    nn.init._no_grad_trunc_normal_ = fill
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = plain


def keep_loads(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Keep the state dicts that a script loads into a deferred model; return what loads them."""
    of_model: list[tuple[dict[str, Any], bool]] = []
    states: dict[Optimizer, dict[str, Any]] = {}

    def keep(state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
        """Replaces ``load_state_dict``, which would copy values into tensors without memory."""
        own = model.state_dict().keys()
        missing, unexpected = sorted(own - state_dict.keys()), sorted(state_dict.keys() - own)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model).__name__}: missing keys "
                f"{missing}, unexpected keys {unexpected}"
            )
        of_model[:] = [(dict(state_dict), strict)]
        return _IncompatibleKeys(missing, unexpected)

    def keep_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        states[optimizer] = {**state, "state": dict(state["state"])}
        return {**state, "state": {}}

    def load() -> None:
        for hook in hooks:
            hook.remove()
        del vars(model)["load_state_dict"]
        for state, strict in of_model:
            model.load_state_dict(state, strict)
        for optimizer, state in states.items():
            optimizer.load_state_dict(state)
        of_model.clear()
        states.clear()

    vars(model)["load_state_dict"] = keep
    hooks = [each.register_load_state_dict_pre_hook(keep_state) for each in optimizers]
    return load


def _refuse(
    func: Any, args: tuple[Any, ...], kwargs: Any, *, makes: bool, written: list[torch.Tensor]
) -> None:
    device = kwargs.get("device")
    if makes and device is not None and device.type not in ("cpu", "meta"):
        raise ValueError(
            f"{_name(func)} with device={str(device)!r}: hvkit.deferred_init() makes values on the "
            "CPU, and hvkit.distribute moves them: leave the device out"
        )
    for generator in tree_leaves((args, kwargs)):
        if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
            raise ValueError(
                f"{_name(func)} draws with a torch.Generator of the script: hvkit.deferred_init() "
                "follows PyTorch's own: leave the generator out, and call torch.manual_seed"
            )
    for tensor in written:
        if not tensor.is_meta:
            raise ValueError(
                f"{_name(func)} changes a tensor of shape {tuple(tensor.shape)} that has values by "
                "deferred ones or random numbers: make it with torch.empty inside "
                "hvkit.deferred_init(), or change it before the block"
            )


@functools.cache
def _arguments(func: Any) -> dict[str, bool]:
    arguments = func._schema.arguments
    return {a.name: a.alias_info is not None and a.alias_info.is_write for a in arguments}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    values = {**dict(zip(_arguments(func), args, strict=False)), **kwargs}
    return tensors_in([values.get(name) for name, changed in _arguments(func).items() if changed])


def _filled(target: torch.Tensor, views: list[View]) -> tuple[dict[int, int], frozenset[int]]:
    """The storage that a call fills, with its bytes, and those that it reads.

    The first view is the target. The rest of a storage that it fills in part must be made before.
    """
    size, filled = target.untyped_storage().nbytes(), views[0].storage
    reads = frozenset(view.storage for view in views[1:])
    if not target.is_contiguous() or target.numel() * target.element_size() != size:
        reads |= {filled}
    return {filled: size}, reads


def _lists_deferred(args: tuple[Any, ...]) -> bool:
    return isinstance(args[0], list | tuple) and any(t.is_meta for t in tensors_in(args[0]))


def _name(func: Any) -> str:
    """An operator as users know it."""
    name = str(func.overloadpacket.__name__)
    return ".item()" if name == "_local_scalar_dense" else f"torch's {name}"
