"""Runs operations of the user's code on activations that a tensor group divides.

Between a column layer and its row layer an activation is a ``DTensor``, so that its sizes are those
of the full tensor. DTensor runs most operations. This module runs the others, or those for which
DTensor would gather: fused products, attention, dropout, and operations on a divided and a whole
tensor, whose gradient must be whole again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.rank_groups import SameRandomNumbers
from hvkit.frameworks.pytorch.model_parallel.tensor import divided_tensors
from hvkit.frameworks.pytorch.model_parallel.tensor import propagation_rules as rules
from hvkit.frameworks.pytorch.model_parallel.tensor.linear_trace import is_cache
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in, version_of

_ON_PARTS = {
    *rules.ELEMENTWISE,
    *("scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "softmax", "log_softmax"),
    *("dropout", "alpha_dropout", "layer_norm", "rms_norm", "cross_entropy"),
}


class _OfThread(threading.local):
    """The running forward, and the last activation with what ``for_all`` has returned for it."""

    current: DividedActivations | None = None
    last: tuple[torch.Tensor, tuple[bool, int], torch.Tensor] | None = None


_of_thread = _OfThread()


class DividedActivations(rules.EachOperation):
    """Operations on divided activations, inside the forward of a divided model."""

    def __init__(self, mesh: DeviceMesh, random: SameRandomNumbers) -> None:
        super().__init__()
        self._mesh = mesh
        self._random = random

    @staticmethod
    def active() -> bool:
        """Whether this thread is inside the forward of a divided model."""
        return _of_thread.current is not None

    @classmethod
    def computing_again(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function of the forward divide activations also when backward recomputes it."""
        current = _of_thread.current
        if current is None:
            return function

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if cls.active() else current:
                return function(*args, **kwargs)

        return run

    def __enter__(self) -> DividedActivations:
        _of_thread.current = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _of_thread.current = _of_thread.last = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def operation(self, call: rules.Operation) -> Any:
        if rules.writes(call):
            _refuse_lost(call)
        if not any(isinstance(t, DTensor) for t in call.inputs):
            return call.run()
        dims = [_divided_by(t) for t in call.inputs]
        result = self._of_divided(replace(call, dims=dims, ways=self._mesh.size()))
        for t in filter(is_fused, call.inputs):
            tree_map_only(DTensor, functools.partial(_mark_if_fused, t), result)
        return result

    def _of_divided(self, call: rules.Operation) -> Any:
        name = call.name
        if name in _OF_ELEMENTS and any(map(is_fused, call.inputs)):
            raise _not_proven(f"{name}() takes elements of it")
        dim = _divided_by(call.args[0]) if call.args else None
        if dim is not None and name in rules.VIEWS | rules.SPLITS:
            found = self._view(call, dim) if name in rules.VIEWS else self._split(call, dim)
            if found is not None:
                return found
        elif name in _ON_PARTS and call.dims != [None] * len(call.dims) and not rules.writes(call):
            largest = max(call.inputs, key=torch.Tensor.dim)
            step = rules.follow(replace(call, outputs=[largest]))
            if step is None:
                return self._loss(call)
            if isinstance(step, rules.Followed):
                return self._on_parts(call, step)
        if self._needs_whole(call):
            return self._of_whole(call)
        if name == "cat":  # a tensor of shape (0,) is a cache that holds nothing yet
            kept = [t for t in call.args[0] if t.shape != (0,)]
            call = replace(call, args=(kept, *call.args[1:]))
        result = call.run(self._as_whole if len(call.inputs) > 1 else None)
        return tree_map_only(DTensor, self._plain_if_whole, result)

    def _of_whole(self, call: rules.Operation) -> Any:
        before = tuple(call.args), call.kwargs
        args, kwargs = gathered(before, f"{call.name}() takes it apart")
        for part, whole in zip(tensors_in(before), tensors_in((args, kwargs)), strict=True):
            if whole is not part:
                setattr(whole, _COPY, True)
        return replace(call, args=args, kwargs=kwargs).run()

    def _needs_whole(self, call: rules.Operation) -> bool:
        """Whether an operation mixes the ranks' parts as DTensor cannot, or does wrong."""
        name, dim = call.name, call.dims[0]
        of_attribute = getattr(call.function, "__name__", "") in ("__get__", "__set__")
        computes = not (of_attribute or name in _NO_RESULT or rules.writes(call))
        if name in _WHOLE or (computes and name not in rules.RULES):
            return True
        if dim is None:
            takes_elements = name == "__getitem__" and any(d is not None for d in call.dims)
            return takes_elements or rules.writes(call)
        if name in rules.VIEWS:  # no rank has this view of its part
            return True
        if name in rules.SPLITS:
            along = call.argument(2, "dim", 0)
            return bool(along % call.inputs[0].dim() == dim)
        if name == "linear":
            return dim != call.inputs[0].dim() - 1
        if name not in ("__getitem__", "unbind"):
            return False
        if len(call.inputs) > 1:
            return True
        example = _shape_of(call.inputs[0])
        step = rules.follow(replace(call, args=[example, *call.args[1:]], inputs=[example]))
        return isinstance(step, str)

    def _view(self, call: rules.Operation, dim: int) -> DTensor | None:
        """A view of this rank's part; None if no dimension of it could be divided."""
        whole: Any = call.args[0]
        shape = list(call.run(_shape_of).shape)
        step = rules.viewed(whole.shape, dim, shape, self._mesh.size())
        if step is None:
            return None
        shape[step.dim] //= self._mesh.size()
        return divided(whole.to_local().reshape(shape), self._mesh, step.dim)

    def _split(self, call: rules.Operation, dim: int) -> tuple[DTensor, ...] | None:
        """The tensors of a fused product, of each of which this rank has a part.

        None if the split is along another dimension, or the product is not fused.
        """
        whole: Any = call.args[0]
        if not is_fused(whole):
            return None
        shapes = call.run(_shape_of)
        if shapes[0].shape[dim] == whole.shape[dim]:
            return None
        parts = whole.to_local().chunk(len(shapes), dim)
        return tuple(divided(part, self._mesh, dim) for part in parts)

    def _loss(self, call: rules.Operation) -> torch.Tensor:
        logits, target = cast(DTensor, call.inputs[0]).to_local(), call.inputs[1]
        ignored = call.argument(4, "ignore_index", -100)
        reduction = call.argument(6, "reduction", "mean")
        return divided_tensors.cross_entropy(logits, target, self._mesh, ignored, reduction)

    def _on_parts(self, call: rules.Operation, step: rules.Followed) -> Any:
        """Compute with this rank's part, which the rules find independent of the others."""
        first, dim = call.first
        # PyTorch broadcasts tensors of fewer dimensions from the right.
        from_right = first.dim() - dim
        broadcasts = call.name in rules.ELEMENTWISE or call.name == "scaled_dot_product_attention"
        if call.name in rules.ELEMENTWISE and step.parts and any(map(is_fused, call.inputs)):
            raise _not_proven(f"{call.name}() combines it with a tensor of its whole length")

        def has_dim(t: torch.Tensor) -> bool:
            return broadcasts and t.dim() >= from_right and t.shape[t.dim() - from_right] > 1

        whole = [t for t in call.inputs if not isinstance(t, DTensor) and not has_dim(t)]
        used = self._copy_to_ranks([t for t in whole if t.requires_grad])

        def local(t: torch.Tensor) -> torch.Tensor:
            if isinstance(t, DTensor):
                return t.to_local()
            if has_dim(t):
                return divided_tensors.scatter(t, self._mesh, t.dim() - from_right)
            return used.get(t, t)

        with self._random.different(first.device) if _drops(call) else nullcontext():
            result = call.run(local)
        return tree_map_only(torch.Tensor, lambda t: divided(t, self._mesh, step.dim), result)

    def _copy_to_ranks(self, tensors: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Tensors for use with each rank's part; if of one dtype, one all-reduce of gradients."""
        if len({t.dtype for t in tensors}) != 1 or len(tensors) == 1:
            return {t: divided_tensors.copy_to_ranks(t, self._mesh) for t in tensors}
        joint = divided_tensors.copy_to_ranks(torch.cat([t.flatten() for t in tensors]), self._mesh)
        pairs = zip(tensors, torch.split(joint, [t.numel() for t in tensors]), strict=True)
        return {t: each.view(t.shape) for t, each in pairs}

    def _as_whole(self, t: torch.Tensor) -> DTensor:
        """A replicated ``DTensor`` of a tensor that all ranks hold; backward: all-reduce."""
        if isinstance(t, DTensor):
            return t
        return DTensor.from_local(t, self._mesh, [Replicate()], run_check=False)

    def _plain_if_whole(self, t: DTensor) -> torch.Tensor:
        """A plain tensor if an operation, such as an undivided layer, has made it whole."""
        if _divided_by(t) is not None:
            return t
        return t.redistribute(self._mesh, [Replicate()]).to_local()


def divided(part: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """This rank's part along a dimension, as a tensor of the full size."""
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)


def _drops(call: rules.Operation) -> bool:
    """Whether an operation draws which elements it drops."""
    if call.name == "scaled_dot_product_attention":
        return bool(call.argument(4, "dropout_p", 0.0) > 0)
    trains = call.name in ("dropout", "alpha_dropout") and call.argument(2, "training", True)
    return bool(trains and call.argument(1, "p", 0.5) > 0)


def _shape_of(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, device="meta")


def _divided_by(t: Any) -> int | None:
    if isinstance(t, DTensor) and isinstance(t.placements[0], Shard):
        return t.placements[0].dim
    return None


def for_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole activation for a product with each rank's part of a weight; backward: a sum.

    Layers that take the same activation one after the other, as for queries, keys and values, get
    the same tensor: one sum of gradients serves them all.
    """
    state = torch.is_grad_enabled(), version_of(x)
    last = _of_thread.last
    if last is not None and last[0] is x and last[1] == state:
        return last[2]
    dim = _divided_by(x)
    if isinstance(x, DTensor) and dim is not None:
        copy = divided_tensors.all_gather_shared(x.to_local(), mesh, dim)
    else:
        copy = divided_tensors.copy_to_ranks(x, mesh)
    if DividedActivations.active():
        _of_thread.last = x, state, copy
    return copy


def part_for_this_rank(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the last dimension of an activation."""
    dim = _divided_by(x)
    if isinstance(x, DTensor) and dim == x.dim() - 1:
        return x.to_local()
    return divided_tensors.scatter(gathered(x), mesh, x.dim() - 1)


def total_for_all(
    y: torch.Tensor, bias: torch.Tensor | None, mesh: DeviceMesh, *, along_sequence: bool
) -> torch.Tensor:
    """The sum of the ranks' products with their parts of a weight, and a bias.

    With ``along_sequence`` each rank keeps its part of the sum along the last dimension but one, if
    that has parts of equal length.
    """
    dim = y.dim() - 2
    if not along_sequence or dim < 0 or y.shape[dim] % mesh.size() or y.is_meta:
        y = divided_tensors.all_reduce(y, mesh)
        return y if bias is None else y + bias.to(y.dtype)
    if bias is not None:  # backward gathers the gradient of the whole sum on all ranks
        y = y + divided_tensors.divide_by_ranks(bias, mesh).to(y.dtype)
    return divided(divided_tensors.reduce_scatter(y, mesh, dim), mesh, dim)


def gathered(value: Any, use: str = "the model returns it") -> Any:
    """A value with whole activations in place of divided ones; a cache stays divided."""

    def whole(t: DTensor) -> torch.Tensor:
        if is_fused(t):
            raise _not_proven(use)
        if (dim := _divided_by(t)) is None:
            return t.full_tensor()
        return divided_tensors.all_gather(t.to_local(), t.device_mesh, dim)

    return tree_map_only(DTensor, whole, value, is_leaf=lambda v: is_cache(type(v).__name__))


# Operations that a rank cannot run on its part of a fused product.
_OF_ELEMENTS = frozenset({"__getitem__", "select", "narrow", "index_select", "flip", "roll", "cat"})
_FUSED = "_hvkit_fused"
# Operations that DTensor lacks along the divided dimension, or would run on each rank by itself.
_WHOLE = frozenset(
    {
        *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "prod", "cdist"),
        *("conv1d", "conv2d", "conv3d", "masked_select", "tolist"),
    }
)
_COPY = "_hvkit_copy"
# Calls without a rule that compute no new tensor: sizes, hooks.
_NO_RESULT = {*rules.HARMLESS, *rules.SIZES, "backward", "retain_grad"}
_NO_RESULT |= {"register_hook", "register_post_accumulate_grad_hook"}
_PARTS = (
    "each rank of the tensor axis has a part of an activation, and can compute with it and change "
    "all of it, as by x.mul_(2)"
)


