"""Outputs of a model whose forward runs only in ``backward()``, together with it.

Schedules other than GPipe run forward and backward of different micro-batches in turns, so they
need the loss before the script has computed it. ``model(x)`` then returns tensors without values.
They record what the script computes from them, and ``backward()`` computes it for each micro-batch.
Afterwards single numbers, such as the loss, have their values. If the script needs a value earlier,
this batch takes GPipe.
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
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import MicroBatch
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_gradients import (
    autocast_as,
    autocast_state,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.rules import is_in_place
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in

if TYPE_CHECKING:
    from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import ScheduledPipeline

# What reads a property, and needs no value.
_WITHOUT_VALUE = {"__get__", "size", "dim", "ndimension", "__len__", "numel", "__hash__"}
_WITHOUT_VALUE |= {"is_floating_point"}
# What needs a value.
_WITH_VALUE = {"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__bool__"}
_WITH_VALUE |= {"__repr__", "__format__", "__array__", "__contains__"}
# How far the mean over micro-batches may be from the value for the batch.
_TOLERANCE = 1e-5


@dataclass(eq=False)
class Recorded:
    """A tensor that the script has made from deferred ones.

    Attributes:
        meta: it, without a value.
        output: the number of the model's output that it is; None for a result of ``function``.
        function: with ``args`` and ``kwargs``, among which are deferred tensors.
        grad: whether autograd was on.
        autocast: as it was, by kind of device.
        lengths: of the deferred tensors among the arguments, along their first dimension.
    """

    meta: torch.Tensor
    output: int | None = None
    function: Callable[..., Any] | None = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    grad: bool = True
    autocast: Sequence[tuple[bool, torch.dtype]] = ()
    lengths: frozenset[int] = frozenset()


@dataclass(eq=False)
class DeferredRun:
    """A training batch whose forward waits for ``backward()``.

    Attributes:
        runner: runs it.
        args, kwargs: of the model's call.
        batches: its micro-batches, of equal sizes.
        samples: of the batch.
        key: what shapes between stages depend on.
        autocast: as it was at the call, by kind of device.
        modes: whether each module was in training.
        seed: of the random numbers that all stages draw alike.
        nodes: what the script has made, in order.
        root: what ``backward()`` was called on.
        values: of single numbers, after ``backward()``; None before.
        whole: outputs of the whole batch, if a value was needed before.
    """

    runner: ScheduledPipeline
    args: Any
    kwargs: Any
    batches: list[MicroBatch]
    samples: int
    key: Hashable
    autocast: Sequence[tuple[bool, torch.dtype]]
    modes: Sequence[bool]
    seed: int
    nodes: list[Recorded] = field(default_factory=list)
    root: Recorded | None = None
    values: Mapping[Recorded, torch.Tensor] | None = None
    whole: list[torch.Tensor] | None = None
    _evaluate: Callable[[Recorded], torch.Tensor] | None = None

    def outputs(self, metas: Sequence[torch.Tensor], device: torch.device) -> list[Deferred]:
        """Tensors for the script, like these on the meta device."""
        made = []
        for number, meta in enumerate(metas):
            self.nodes.append(Recorded(meta, number))
            made.append(Deferred(device, self, self.nodes[-1]))
        return made

    @property
    def singles(self) -> list[Recorded]:
        """What the script has made that is a single number."""
        return [node for node in self.nodes if not node.meta.dim()]

    def kind(self) -> tuple[str, ...]:
        """What was computed, without the values of tensors."""
        return tuple(
            f"{getattr(node.function, '__name__', 'output')} "
            f"{tree_map_only(torch.Tensor, _without_values, (node.args, node.kwargs))}"
            for node in self.nodes
        )

    def evaluator(
        self, outputs: Sequence[torch.Tensor], part: int | None
    ) -> Callable[[Recorded], torch.Tensor]:
        """What computes recorded tensors from outputs of the model.

        Args:
            outputs: of a micro-batch, or of the whole batch.
            part: the number of the micro-batch; None for the whole.
        """
        memo: dict[Recorded, torch.Tensor] = {}

        def of_part(node: Recorded, t: torch.Tensor) -> torch.Tensor:
            if isinstance(t, Deferred):
                return evaluate(t.node)
            length = t.shape[0] if t.dim() else 0
            # A tensor of samples, or one as long as what is computed from them, such as targets
            # of each position.
            if part is not None and (length == self.samples or length in node.lengths):
                rows, rest = divmod(length, self.samples)
                if rows and not rest:
                    sizes = [batch.samples * rows for batch in self.batches]
                    return torch.split(t, sizes)[part]
            return t

        def evaluate(node: Recorded) -> torch.Tensor:
            if node not in memo:
                if node.function is None:
                    assert node.output is not None
                    memo[node] = outputs[node.output]
                else:
                    give = functools.partial(of_part, node)
                    args, kwargs = tree_map_only(torch.Tensor, give, (node.args, node.kwargs))
                    grad = torch.is_grad_enabled() and node.grad
                    with torch.set_grad_enabled(grad), autocast_as(node.autocast):
                        memo[node] = _not_in_place(node.function, args, kwargs)
            return memo[node]

        return evaluate

    def known(self, t: Deferred) -> torch.Tensor:
        """The value of a tensor.

        Raises:
            ValueError: it was not kept.
        """
        if self.values is not None:
            if t.node not in self.values:
                raise ValueError(
                    f"the value of a tensor of shape {tuple(t.shape)} that was computed from a "
                    "pipeline's outputs was not kept: after backward() only single numbers are "
                    "known that are means or sums over samples. Compute it before backward(), or "
                    'use schedule="GPipe", which gives all values at once'
                )
            return self.values[t.node]
        self.make_known()
        assert self._evaluate is not None
        return self._evaluate(t.node)

    @property
    def waits(self) -> bool:
        """Whether the batch has not run at all."""
        return self.values is None and self.whole is None

    def make_known(self) -> None:
        """Run the batch by GPipe, unless that is done."""
        if self.whole is not None:
            return
        with torch.enable_grad(), autocast_as(self.autocast):
            self.whole = self.runner.run_now(self)
        self._evaluate = self.evaluator(self.whole, None)
        with torch.enable_grad():
            for node in self.nodes:  # before the script changes one in place
                self._evaluate(node)

    def backward(self, root: Recorded) -> None:
        """Train on the batch.

        Raises:
            RuntimeError: for the second time.
        """
        if self.values is not None:
            raise RuntimeError(
                "backward() a second time through a pipeline: add the losses, and call it once"
            )
        self.root = root
        self.runner.run_backward(self)


def _without_values(t: torch.Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype}"


def _not_in_place(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function; one that changes its first argument gets a copy of it."""
    if is_in_place(function):
        args = (args[0].clone(), *args[1:])
    return function(*args, **kwargs)


