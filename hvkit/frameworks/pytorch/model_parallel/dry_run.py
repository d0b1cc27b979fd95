"""One run of a model's own forward without its weights: where it can be cut, and what it costs.

Parameters are on the meta device, which knows shapes and computes nothing. So whatever depends on a
parameter is on the meta device as well, and the rest, such as masks and positions, is real: a
forward may look at it. Nothing is traced or exported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hvkit.frameworks.pytorch.model_parallel.cut_places import CutPlace, ForwardTrace
from hvkit.frameworks.pytorch.model_parallel.kept_results import KeptResults, Path
from hvkit.frameworks.pytorch.model_parallel.meta_device import (
    OnMeta,
    explaining_meta,
    forward_on_meta,
    on_meta,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    bytes_of,
    copied_call,
    storage_of,
    tensors_in,
)


@dataclass(frozen=True)
class Kept:
    """A tensor that autograd keeps for backward.

    Attributes:
        time: when an operation kept it.
        storage: the number of its memory, which several operations may keep.
        nbytes: of this memory.
    """

    time: int
    storage: int
    nbytes: int


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found.

    Attributes:
        places: where the model can be cut, in the order of forward.
        closed: modules from inside of which nothing is used later but their output, all of which
            is new and depends on weights.
        reads: by parameter, when it is used.
        calls: by module, when its first call began.
        writes: by buffer that is changed in place, when it is last.
        saved: what is kept for backward, without parameters.
        flops: of the whole forward.
        nbytes: of its result.
        kept: where it keeps results beside what it returns.
        floats: where it keeps Python floats.
        looking: those of the closed modules that look at values which depend on weights.
        lookers: the modules in whose own code it does, closed or not.
        looked: PyTorch's error where the forward first looks at one; None if it does not.
    """

    places: tuple[CutPlace, ...]
    closed: tuple[str, ...]
    reads: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, int]
    writes: Mapping[str, int]
    saved: tuple[Kept, ...]
    flops: int
    nbytes: int
    kept: tuple[Path, ...] = ()
    floats: tuple[str, ...] = ()
    looking: tuple[str, ...] = ()
    lookers: tuple[str, ...] = ()
    looked: Exception | None = None


def dry_run(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
    passed_on: Sequence[Path] = (),
) -> DryRun:
    """Run the model's forward without its weights.

    Random generators, buffers and gradients stay as they are.

    Args:
        passed_on: where the forward keeps results that stages pass on.

    Raises:
        ValueError: the forward looks at a value that depends on weights.
    """
    trace, found = _followed(model, args, kwargs, device, passed_on, 1)
    if not trace.looks:
        return found
    # Where it looks at values, shapes must not depend on them, if later stages know shapes alone.
    inside = [each for each in trace.closed() if any(map(each.includes, trace.looks))]
    try:
        of_zeros, _ = _followed(model, args, kwargs, device, passed_on, 0)
        shapes = {each.module: each.shapes for each in of_zeros.closed()}
    except Exception:  # of any type: the model's, which gets no samples
        shapes = {}
    safe = [
        each for each in inside if shapes.get(each.module, each.shapes) == each.shapes and shapes
    ]
    unsafe = {each.module for each in inside} - {each.module for each in safe}
    # From when until when each look may not be repeated.
    spans = [
        (time, min((each.ended for each in safe if each.includes(time)), default=sys.maxsize))
        for time in trace.looks
    ]
    places = [place for place in found.places if not any(a <= place.time < b for a, b in spans)]
    return replace(
        found,
        places=tuple(places),
        closed=tuple(name for name in found.closed if name not in unsafe),
        looking=tuple(each.module for each in safe),
        lookers=tuple(trace.lookers),
        looked=trace.looked,
    )


def _followed(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
    passed_on: Sequence[Path],
    value: int,
) -> tuple[ForwardTrace, DryRun]:
    """A dry run in which the forward sees ``value`` wherever it looks at values."""
    flops, kept = FlopCounterMode(display=False), KeptResults(model, passed_on)
    meta, names = on_meta(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    trace = ForwardTrace(model, buffers, flops, kept)
    saved = _Saved(trace, meta.values())
    args, kwargs = copied_call(args, kwargs)
    trace.begin_with((args, kwargs))
    kept.begin()
    modes = [
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(saved.keep, _as_it_is),
        _fused_attention(saved, device),
        trace.calls_followed(),
        OnMeta(device, trace.look, value),
        trace,
        flops,
    ]
    run = forward_on_meta(model, {**meta, **buffers}, args, kwargs, device, modes)
    with explaining_meta(), run as (out, anywhere):
        trace.end_with(out)
        kept_at_end, _ = kept.tensors()
        found = DryRun(
            places=tuple(trace.places(kept_at_end)),
            closed=tuple(each.module for each in trace.closed()),
            reads={names[p]: tuple(times) for p, times in trace.reads.items() if p in names},
            calls=trace.begun,
            writes=trace.writes,
            saved=tuple(saved.found),
            flops=flops.get_total_flops(),
            nbytes=bytes_of(tensors_in(out)),
            kept=tuple(
                path
                for path, each in anywhere.changes().items()
                if any(map(trace.is_result, tensors_in(each.value)))
            ),
            floats=anywhere.floats(),
        )
    return trace, found


class _Saved:
    """What autograd keeps for backward.

    Args:
        trace: its clock.
        parameters: which are in memory anyway, also where a view of one is kept.
    """

    def __init__(self, trace: ForwardTrace, parameters: Iterable[nn.Parameter]) -> None:
        self._trace = trace
        self._parameters = set(map(storage_of, parameters))
        self.found: list[Kept] = []
        # The number of a storage is used again when nobody holds it.
        self._alive: list[Any] = []

    def keep(self, t: torch.Tensor) -> torch.Tensor:
        storage, number = t.untyped_storage(), storage_of(t)
        if t.is_meta and number not in self._parameters:
            self.found.append(Kept(self._trace.time, number, storage.nbytes()))
            self._alive.append(storage)
        return t


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


@contextmanager
def _fused_attention(saved: _Saved, device: torch.device) -> Iterator[None]:
    """Has attention keep what the kernels of a device keep: on meta, PyTorch takes its slow path.

    That one keeps the products of all queries and keys. The result is kept by what takes it, in
    the same memory, because kernels lay it out so.
    """
    module: Any = functional
    own = module.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        run = functools.partial(own, query, key, value, attn_mask, dropout_p, *args, **kwargs)
        if dropout_p and device.type == "cpu":  # the slow path is the only one there
            return cast(torch.Tensor, run())
        # Of nested hooks the innermost ones count.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            out = cast(torch.Tensor, run())
        for t in (query, key, value) if out.requires_grad else ():
            saved.keep(t)
        return out

    module.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        module.scaled_dot_product_attention = own
