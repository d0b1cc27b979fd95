"""Outputs of a model whose forward runs only in ``backward()``.

Schedules other than GPipe alternate forward and backward of micro-batches, so they need the loss
before the script has computed it. ``model(x)`` then returns tensors without values, which record
the operations of the script. ``backward()`` repeats these for each micro-batch. Afterwards single
numbers, such as the loss, have their values. If the script needs a value earlier, this batch runs
by GPipe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.meta_device import OnMeta
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import MicroBatch, joined
from hvkit.frameworks.pytorch.model_parallel.pipeline.pipelined_model import (
    autocast_as,
    autocast_state,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.propagation_rules import is_in_place
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in

if TYPE_CHECKING:
    from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import ScheduledPipeline

# Functions that read a property, and need no value.
_WITHOUT_VALUE = {"__get__", "size", "dim", "ndimension", "__len__", "numel", "__hash__"}
_WITHOUT_VALUE |= {"is_floating_point"}
# Functions that need a value.
_WITH_VALUE = {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__bool__"}
_WITH_VALUE |= {"__repr__", "__format__", "__array__", "__contains__"}
# The largest relative difference between the mean over micro-batches and the value for the batch.
_TOLERANCE = 1e-5


@dataclass(eq=False)
class Recorded:
    """A recorded operation of the script, or an output of the model, which has no function."""

    meta: torch.Tensor
    function: Callable[..., Any] | None = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    grad: bool = True
    autocast: Sequence[tuple[bool, torch.dtype]] = ()
    # First dimensions of the deferred tensors among the arguments.
    lengths: frozenset[int] = frozenset()


@dataclass(eq=False)
class DeferredBatch:
    """A training batch whose forward waits for ``backward()``.

    ``key`` is what the shapes between stages depend on. ``autocast`` and ``modes``, whether each
    module was in training, are those of the call. ``nodes`` begins with the outputs; ``values`` has
    those of single numbers after ``backward()``.
    """

    pipeline: ScheduledPipeline
    args: Any
    kwargs: Any
    batches: list[MicroBatch]
    key: Hashable
    autocast: Sequence[tuple[bool, torch.dtype]]
    modes: Sequence[bool]
    seed: int
    nodes: list[Recorded] = field(default_factory=list)
    values: Mapping[Recorded, torch.Tensor] | None = None
    _evaluate: Callable[[Recorded], torch.Tensor] | None = None

    def outputs(self, metas: Sequence[torch.Tensor], device: torch.device) -> list[Deferred]:
        self.nodes += map(Recorded, metas)
        return [Deferred(device, self, node) for node in self.nodes]

    @property
    def singles(self) -> list[Recorded]:
        """The recorded operations whose results are single numbers."""
        return [node for node in self.nodes if not node.meta.dim()]

    def description(self) -> tuple[str, ...]:
        """The recorded operations as text, without the values of tensors."""

        def described(t: torch.Tensor) -> str:
            return f"{tuple(t.shape)} {t.dtype}"

        return tuple(
            f"{getattr(node.function, '__name__', 'output')} "
            f"{tree_map_only(torch.Tensor, described, (node.args, node.kwargs))}"
            for node in self.nodes
        )

    def evaluator(
        self, outputs: Sequence[torch.Tensor], microbatch: int | None
    ) -> Callable[[Recorded], torch.Tensor]:
        """Computes operations from outputs of a micro-batch, or of the whole batch for None."""
        memo = dict(zip(self.nodes, outputs, strict=False))
        sizes = [batch.samples for batch in self.batches]
        samples = sum(sizes)

        def argument(node: Recorded, t: torch.Tensor) -> torch.Tensor:
            if isinstance(t, Deferred):
                return evaluate(t.node)
            length = t.shape[0] if t.dim() else 0
            # Samples, or a tensor as long as another argument, such as targets of each position.
            if microbatch is not None and (length == samples or length in node.lengths):
                rows, rest = divmod(length, samples)
                if rows and not rest:
                    return torch.split(t, [n * rows for n in sizes])[microbatch]
            return t

        def evaluate(node: Recorded) -> torch.Tensor:
            if node not in memo:
                take = functools.partial(argument, node)
                args, kwargs = tree_map_only(torch.Tensor, take, (node.args, node.kwargs))
                if is_in_place(node.function):
                    args = (args[0].clone(), *args[1:])
                assert node.function is not None
                grad = torch.is_grad_enabled() and node.grad
                with torch.set_grad_enabled(grad), autocast_as(node.autocast):
                    memo[node] = node.function(*args, **kwargs)
            return memo[node]

        return evaluate

    @torch.no_grad()
    def means_or_sums(
        self, found: Sequence[Sequence[torch.Tensor]], outputs: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[bool | None], bool]:
        """Whether each single number is a sum over samples (True), a mean (False), or neither.

        ``found`` has them by micro-batch, ``outputs`` what they are computed from. A zero may be
        both: an integer then counts as a sum, a float as a mean, as do NaN and infinity. Also
        returns whether all are finite.
        """
        sizes = [batch.samples for batch in self.batches]
        joint, _ = joined(outputs, sizes, side_outputs=len(outputs[0]))
        whole = [float(value) for value in map(self.evaluator(joint, None), self.singles)]
        sums: list[bool | None] = []
        for column, value in zip(zip(*found, strict=True), whole, strict=True):
            stacked = torch.stack([t.double() for t in column])
            near = _TOLERANCE * max(abs(value), float(stacked.abs().max()), 1e-30)
            by_mean = abs(float(stacked.mean()) - value) <= near
            by_sum = abs(float(stacked.sum()) - value) <= near
            both = by_mean and by_sum and not column[0].is_floating_point()
            by_mean |= not math.isfinite(value)
            sums.append(True if both else False if by_mean else True if by_sum else None)
        return sums, all(map(math.isfinite, whole))

    def value_of(self, t: Deferred) -> torch.Tensor:
        """The value of a tensor; an error if it was not kept."""
        if self.values is not None:
            if t.node not in self.values:
                raise ValueError(
                    f"the value of a tensor of shape {tuple(t.shape)} that was computed from a "
                    "pipeline's outputs was not kept: after backward() only single numbers are "
                    "known that are means or sums over samples. Compute it before backward(), or "
                    'use schedule="GPipe", which gives all values at once'
                )
            return self.values[t.node]
        self.run_by_gpipe()
        assert self._evaluate is not None
        return self._evaluate(t.node)

    @property
    def is_pending(self) -> bool:
        return self.values is None and self._evaluate is None

    def run_by_gpipe(self) -> None:
        """Run the batch by GPipe, unless it has run already."""
        if self._evaluate is not None:
            return
        with torch.enable_grad():
            with autocast_as(self.autocast):
                outputs = self.pipeline.run_now(self)
            self._evaluate = self.evaluator(outputs, None)
            for node in self.nodes:  # before the script changes a result in place
                self._evaluate(node)

    def backward(
        self,
        root: Deferred,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if create_graph or inputs is not None:
            raise ValueError(
                "backward() of a pipeline with a schedule of PyTorch's takes neither "
                'create_graph=True nor inputs=: use schedule="GPipe"'
            )
        if self.values is not None:
            raise RuntimeError(
                "backward() a second time through a pipeline: add the losses, and call it once"
            )
        self.pipeline.run_backward(self, (root if gradient is None else root * gradient).node)


class Deferred(torch.Tensor):
    """A tensor without a value, which records the operations on it."""

    batch: DeferredBatch
    node: Recorded

    @staticmethod
    def __new__(cls, device: torch.device, batch: DeferredBatch, node: Recorded) -> Deferred:
        t: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, node.meta.shape, dtype=node.meta.dtype, device=device
        )
        t.batch, t.node = batch, node
        return t

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} needs a value that waits for backward()")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(t for t in tensors_in((args, kwargs)) if isinstance(t, Deferred))
        batch, name = first.batch, getattr(func, "__name__", "")
        if func is torch.Tensor.backward and batch._evaluate is None:
            return batch.backward(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.requires_grad:
            return first.node.meta.is_floating_point()
        if name in _WITHOUT_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if batch.is_pending and name not in _WITH_VALUE:
            try:
                return _record(batch, first.device, func, args, kwargs)
            except RuntimeError:
                pass  # as where the shape of the result depends on values
        known = tree_map_only(torch.Tensor, _value_of, (args, kwargs))
        return func(*known[0], **known[1])


def _value_of(t: torch.Tensor) -> torch.Tensor:
    return t.batch.value_of(t) if isinstance(t, Deferred) else t


def _record(batch: DeferredBatch, device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
    """Record an operation and return its deferred result, or raise ``NotImplementedError``."""
    tensors = tensors_in((args, kwargs))
    in_place = is_in_place(func)
    # Views may show a change in place; all ranks need the gradient of another leaf.
    if in_place and not (isinstance(args[0], Deferred) and not args[0].node.meta.dim()):
        raise NotImplementedError
    if any(t.requires_grad for t in tensors if not isinstance(t, Deferred)):
        raise NotImplementedError
    lengths = frozenset(t.shape[0] for t in tensors if isinstance(t, Deferred) and t.dim())
    # Deferred tensors of earlier batches have values by now.
    args, kwargs = tree_map_only(
        Deferred, lambda t: t if t.batch is batch else _value_of(t), (args, kwargs)
    )
    metas = tree_map_only(torch.Tensor, _meta_of, (args, kwargs))
    with torch.no_grad(), OnMeta(device):
        out = func(*metas[0], **metas[1])
    if not isinstance(out, torch.Tensor):
        if tensors_in(out):
            raise NotImplementedError
        return out
    grad = torch.is_grad_enabled()
    node = Recorded(out, func, args, kwargs, grad, autocast_state(), lengths)
    batch.nodes.append(node)
    result = Deferred(device, batch, node)
    if in_place:  # the tensor that the script holds gets the new value
        node.args = (Deferred(device, batch, args[0].node), *args[1:])
        args[0].node = node
    return result


def _meta_of(t: torch.Tensor) -> torch.Tensor:
    return t.node.meta.clone() if isinstance(t, Deferred) else t.to("meta")
