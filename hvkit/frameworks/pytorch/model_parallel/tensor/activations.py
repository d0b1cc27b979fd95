"""What the user's code does to activations that are divided among the ranks of a tensor group.

Between a column layer and its row layer an activation is a ``DTensor``, so that sizes in the code
are those of the whole. DTensor does most operations. Here is what it does not do, or would do by
gathering: products that hold several tensors, attention, dropout, and whole tensors that meet a
divided one, whose gradient must come out whole.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map_only

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_loss import cross_entropy
from hvkit.frameworks.pytorch.model_parallel.tensor.exchanges import used_by_all
from hvkit.frameworks.pytorch.model_parallel.tensor.flow import is_cache
from hvkit.frameworks.pytorch.model_parallel.tensor.random_numbers import SameRandomNumbers
from hvkit.frameworks.pytorch.model_parallel.tensor.rules import (
    SPLITS,
    VIEWS,
    EachOperation,
    Followed,
    Operation,
    follow,
    viewed,
)

_active = threading.local()
_ON_PARTS = {
    *("scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "softmax", "log_softmax"),
    *("dropout", "alpha_dropout", "layer_norm", "rms_norm", "cross_entropy"),
}
_DRAWS = {"dropout", "alpha_dropout", "scaled_dot_product_attention"}


class _Copied(NamedTuple):
    """The last activation that ``for_all`` was called with, and what it returned."""

    whole: torch.Tensor
    state: tuple[bool, int | None]
    copy: torch.Tensor


class DividedActivations(EachOperation):
    """Operations on divided activations, inside the forward of a divided model.

    Args:
        mesh: the tensor group, of one dimension.
        random: the random numbers of the group.
    """

    def __init__(self, mesh: DeviceMesh, random: SameRandomNumbers) -> None:
        super().__init__()
        self._mesh = mesh
        self._random = random

    @staticmethod
    def active() -> bool:
        """Whether this thread is inside such a forward."""
        return bool(getattr(_active, "depth", 0))

    def __enter__(self) -> DividedActivations:
        _active.depth = getattr(_active, "depth", 0) + 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _active.depth -= 1
        _active.last = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def operation(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        leaves: Sequence[torch.Tensor],
    ) -> Any:
        if not any(isinstance(t, DTensor) for t in leaves):
            return func(*args, **kwargs)
        result = self._of_divided(func, name, args, kwargs, leaves)
        for t in filter(is_fused, leaves):
            tree_map_only(DTensor, functools.partial(_mark_if_fused, t), result)
        return result

    def _of_divided(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        leaves: Sequence[torch.Tensor],
    ) -> Any:
        """The result of an operation on a divided activation, and perhaps others."""
        if name in _OF_ELEMENTS and any(map(is_fused, leaves)):
            raise _not_proven(f"{name}() takes elements of it")
        dim = _divided_by(args[0]) if args else None
        if dim is not None and name in VIEWS:
            if (view := self._view(func, args, kwargs, dim)) is not None:
                return view
        elif dim is not None and name in SPLITS:
            if (shares := self._split(func, args, kwargs, dim)) is not None:
                return shares
        elif name in _ON_PARTS:
            dims = [_divided_by(t) for t in leaves]
            call = Operation(func, name, args, kwargs, leaves, dims, leaves[:1], self._mesh.size())
            if any(d is not None for d in dims):
                step = follow(call)
                if step is None:
                    return self._loss(call)
                if isinstance(step, Followed):
                    return self._on_parts(func, args, kwargs, call, step)
        if self._needs_whole(func, name, args, kwargs, leaves):
            args, kwargs = gathered((tuple(args), kwargs), f"{name}() takes it apart")
            return func(*args, **kwargs)
        if name == "cat":  # an empty tensor of no shape: a cache that holds nothing yet
            args = ([t for t in args[0] if t.shape != (0,)], *args[1:])
        if len(leaves) > 1:
            args, kwargs = tree_map_only(torch.Tensor, self._as_whole, (tuple(args), kwargs))
        return tree_map_only(DTensor, self._plain_if_whole, func(*args, **kwargs))

    def _needs_whole(
        self,
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        leaves: Sequence[torch.Tensor],
    ) -> bool:
        """Whether an operation mixes the ranks' parts as DTensor cannot, or gets wrong."""
        if name in _WHOLE:
            return True
        dims = [_divided_by(t) for t in leaves]
        if dims[0] is None:
            return any(d is not None for d in dims) and name == "__getitem__"
        if name in SPLITS:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            return bool(dim % leaves[0].dim() == dims[0])
        if name not in ("__getitem__", "unbind"):
            return False
        example, *others = tree_map_only(torch.Tensor, _shape_of, list(args))
        if any(isinstance(each, torch.Tensor) for each in others) or len(leaves) > 1:
            return True
        call = Operation(
            func, name, [example, *others], kwargs, [example], dims, [], self._mesh.size()
        )
        return isinstance(follow(call), str)

    def _view(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], dim: int
    ) -> DTensor | None:
        """A view of this rank's part; None where no dimension of it would be divided."""
        whole: Any = args[0]
        empty, *others = tree_map_only(torch.Tensor, _shape_of, list(args))
        shape = list(func(empty, *others, **kwargs).shape)
        step = viewed(whole.shape, dim, shape, self._mesh.size())
        if step is None:
            return None
        shape[step.dim] //= self._mesh.size()
        return self._divided(whole.to_local().reshape(shape), step.dim)

    def _split(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], dim: int
    ) -> tuple[DTensor, ...] | None:
        """Shares of a product: this rank's part is made up of a part of each of them.

        None where the split is along another dimension, or of a product that is no fused one.
        """
        whole: Any = args[0]
        if not is_fused(whole):
            return None
        shares = func(_shape_of(whole), *args[1:], **kwargs)
        if shares[0].shape[dim] == whole.shape[dim]:
            return None
        parts = whole.to_local().chunk(len(shares), dim)
        return tuple(self._divided(part, dim) for part in parts)

    def _loss(self, call: Operation) -> torch.Tensor:
        """The cross entropy of logits that are divided by their classes."""
        logits, target = cast(DTensor, call.inputs[0]).to_local(), call.inputs[1]
        ignored = call.argument(4, "ignore_index", -100)
        reduction = call.argument(6, "reduction", "mean")
        return cross_entropy(logits, target, self._mesh, ignored, reduction)

    def _on_parts(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        call: Operation,
        step: Followed,
    ) -> DTensor:
        """Each rank computes with its part; the rules say that the parts are independent."""
        first, dim = call.first
        # Dimensions count from the right where tensors of fewer dimensions take part.
        from_right = first.dim() - dim

        def local(t: torch.Tensor) -> torch.Tensor:
            if isinstance(t, DTensor) and _divided_by(t) is not None:
                return t.to_local()
            whole = self._as_whole(t)
            at = t.dim() - from_right
            if call.name == "scaled_dot_product_attention" and at >= 0 and t.shape[at] > 1:
                return whole.redistribute(placements=[Shard(at)]).to_local()
            return whole.to_local(grad_placements=[Partial()])

        args, kwargs = tree_map_only(torch.Tensor, local, (tuple(args), kwargs))
        if call.name in _DRAWS and call.argument(4, "dropout_p", 1.0) > 0:
            with self._random.different(first.device):
                return self._divided(func(*args, **kwargs), step.dim)
        return self._divided(func(*args, **kwargs), step.dim)

    def _as_whole(self, t: torch.Tensor) -> DTensor:
        """A tensor that all ranks hold; the sum of the ranks' gradients is its gradient."""
        if isinstance(t, DTensor):
            return t
        return DTensor.from_local(t, self._mesh, [Replicate()], run_check=False)

    def _plain_if_whole(self, t: DTensor) -> torch.Tensor:
        """An activation that an operation has made whole again: a layer that is not divided."""
        if _divided_by(t) is not None:
            return t
        return t.redistribute(self._mesh, [Replicate()]).to_local()

    def _divided(self, part: torch.Tensor, dim: int) -> DTensor:
        return DTensor.from_local(part, self._mesh, [Shard(dim)], run_check=False)


