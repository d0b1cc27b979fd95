"""Divides a model into stages: cuts, and the stage of each parameter, buffer and module.

A dry run of the model's own forward shows where it can be cut and what it costs. Parameters are on
the meta device, which knows shapes and computes nothing. So all that depends on a parameter is on
the meta device as well. The rest, such as masks and positions, is real: a forward may read its
values. Nothing is traced or exported.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hvkit.frameworks.pytorch.model_parallel.cut_places import ForwardTrace, ModuleCut
from hvkit.frameworks.pytorch.model_parallel.meta_device import (
    OnMeta,
    explaining_meta,
    forward_on_meta,
    needs_values,
    on_meta,
)
from hvkit.frameworks.pytorch.model_parallel.side_outputs import OutputPath, SideOutputs
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import (
    bytes_of,
    copied_call,
    storage_of,
    tensors_in,
)
from hvkit.pipeline.gpipe import Stages, balanced_cuts, named_cuts, require_places

UNEVEN = 1.5
"""A stage with more than so many times the mean share is too large."""


@dataclass(frozen=True)
class ModuleStages(Stages):
    """The stages of a PyTorch model; ``of_weight`` has the names of parameters.

    A parameter that no stage uses belongs to the stage of its module, or to the first one. By name,
    ``of_buffer`` has the stage that changes a buffer last, ``of_module`` that in which a module's
    first call begins. By stage and for a micro-batch, ``saved`` has the bytes that autograd keeps,
    ``output_bytes`` those of its result.
    """

    of_buffer: Mapping[str, int]
    of_module: Mapping[str, int]
    saved: tuple[int, ...]
    output_bytes: tuple[int, ...]

    def buffer_holder(self, buffer: str) -> int:
        if buffer in self.of_buffer:
            return self.rank_of[self.of_buffer[buffer]]
        return self.rank_of[self.of_module.get(_owner(buffer, self.of_module), 0)]


def ranks_of_stages(ranks: int, per_rank: int, *, v_shaped: bool) -> tuple[int, ...]:
    """The rank of each stage: 0 1 0 1 for two ranks with two stages each, or 0 1 1 0 in a V."""
    count = ranks * per_rank
    return tuple(min(s, count - 1 - s) if v_shaped else s % ranks for s in range(count))


def plan_stages(
    model: nn.Module,
    found: DryRun,
    rank_of: Sequence[int],
    choice: Sequence[str] | str = "flops",
) -> ModuleStages:
    """Divide a model into stages, after the modules of ``choice``, or evenly by FLOPs or bytes."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    if isinstance(choice, str):
        cuts = _balanced(found, sizes, len(rank_of), choice)
    else:
        cuts = named_cuts(choice, found.places, len(rank_of))
    times = [cut.time for cut in cuts]

    def stage_at(time: int) -> int:
        return bisect.bisect_left(times, time)

    of_weight = {
        name: tuple(sorted({stage_at(time) for time in found.uses.get(name, ())}))
        # One without use, as of an idle expert, belongs to its module.
        or (stage_at(found.calls.get(_owner(name, found.calls), -1) + 1),)
        for name in sizes
    }
    nbytes, saved = [0] * len(rank_of), [0] * len(rank_of)
    for name, stages in of_weight.items():
        for stage in stages:
            nbytes[stage] += sizes[name]
    # Two stages on different ranks may both save the tensor that one sends to the other.
    sizes_saved = {(stage_at(each.time), each.storage): each.nbytes for each in found.saved}
    for (stage, _), size in sizes_saved.items():
        saved[stage] += size
    flops = [0, *(cut.flops for cut in cuts), found.flops]
    return ModuleStages(
        cuts=tuple(cuts),
        rank_of=tuple(rank_of),
        of_weight=of_weight,
        of_buffer={name: stage_at(time) for name, time in found.writes.items()},
        # A call that begins at the time of a cut computes in the next stage.
        of_module={name: stage_at(begun + 1) for name, begun in found.calls.items()},
        flops=tuple((b - a) / max(found.flops, 1) for a, b in itertools.pairwise(flops)),
        nbytes=tuple(nbytes),
        saved=tuple(saved),
        output_bytes=(*(cut.nbytes for cut in cuts), found.nbytes),
    )


def _owner(name: str, calls: Mapping[str, int]) -> str:
    """The innermost module around a parameter or buffer that is called, or an empty text."""
    while name and name not in calls:
        name = name.rpartition(".")[0]
    return name


def _balanced(
    found: DryRun, sizes: Mapping[str, int], stages: int, balance: str
) -> list[ModuleCut]:
    # A last stage without weights would have nothing to do.
    last_use = max(time for times in found.uses.values() for time in times)
    places = [place for place in found.places if place.time < last_use]
    if len(places) < stages - 1 and found.read_error is not None:
        raise needs_values(found.read_error)
    condition = (
        "after a module if all that is used later and depends on weights is what modules return "
        "that are called once"
    )
    require_places(balance, stages, places, "module", condition)

    def best_of(some: Sequence[ModuleCut]) -> tuple[list[ModuleCut], float]:
        ends = [0, *(place.time for place in some), math.inf]
        flops = [0, *(place.flops for place in some), found.flops]

        def cost(start: int, stop: int) -> int:
            if balance == "flops":
                return flops[stop] - flops[start]
            return sum(
                sizes[name]
                for name, times in found.uses.items()
                if any(ends[start] < time <= ends[stop] for time in times)
            )

        return balanced_cuts(stages, some, cost)

    # Prefer cuts that only the output of one module crosses: they send less.
    alone = [place for place in places if not place.skips]
    tried = [best_of(alone)] if len(alone) >= stages - 1 else []
    if not tried or tried[0][1] > UNEVEN / stages:
        tried.append(best_of(places))
    return min(tried, key=lambda each: each[1])[0]


