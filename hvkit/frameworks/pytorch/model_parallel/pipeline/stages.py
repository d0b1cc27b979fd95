"""Which stage of a pipeline holds what: cuts, parameters, buffers, and a prediction of memory."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from hvkit.frameworks.pytorch.model_parallel.cut_places import CutPlace
from hvkit.frameworks.pytorch.model_parallel.dry_run import DryRun
from hvkit.frameworks.pytorch.model_parallel.meta_device import needs_values
from hvkit.frameworks.stage_division import balanced_cuts

Balance = Literal["flops", "bytes"]
BALANCES = get_args(Balance)

UNEVEN = 1.5
"""Times the mean share of a stage that is too much."""


@dataclass(frozen=True)
class Stages:
    """The stages of a model.

    Attributes:
        cuts: between each stage and the next.
        rank_of: by stage, the rank along the pipeline axis that holds it.
        of_parameter: by name, the stages that use a parameter, in ascending order. One that none
            uses is that of the module which holds it, or the first.
        of_buffer: by name, the stage that changes a buffer last, of those that a forward changes.
        of_module: by name, the stage in which a module's first call begins.
        flops: by stage, the share of forward, from 0 to 1.
        nbytes: by stage, of its parameters.
        saved: by stage, bytes that autograd keeps for backward, for a micro-batch.
        given: by stage, bytes of what it gives to the next one, for a micro-batch; of the last one,
            of the model's result.
    """

    cuts: tuple[CutPlace, ...]
    rank_of: tuple[int, ...]
    of_parameter: Mapping[str, tuple[int, ...]]
    of_buffer: Mapping[str, int]
    of_module: Mapping[str, int]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]
    saved: tuple[int, ...]
    given: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rank_of)

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

    def described(self) -> str:
        """A line for each stage, for the log."""
        lines = []
        for stage, rank in enumerate(self.rank_of):
            where = "" if rank == stage else f" (rank {rank} of the pipeline)"
            cut = f"; cut after {self.cuts[stage]}" if stage < len(self.cuts) else ""
            lines.append(
                f"stage {stage}{where}: {self.flops[stage]:.0%} of the FLOPs, "
                f"{megabytes(self.nbytes[stage])} MB of weights{cut}"
            )
        return "\n    ".join(lines)


def megabytes(nbytes: int) -> str:
    """Bytes as a number of 10^6 bytes, in three digits: ``0.412``, ``41.2``; from 100 on whole."""
    number = nbytes / 1e6
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


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
    by_name = {place.module: place for place in found.places}
    if isinstance(choice, str):
        cuts = _balanced(found, sizes, len(rank_of), choice)
    else:
        for name in choice:
            if name not in by_name:
                raise ValueError(
                    f"stages={list(choice)}: the model cannot be cut after {name!r}, only after "
                    f"{_listed(found.places)}"
                )
        cuts = sorted((by_name[name] for name in choice), key=lambda cut: cut.time)
        if len(cuts) != len(rank_of) - 1:
            raise ValueError(
                f"stages={list(choice)} makes {len(cuts) + 1} stages, but the pipeline has "
                f"{len(rank_of)}: name {len(rank_of) - 1} module(s)"
            )
    times = [cut.time for cut in cuts]

    def stage_at(time: int) -> int:
        return bisect.bisect_left(times, time)

    of_parameter = {
        name: tuple(sorted({stage_at(time) for time in found.reads.get(name, ())}))
        or (stage_at(_call_around(name, found) + 1),)
        for name in sizes
    }
    ends = [*(cut.flops for cut in cuts), found.flops]
    starts = [0, *ends]
    nbytes, saved = [0] * len(rank_of), [0] * len(rank_of)
    for name, stages in of_parameter.items():
        for stage in stages:
            nbytes[stage] += sizes[name]
    # What a stage passes on may be kept by the next one as well, on another rank.
    kept = {(stage_at(each.time), each.storage): each.nbytes for each in found.saved}
    for (stage, _), size in kept.items():
        saved[stage] += size
    return Stages(
        cuts=tuple(cuts),
        rank_of=tuple(rank_of),
        of_parameter=of_parameter,
        of_buffer={name: stage_at(time) for name, time in found.writes.items()},
        # A call that begins right after a cut has not computed anything yet.
        of_module={name: stage_at(begun + 1) for name, begun in found.calls.items()},
        flops=tuple(
            (end - start) / max(found.flops, 1) for start, end in zip(starts, ends, strict=False)
        ),
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


def _listed(places: Sequence[CutPlace]) -> str:
    return ", ".join(place.module for place in places) or "no module at all"


def _balanced(
    found: DryRun, sizes: Mapping[str, int], stages: int, balance: Balance | str
) -> list[CutPlace]:
    """The cuts that make the largest stage smallest.

    Raises:
        ValueError: there are too few places.
    """
    if balance not in BALANCES:
        raise ValueError(
            f"stages must be {' or '.join(map(repr, BALANCES))}, or a list of the modules after "
            f"which to cut, got {balance!r}"
        )
    # A last stage without weights would have nothing to do.
    last_read = max(time for times in found.reads.values() for time in times)
    places = [place for place in found.places if place.time < last_read]
    if len(places) < stages - 1 and found.looked is not None:
        raise needs_values(found.looked)
    if len(places) < stages - 1:
        raise ValueError(
            f"a pipeline of {stages} stages needs {stages - 1} places to cut the model, but there "
            f"are {len(places)}: after {_listed(places)}. A model can be cut after a module if all "
            "that is used later and depends on weights is what modules return that are called once"
        )
    found_cuts, most = [], math.inf
    # Cuts that one module's output crosses come first: they send less.
    for some in ([place for place in places if not place.beside], places):
        if len(some) < stages - 1 or most <= UNEVEN / stages:
            continue
        cuts, share = _cuts_of(found, sizes, stages, balance, some)
        if share < most:
            found_cuts, most = cuts, share
    return found_cuts


def _cuts_of(
    found: DryRun,
    sizes: Mapping[str, int],
    stages: int,
    balance: str,
    places: Sequence[CutPlace],
) -> tuple[list[CutPlace], float]:
    """The cuts at some places that make the largest stage smallest, and its share of the whole."""
    last = len(places) + 1
    ends = [0, *(place.time for place in places), math.inf]
    flops = [0, *(place.flops for place in places), found.flops]
    crossing = [0, *(place.nbytes for place in places), 0]

    def cost(start: int, stop: int) -> int:
        if balance == "flops":
            return flops[stop] - flops[start]
        return sum(
            sizes[name]
            for name, times in found.reads.items()
            if any(ends[start] < time <= ends[stop] for time in times)
        )

    costs = {(i, j): cost(i, j) for j in range(1, last + 1) for i in range(j)}
    chosen = balanced_cuts(stages, costs, crossing)
    borders = [0, *chosen, last]
    most = max(costs[pair] for pair in itertools.pairwise(borders))
    return [places[j - 1] for j in chosen], most / max(costs[0, last], 1)