def _shape_of(t: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape, and no memory."""
    return torch.empty(t.shape, device="meta")


def _divided_by(t: Any) -> int | None:
    """The dimension by which a tensor is divided, or None."""
    if isinstance(t, DTensor) and isinstance(t.placements[0], Shard):
        return t.placements[0].dim
    return None


def for_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """An activation that all ranks hold, for a product with each rank's part of a weight.

    Its gradient is the sum of the ranks' gradients. Layers that take the same activation one after
    the other, as those of queries, keys and values, get the same tensor: one sum serves them all.
    """
    if isinstance(x, DTensor):
        x = x.redistribute(mesh, [Replicate()]).to_local()
    state = torch.is_grad_enabled(), None if x.is_inference() else x._version
    last: _Copied | None = getattr(_active, "last", None)
    if last is not None and last.whole is x and last.state == state:
        return last.copy
    copy = used_by_all(x, mesh)
    if DividedActivations.active():
        _active.last = _Copied(x, state, copy)
    return copy


def part_for_this_rank(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the last dimension of an activation."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(mesh, [Shard(x.dim() - 1)]).to_local()


def gathered(value: Any, use: str = "the model returns it") -> Any:
    """A value in which divided activations have become whole; a cache stays divided.

    Args:
        value: any tree.
        use: for the error.

    Raises:
        HvkitError: a fused product is among them, whose parts are not in their order.
    """

    def whole(t: DTensor) -> torch.Tensor:
        if is_fused(t):
            raise _not_proven(use)
        return t.full_tensor()

    return tree_map_only(DTensor, whole, value, is_leaf=lambda v: is_cache(type(v).__name__))


# What a rank cannot do with its part of a fused product, in which parts of several tensors follow
# each other.
_OF_ELEMENTS = frozenset({"__getitem__", "select", "narrow", "index_select", "flip", "roll", "cat"})
_FUSED = "_hvkit_fused"
# What DTensor does not do along the divided dimension, or would do on each rank by itself.
_WHOLE = frozenset(
    {
        *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "prod", "cdist"),
        *("conv1d", "conv2d", "conv3d", "masked_select", "tolist"),
    }
)


def mark_fused(product: DTensor) -> DTensor:
    """Remember that a product holds several tensors, each of which is divided by itself."""
    setattr(product, _FUSED, True)
    return product


def _mark_if_fused(before: torch.Tensor, after: DTensor) -> DTensor:
    """Mark what an operation has made of a fused product, if it holds the same tensors."""
    dim, now = _divided_by(before), _divided_by(after)
    if dim is not None and now is not None and before.shape[dim] == after.shape[now]:
        mark_fused(after)
    return after


def is_fused(t: torch.Tensor) -> bool:
    """Whether ``mark_fused`` got this tensor."""
    return hasattr(t, _FUSED)


def _not_proven(use: str) -> HvkitError:
    return HvkitError(
        "a product of several tensors, such as fused queries, keys and values, is divided along "
        f"the tensor axis, but {use}, which the first call of the model did not do: call it with "
        "the same arguments in the same way, or name the layers to divide with plan="
    )