class Deferred(torch.Tensor):
    """A tensor without a value, which records what is computed from it."""

    run: DeferredRun
    node: Recorded

    @staticmethod
    def __new__(cls, device: torch.device, run: DeferredRun, node: Recorded) -> Deferred:
        t: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, node.meta.shape, dtype=node.meta.dtype, device=device
        )
        t.run, t.node = run, node
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
        run, name = first.run, getattr(func, "__name__", "")
        if func is torch.Tensor.backward and run.whole is None:
            return _backward(run, *args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.requires_grad:
            return first.node.meta.is_floating_point()
        if name in _WITHOUT_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if run.values is None and run.whole is None and name not in _WITH_VALUE:
            try:
                return _record(run, first.device, func, args, kwargs)
            except (RuntimeError, NotImplementedError):
                pass  # its shape depends on values, as that of a selection by a mask, or the like
        known = tree_map_only(torch.Tensor, _known, (args, kwargs))
        return func(*known[0], **known[1])


def _known(t: torch.Tensor) -> torch.Tensor:
    return t.run.known(t) if isinstance(t, Deferred) else t


def _backward(
    run: DeferredRun,
    root: Deferred,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``Tensor.backward`` of a deferred loss.

    Raises:
        ValueError: for arguments that a schedule has no use for.
    """
    if create_graph or inputs is not None:
        raise ValueError(
            "backward() of a pipeline with a schedule of PyTorch's takes neither create_graph=True "
            'nor inputs=: use schedule="GPipe"'
        )
    run.backward((root if gradient is None else root * gradient).node)


def _record(run: DeferredRun, device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
    """The deferred result of a function.

    Raises:
        NotImplementedError: it cannot be deferred.
    """
    tensors = tensors_in((args, kwargs))
    in_place = is_in_place(func)
    # A change in place may be seen through views, and the gradient of another leaf is needed on all
    # ranks.
    if in_place and not (isinstance(args[0], Deferred) and not args[0].node.meta.dim()):
        raise NotImplementedError
    if any(t.requires_grad for t in tensors if not isinstance(t, Deferred)):
        raise NotImplementedError
    lengths = frozenset(t.shape[0] for t in tensors if isinstance(t, Deferred) and t.dim())
    # Those of earlier batches have values by now.
    args, kwargs = tree_map_only(
        Deferred, lambda t: t if t.run is run else _known(t), (args, kwargs)
    )
    metas = tree_map_only(torch.Tensor, _meta_of, (args, kwargs))
    with torch.no_grad(), OnMeta(device):
        out = func(*metas[0], **metas[1])
    if not isinstance(out, torch.Tensor):
        if tensors_in(out):
            raise NotImplementedError
        return out
    grad = torch.is_grad_enabled()
    node = Recorded(out, None, func, args, kwargs, grad, autocast_state(), lengths)
    run.nodes.append(node)
    result = Deferred(device, run, node)
    if in_place:  # the script's own name for it goes on with the new value
        node.args = (Deferred(device, run, args[0].node), *args[1:])
        args[0].node = node
    return result


def _meta_of(t: torch.Tensor) -> torch.Tensor:
    return t.node.meta.clone() if isinstance(t, Deferred) else t.to("meta")


def means_or_sums(
    found: Sequence[Sequence[torch.Tensor]], whole: Sequence[torch.Tensor]
) -> list[bool | None]:
    """Whether each number is a sum over samples, a mean (False), or neither (None).

    Zeros could be both: integers are then sums, others means. So could NaN and infinity, and count
    as means.

    Args:
        found: by micro-batch, each number.
        whole: for the whole batch.
    """
    kinds: list[bool | None] = []
    for column, value in zip(zip(*found, strict=True), whole, strict=True):
        stacked = torch.stack([t.double() for t in column])
        near = _TOLERANCE * max(float(value.abs()), float(stacked.abs().max()), 1e-30)
        by_mean = abs(float(stacked.mean()) - float(value)) <= near
        by_sum = abs(float(stacked.sum()) - float(value)) <= near
        both = by_mean and by_sum and not column[0].is_floating_point()
        by_mean |= not math.isfinite(value)
        kinds.append(True if both else False if by_mean else True if by_sum else None)
    return kinds
