"""Runs forwards on the meta device, where tensors have shapes and no values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.side_outputs import SideOutputs, undoing_side_effects
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in


class OnMeta(TorchFunctionMode):
    """Runs an operation on the meta device if one of its tensors is there, while it is active.

    Tensors claim to be on ``device``, so that a forward makes masks and positions there. Where the
    forward reads a value, as for which experts get samples, ``look`` gets PyTorch's error, and the
    forward reads ``value`` everywhere: 1 lets every expert get samples.
    """

    def __init__(
        self,
        device: torch.device,
        look: Callable[[Exception], None] | None = None,
        value: int = 1,
    ) -> None:
        super().__init__()
        self.device = device
        self.active = True
        self.look, self._value = look, value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return self.device
        if getattr(func, "__name__", "") == "__get__":  # an attribute of one tensor
            return func(*args, **kwargs)
        if func in _MOVES and args[0].is_meta:
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            rest = (a for a in args[1:] if not isinstance(a, torch.device | str | int))
            args = (args[0], *(a.dtype if isinstance(a, torch.Tensor) else a for a in rest))
            return func(*args, **kwargs) if func is _TO and (args[1:] or kwargs) else args[0]
        if func in MAKES_NEW and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            kwargs = {"device": self.device, **kwargs}  # these do not depend on the weight
        # A script may pass sizes as tensors to pad, which reads them.
        tensors = [] if func is functional.pad else tensors_in((args, kwargs))
        given = args, kwargs
        if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), given)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if any(t.is_meta for t in tensors) and "grouped_mm" in getattr(func, "__name__", ""):
                return _of_kernels_dtype(func, args, kwargs)
            if self.look is None or not any(t.is_meta for t in tensors) or not is_about(error):
                raise
            self.look(error)
        return self._of_values(func, *given)

    @torch.no_grad()
    def _of_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result with one value in every tensor; only float results go back to meta."""

        def valued(t: torch.Tensor) -> torch.Tensor:
            return torch.full((), self._value, dtype=t.dtype).expand(t.shape) if t.is_meta else t

        args, kwargs = tree_map_only(torch.Tensor, valued, (args, kwargs))
        out = func(*args, **kwargs)
        return tree_map_only(
            torch.Tensor, lambda t: t.to("meta") if t.is_floating_point() else t, out
        )


def _of_kernels_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of grouped products: on meta PyTorch supports bfloat16 alone."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.bfloat16() if t.is_floating_point() else t

    dtype = tensors_in((args, kwargs))[0].dtype
    args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
    return func(*args, **kwargs).to(dtype)


_TO: Any = torch.Tensor.to


# Functions that make a tensor from the shape, dtype or device of another.
MAKES_NEW = (
    *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
    *(torch.zeros_like, torch.ones_like, torch.full_like),
)
_MOVES = (_TO, torch.Tensor.cuda, torch.Tensor.cpu)


def holders_in(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """By parameter, the names of the modules that have it directly."""
    found: dict[torch.Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            found.setdefault(p, []).append(name)
    return found


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled modules run uncompiled."""
    # Importing the compiler takes a second.
    used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if used else nullcontext()


def on_meta(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[torch.Tensor, str]]:
    """The parameters on the meta device, by each of their names; and the first name of each.

    A parameter of several modules is the same object under each name. A module with several names
    counts once: under a second name ``functional_call`` would restore its own replacement.
    """
    made: dict[torch.Tensor, nn.Parameter] = {}
    by_name: dict[str, nn.Parameter] = {}
    first: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False, remove_duplicate=False):
            if p not in made:
                made[p] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
                first[made[p]] = name
            by_name[name] = made[p]
    return by_name, first


@contextmanager
def forward_on_meta(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    args: Any,
    kwargs: Any,
    device: torch.device,
    modes: Sequence[AbstractContextManager[Any]],
) -> Iterator[tuple[Any, SideOutputs]]:
    """Runs the model's forward, and then restores random numbers and all that it has set.

    It uses these parameters on the meta device, by all of their names, and buffers, and may change
    its arguments. Its result and its side outputs exist inside the context.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), undoing_side_effects(model) as kept:
        with uncompiled(), ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            call = torch.func.functional_call
            output = call(model, dict(tensors), args, kwargs, tie_weights=False)
        yield output, kept


@contextmanager
def calls_watched(
    modules: Mapping[str, nn.Module],
    enter: Callable[[str, Any, Any], None],
    leave: Callable[[str, Any, Any, Any], None],
    *,
    before_hooks: bool = True,
    after_hooks: bool = True,
) -> Iterator[None]:
    """A context in which ``enter`` and ``leave`` get the names and arguments of modules' calls.

    By default ``enter`` runs before the script's pre-hooks, and ``leave``, which also gets the
    result, after its hooks: these may change arguments and results.
    """

    def watch(name: str, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_pre_hook(
            lambda _, *call: enter(name, *call), prepend=before_hooks, with_kwargs=True
        )
        yield module.register_forward_hook(
            lambda _, *call: leave(name, *call), prepend=not after_hooks, with_kwargs=True
        )

    with ExitStack() as stack:
        for each in modules.items():
            for hook in watch(*each):
                stack.callback(hook.remove)
        yield


def is_recomputed_within(module: nn.Module) -> bool:
    """Whether an activation checkpoint recomputes the ending call of a module, among others.

    False if the checkpoint recomputes this module alone.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            function = frame.f_locals.get("function")
            while isinstance(function, functools.partial):
                function = function.func
            if function is not None:
                return getattr(function, "__self__", function) is not module
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_about(error: Exception) -> bool:
    """Whether PyTorch's error says that a tensor has no values."""
    return "meta" in str(error).lower()


def needs_values(error: object) -> ValueError:
    """The error for a forward that reads values which ranks do not have."""
    return ValueError(
        "the model's forward looks at a value that depends on its weights, or was computed "
        "together with one that does, and that ranks do not have for layers of others. Move "
        "the decision out of forward (nn.TransformerEncoder: enable_nested_tensor=False), or "
        f"use hvkit.FullyShard(). PyTorch says: {error}"
    )


@contextmanager
def explaining_meta() -> Iterator[None]:
    """A context that explains PyTorch's errors about tensors without values by a ``ValueError``."""
    try:
        yield
    except RuntimeError as error:
        if not is_about(error):
            raise
        raise needs_values(error) from error