@dataclass(frozen=True)
class SavedActivation:
    """Memory that autograd saves for backward at this time, perhaps not for the first time."""

    time: int
    storage: int
    nbytes: int


@dataclass(frozen=True)
class DryRun:
    """The findings of a dry run; times count operations."""

    places: tuple[ModuleCut, ...]
    # Modules that later stages need not run; the shapes of their output are enough.
    shape_only: tuple[str, ...]
    uses: Mapping[str, tuple[int, ...]]  # by parameter
    calls: Mapping[str, int]  # by module, when its first call began
    writes: Mapping[str, int]  # by buffer that is changed in place, when it is changed last
    saved: tuple[SavedActivation, ...]  # without parameters
    flops: int
    nbytes: int  # of the result
    side_outputs: tuple[OutputPath, ...] = ()
    floats: tuple[str, ...] = ()  # where the forward keeps Python floats
    reading: tuple[str, ...] = ()  # those of shape_only that read values which depend on weights
    value_readers: tuple[str, ...] = ()  # all modules that do so in their own code
    read_error: Exception | None = None  # PyTorch's, where the forward first reads one


def dry_run(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
    passed_on: Sequence[OutputPath] = (),
) -> DryRun:
    """Run the forward without weights; random generators, buffers and gradients do not change."""
    trace, found = _traced(model, args, kwargs, device, passed_on, 1)
    if not trace.value_reads:
        return found
    # Later stages know only the shapes of a module: these must not depend on values that it reads.
    inside = [each for each in trace.shape_only() if any(map(each.includes, trace.value_reads))]
    try:
        of_zeros, _ = _traced(model, args, kwargs, device, passed_on, 0)
        shapes = {each.module: each.shapes for each in of_zeros.shape_only()}
    except Exception:  # the model may raise any type
        shapes = {}
    safe = [
        each for each in inside if shapes.get(each.module, each.shapes) == each.shapes and shapes
    ]
    unsafe = {each.module for each in inside} - {each.module for each in safe}
    # A cut between these times would repeat the read of a value.
    spans = [
        (time, min((each.ended for each in safe if each.includes(time)), default=sys.maxsize))
        for time in trace.value_reads
    ]
    places = [place for place in found.places if not any(a <= place.time < b for a, b in spans)]
    return replace(
        found,
        places=tuple(places),
        shape_only=tuple(name for name in found.shape_only if name not in unsafe),
        reading=tuple(each.module for each in safe),
        value_readers=tuple(trace.value_readers),
        read_error=trace.read_error,
    )


def _traced(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
    passed_on: Sequence[OutputPath],
    value: int,
) -> tuple[ForwardTrace, DryRun]:
    """A dry run in which the forward gets ``value`` wherever it reads values."""
    flops, side_outputs = FlopCounterMode(display=False), SideOutputs(model, passed_on)
    meta, names = on_meta(model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    trace = ForwardTrace(model, buffers, flops, side_outputs)
    parameters, saved = set(map(storage_of, meta.values())), list[SavedActivation]()
    alive: list[Any] = []  # storages, so that no other one gets the same number

    def save(t: torch.Tensor) -> torch.Tensor:
        """Note what autograd saves for backward; parameters are in memory anyway."""
        storage, number = t.untyped_storage(), storage_of(t)
        if t.is_meta and number not in parameters:
            saved.append(SavedActivation(trace.time, number, storage.nbytes()))
            alive.append(storage)
        return t

    args, kwargs = copied_call(args, kwargs)
    trace.note_arguments((args, kwargs))
    side_outputs.begin()
    modes = [
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(save, _unchanged),
        _fused_attention(save, device),
        trace.calls_followed(),
        OnMeta(device, trace.note_value_read, value),
        trace,
        flops,
    ]
    run = forward_on_meta(model, {**meta, **buffers}, args, kwargs, device, modes)
    with explaining_meta(), run as (out, anywhere):
        trace.note_result(out)
        at_end, _ = side_outputs.tensors()
        found = DryRun(
            places=tuple(trace.places(at_end)),
            shape_only=tuple(each.module for each in trace.shape_only()),
            uses={names[p]: tuple(times) for p, times in trace.uses.items() if p in names},
            calls=trace.begun,
            writes=trace.writes,
            saved=tuple(saved),
            flops=flops.get_total_flops(),
            nbytes=bytes_of(tensors_in(out)),
            side_outputs=tuple(
                path
                for path, each in anywhere.changes().items()
                if any(map(trace.is_result, tensors_in(each.value)))
            ),
            floats=anywhere.floats(),
        )
    return trace, found


def _unchanged(t: torch.Tensor) -> torch.Tensor:
    return t


@contextmanager
def _fused_attention(
    save: Callable[[torch.Tensor], object], device: torch.device
) -> Iterator[None]:
    """Lets attention save what the kernels of a device save: on meta, PyTorch takes its slow path.

    The slow path saves the products of all queries and keys. The next operation saves the result
    of attention, in the same memory as the kernel. A TorchFunctionMode would not see the attention
    inside of ``multi_head_attention_forward``.
    """
    module: Any = functional
    original = module.scaled_dot_product_attention
    names = ("query", "key", "value", "attn_mask", "dropout_p")

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = dict(zip(names, args, strict=False)) | kwargs
        if named.get("dropout_p") and device.type == "cpu":  # it has the slow path only
            return cast(torch.Tensor, original(*args, **kwargs))
        # PyTorch calls only the innermost hooks.
        with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
            out = cast(torch.Tensor, original(*args, **kwargs))
        for name in names[:3] if out.requires_grad else ():
            save(named[name])
        return out

    module.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        module.scaled_dot_product_attention = original