def mark_fused(product: DTensor) -> DTensor:
    """Mark a product that concatenates several tensors, each of which is divided by itself."""
    setattr(product, _FUSED, True)
    return product


def _mark_if_fused(before: torch.Tensor, after: DTensor) -> DTensor:
    """Mark the result of an operation on a fused product, if it concatenates the same tensors."""
    dim, now = _divided_by(before), _divided_by(after)
    if dim is not None and now is not None and before.shape[dim] == after.shape[now]:
        mark_fused(after)
    return after


def is_fused(t: torch.Tensor) -> bool:
    return hasattr(t, _FUSED)


def _refuse_lost(call: rules.Operation) -> None:
    written = call.inputs[0] if call.inputs else None
    if isinstance(written, DTensor) and call.name == "__setitem__":
        raise HvkitError(f"{_PARTS}, but {rules.WRITES}")
    if written is not None and hasattr(written if written._base is None else written._base, _COPY):
        raise HvkitError(
            f"{_PARTS}. A view of some of it, as x[:, 0], is one of a copy, into which "
            f"{call.name}() would write: write into a clone of it, and put the whole together "
            "with torch.cat or torch.where"
        )


def _not_proven(use: str) -> HvkitError:
    return HvkitError(
        "a product of several tensors, such as fused queries, keys and values, is divided along "
        f"the tensor axis, but {use}, which the first call of the model did not do: call it with "
        "the same arguments in the same way, or name the layers to divide with plan="
    )
