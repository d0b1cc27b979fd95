"""Which stage of a pipeline holds what: cuts, parameters, buffers, and a prediction of memory."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hvkit.frameworks.pytorch.model_parallel.cut_places import CutPlace
from hvkit.frameworks.pytorch.model_parallel.dry_run import DryRun
from hvkit.frameworks.pytorch.model_parallel.meta_device import needs_values
from hvkit.pipeline.stages import Division, balanced_cuts, check_balance, named_cuts

UNEVEN = 1.5
"""Times the mean share of a stage that is too much."""


@dataclass(frozen=True)
class Stages(Division):
    """The stages of a model.

    Attributes:
        of_parameter: by name, the stages that use a parameter, in ascending order. One that none
            uses is that of the module which holds it, or the first.
        of_buffer: by name, the stage that changes a buffer last, of those that a forward changes.
        of_module: by name, the stage in which a module's first call begins.
        saved: by stage, bytes that autograd keeps for backward, for a micro-batch.
        given: by stage, bytes of what it gives to the next one, for a micro-batch; of the last one,
            of the model's result.
    """

    of_parameter: Mapping[str, tuple[int, ...]]
    of_buffer: Mapping[str, int]
    of_module: Mapping[str, int]
    saved: tuple[int, ...]
    given: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a rank of the pipeline axis holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def holders(self, parameter: str) -> list[int]:
        """The ranks of the pipeline axis that hold a parameter, in ascending order."""
        return sorted({self.rank_of[stage] for stage in self.of_parameter[parameter]})

    def buffer_holder(self, buffer: str) -> int:
        """The rank of the pipeline axis whose value of a buffer counts."""
        if buffer in self.of_buffer:
            return self.rank_of[self.of_buffer[buffer]]
        module = buffer.rpartition(".")[0]
        while module and module not in self.of_module:
            module = module.rpartition(".")[0]
        return self.rank_of[self.of_module.get(module, 0)]


def ranks_of_stages(ranks: int, per_rank: int, *, v_shaped: bool) -> tuple[int, ...]:
    """The rank of each stage: 0 1 0 1 for two ranks with two stages each, or 0 1 1 0 in a V."""
    count = ranks * per_rank
    return tuple(min(s, count - 1 - s) if v_shaped else s % ranks for s in range(count))


def plan_stages(
    model: nn.Module,
    found: DryRun,
    rank_of: Sequence[int],
    choice: Sequence[str] | str = "flops",
) -> Stages:
    """Divide a model into stages.

    Args:
        model: with its whole parameters, also on the meta device.
        found: by a dry run.
        rank_of: by stage.
        choice: the modules after which to cut, or what the largest stage should have least of.

    Raises:
        ValueError: there are too few places, or a module is none of them; names those there are.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    if isinstance(choice, str):
        cuts = _balanced(found, sizes, len(rank_of), choice)
    else:
        places = {place.module: place for place in found.places}
        cuts = named_cuts(choice, places, len(rank_of))
    times = [cut.time for cut in cuts]

    def stage_at(time: int) -> int:
        return bisect.bisect_left(times, time)

    of_parameter = {
        name: tuple(sorted({stage_at(time) for time in found.reads.get(name, ())}))
        or (stage_at(_call_around(name, found) + 1),)
        for name in sizes
    }
    nbytes, saved = [0] * len(rank_of), [0] * len(rank_of)
    for name, stages in of_parameter.items():
        for stage in stages:
            nbytes[stage] += sizes[name]
    # What a stage passes on may be kept by the next one as well, on another rank.
    kept = {(stage_at(each.time), each.storage): each.nbytes for each in found.saved}
    for (stage, _), size in kept.items():
        saved[stage] += size
    flops = [0, *(cut.flops for cut in cuts), found.flops]
    return Stages(
        cuts=tuple(cuts),
        rank_of=tuple(rank_of),
        of_parameter=of_parameter,
        of_buffer={name: stage_at(time) for name, time in found.writes.items()},
        # A call that begins right after a cut has not computed anything yet.
        of_module={name: stage_at(begun + 1) for name, begun in found.calls.items()},
        flops=tuple((b - a) / max(found.flops, 1) for a, b in itertools.pairwise(flops)),
        nbytes=tuple(nbytes),
        saved=tuple(saved),
        given=(*(cut.nbytes for cut in cuts), found.nbytes),
    )


def _call_around(name: str, found: DryRun) -> int:
    """When the call began of what holds a parameter, as of an expert that got no samples."""
    while name:
        name = name.rpartition(".")[0]
        if name in found.calls:
            return found.calls[name]
    return -1


def _balanced(found: DryRun, sizes: Mapping[str, int], stages: int, balance: str) -> list[CutPlace]:
    """The cuts that make the largest stage smallest.

    Raises:
        ValueError: there are too few places.
    """
    check_balance(balance, "modules")
    # A last stage without weights would have nothing to do.
    last_read = max(time for times in found.reads.values() for time in times)
    places = [place for place in found.places if place.time < last_read]
    if len(places) < stages - 1:
        if found.looked is not None:
            raise needs_values(found.looked)
        names = ", ".join(place.module for place in found.places) or "no module at all"
        raise ValueError(
            f"a pipeline of {stages} stages needs {stages - 1} places to cut the model, but there "
            f"are {len(places)}: after {names}. A model can be cut after a module if all "
            "that is used later and depends on weights is what modules return that are called once"
        )
    found_cuts, most = [], math.inf
    # Cuts that one module's output crosses come first: they send less.
    for some in ([place for place in places if not place.beside], places):
        if len(some) < stages - 1 or most <= UNEVEN / stages:
            continue
        ends = [0, *(place.time for place in some), math.inf]
        flops = [0, *(place.flops for place in some), found.flops]

        def cost(start: int, stop: int, ends: Any = ends, flops: Any = flops) -> int:
            if balance == "flops":
                return int(flops[stop] - flops[start])
            return sum(
                sizes[name]
                for name, times in found.reads.items()
                if any(ends[start] < time <= ends[stop] for time in times)
            )

        cuts, share = balanced_cuts(stages, some, cost)
        if share < most:
            found_cuts, most = cuts, share
    return found_cuts
