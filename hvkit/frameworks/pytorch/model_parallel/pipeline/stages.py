"""Divides a model into stages: cuts, and the stage of each parameter, buffer and module."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hvkit.frameworks.pytorch.model_parallel.cut_places import ModuleCut
from hvkit.frameworks.pytorch.model_parallel.dry_run import DryRun
from hvkit.frameworks.pytorch.model_parallel.meta_device import needs_values
from hvkit.pipeline.stages import Stages, balanced_cuts, named_cuts, require_places

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
