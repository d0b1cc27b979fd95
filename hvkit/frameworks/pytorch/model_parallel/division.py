"""Decides from a model's first batch how the ranks of a mesh divide the model."""

from __future__ import annotations

import bisect
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import MicroBatch
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import (
    UNEVEN,
    DryRun,
    ModuleStages,
    SavedActivation,
    dry_run,
    plan_stages,
    ranks_of_stages,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.torch_schedules import (
    STAGES_PER_RANK,
    V_SHAPED,
)
from hvkit.frameworks.pytorch.model_parallel.rank_groups import hash_of
from hvkit.frameworks.pytorch.model_parallel.side_outputs import OutputPath
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import (
    TensorPlan,
    in_both_modes,
    plan_layers,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import samples_in
from hvkit.frameworks.pytorch.torch_distributed import TorchChannel
from hvkit.log import shortened
from hvkit.main_rank import warn_once
from hvkit.mesh import MeshOptions

T = TypeVar("T")


def decide(
    model: nn.Module,
    options: MeshOptions,
    device: torch.device,
    first: MicroBatch,
    args: Any,
    kwargs: Any,
    same_batch: TorchChannel,
) -> tuple[DryRun, TensorPlan, ModuleStages]:
    """Decide how to divide a model; a collective of the ranks that compute on the same batch."""

    def look(passed_on: Sequence[OutputPath] = ()) -> DryRun:
        run = functools.partial(dry_run, model, device=device, passed_on=passed_on)
        found = other = _dry_run(run, first, args, kwargs)
        if options.mesh.pipeline > 1:
            # Errors of any type: in training the model may need targets, which are missing.
            with _other_mode(model), suppress(Exception):
                other = run(first.args, first.kwargs)
        return _in_both_modes(found, other, options)

    found = look()
    kept = _on_all_ranks(found.side_outputs, same_batch)
    if kept and options.mesh.pipeline > 1:
        found = look(kept)
    found = replace(found, side_outputs=tuple(kept))
    plan = _same_on_all(_tensor_plan(model, options, first), same_batch)
    stages = _stages_of(model, options, outside_divided_layers(found, plan))
    chosen = not isinstance(options.stages, str)
    if not chosen and (largest := max(stages.flops)) > UNEVEN / len(stages):
        warn_once(
            "uneven stages",
            f"one of {len(stages)} stages takes {largest:.0%} of the FLOPs: the model can be "
            f"cut only after {', '.join(place.name for place in found.places)}. Where a "
            "skip connection passes by a module, `x = x + block(x)`, move it into the module",
        )
    if plan.ways > 1 and not plan.divisions:
        warn_once(
            "tensor axis without effect",
            f"{options.mesh} divides no layer of {type(model).__name__} along its tensor "
            "axis, so its ranks all compute the same: use the data, shard or pipeline axis",
        )
    return found, plan, stages


def _on_all_ranks(kept: Sequence[OutputPath], same_batch: TorchChannel) -> list[OutputPath]:
    """Those places where the forward of every rank keeps something, not hooks of rank 0."""
    named = {repr(path): path for path in kept}
    names = same_batch.object_from_rank(0, list(named))
    if not names:
        return []
    on_ranks = same_batch.gather_numbers([name in named for name in names]).tolist()
    return [named[name] for name, *found in zip(names, *on_ranks, strict=True) if all(found)]


def _same_on_all(plan: TensorPlan, same_batch: TorchChannel) -> TensorPlan:
    """Keep the sequence whole if ranks see different operations, as in a hook on rank 0 alone."""
    if plan.ways == 1:
        return plan
    own = hash_of([(each.begins, each.ends, each.others) for each in plan.sequence_regions])
    if len(set(same_batch.gather_numbers([own]).flatten().tolist())) == 1:
        return plan
    why = "stay whole: a forward on one rank does more than on another, perhaps in a hook"
    return replace(plan, sequence_regions=(), whole_regions=(*plan.whole_regions, why))


def _dry_run(run: Callable[..., DryRun], first: MicroBatch, args: Any, kwargs: Any) -> DryRun:
    samples = samples_in(args, kwargs)
    try:
        return run(first.args, first.kwargs)
    except Exception as error:  # of any type: the model's
        if first.samples == samples:
            raise
        run(args, kwargs)  # it may raise for the full batch, too
        raise ValueError(
            f"the model takes the whole batch of {samples} samples, but not a micro-batch of "
            f"{first.samples}: {type(error).__name__}: {error}. A pipeline divides each input "
            f"whose first dimension is as long as the batch, here {samples}, and leaves the "
            "others whole. Inputs of samples, also states of recurrent layers, must have the "
            "batch as their first dimension, and others, such as masks, must not be as long: "
            "make those a buffer of the model, or expand them to the batch"
        ) from error


def _in_both_modes(found: DryRun, other: DryRun, options: MeshOptions) -> DryRun:
    """Add what a forward does in the other mode only, training or evaluation, as a head's loss.

    A cut must pass on the same tensors in both modes.
    """
    other_places = {place.name: place for place in other.places}
    places = tuple(
        place
        for place in found.places
        if (other_place := other_places.get(place.name))
        and (other_place.skips, other_place.aliases) == (place.skips, place.aliases)
    )
    names = {place.name for place in places}
    chosen = isinstance(options.stages, str) or names.issuperset(options.stages)
    cuts = options.mesh.pipeline * STAGES_PER_RANK[options.schedule] - 1
    if len(places) < cuts or not chosen:  # the cuts of this mode do not fit the other
        places = found.places

    known = [(p.time, other_places[p.name].time) for p in places if p.name in other_places]

    def here(time: int) -> int:
        """A time between the same places in the mode of the first call."""
        return max((own for own, others in known if others < time), default=0) + 1

    def with_more(own: Mapping[str, T], others: Mapping[str, T], at: Callable[[T], T]) -> Any:
        return {**own, **{name: at(t) for name, t in others.items() if name not in own}}

    def union(own: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys((*own, *others)))

    both = found.calls.keys() & other.calls.keys()
    different = both & (set(found.shape_only) ^ set(other.shape_only))
    shape_only = union(found.shape_only, other.shape_only)
    return replace(
        found,
        places=places,
        shape_only=tuple(name for name in shape_only if name not in different),
        uses=with_more(found.uses, other.uses, lambda times: tuple(map(here, times))),
        calls=with_more(found.calls, other.calls, lambda time: here(time + 1) - 1),
        writes=with_more(found.writes, other.writes, here),
        side_outputs=union(found.side_outputs, other.side_outputs),
        reading=union(found.reading, other.reading),
        value_readers=union(found.value_readers, other.value_readers),
        read_error=found.read_error or other.read_error,
    )


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation, or in training if it was in evaluation."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(not model.training)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _tensor_plan(model: nn.Module, options: MeshOptions, first: MicroBatch) -> TensorPlan:
    """The layers that ranks of the tensor axis divide, both in training and in evaluation."""
    left: frozenset[str] = frozenset()
    while True:
        find = functools.partial(
            plan_layers, model, first.args, first.kwargs, options.mesh.tensor, options.plan, left
        )
        plan = find()
        if plan.ways == 1 or not plan.divisions:
            return plan
        with _other_mode(model):
            other = find()
        plan, different = in_both_modes(model, plan, other)
        if not different:
            return plan
        if options.plan is not None or different <= left:
            raise ValueError(
                f"{shortened(', '.join(sorted(different)), 200)}: the forward uses these layers in "
                "other ways in training than in evaluation, so they cannot be divided along the "
                "tensor axis: leave them out of plan="
            )
        left |= different


def _stages_of(model: nn.Module, options: MeshOptions, found: DryRun) -> ModuleStages:
    per_rank = STAGES_PER_RANK[options.schedule]
    if per_rank > 1 and not isinstance(options.stages, str):
        per_rank, rest = divmod(len(options.stages) + 1, options.mesh.pipeline)
        if rest or per_rank < 2:
            raise ValueError(
                f"stages={list(options.stages)} makes {len(options.stages) + 1} stages, but "
                f"schedule={options.schedule!r} needs the same number, at least two, for each "
                f"of the {options.mesh.pipeline} ranks of a pipeline"
            )
    v_shaped = options.schedule in V_SHAPED
    rank_of = ranks_of_stages(options.mesh.pipeline, per_rank, v_shaped=v_shaped)
    return plan_stages(model, found, rank_of, options.stages)


def warn_of_microbatches(
    model: nn.Module,
    found: DryRun,
    norms: nn.ModuleList,
    microbatches: int,
    first: MicroBatch,
) -> None:
    """Warn of layers whose results in a pipeline differ from those of one process."""
    if microbatches > 1 and len(norms):
        warn_once(
            "batch norm in micro-batches",
            f"batch norm in a pipeline uses the statistics of each micro-batch, here of "
            f"{first.samples} samples, not of the whole batch: pass a smaller microbatches=, "
            "or use group norm, which does not depend on the batch",
        )
    if found.floats:
        warn_once(
            "floats in a pipeline",
            f"the forward keeps a Python number in {found.floats[0]}, which each rank of the "
            "pipeline computes for its own stage, and in each micro-batch: other ranks hold "
            "another one. Keep a tensor, as in a buffer or an attribute, or compute it from "
            "what the model returns",
        )
    if microbatches > 1 and _iterates(model):
        warn_once(
            "spectral norm in micro-batches",
            "spectral norm in a pipeline takes a step of its power iteration for each "
            f"micro-batch, here {microbatches} a batch, so that weights differ slightly from those "
            "of one process: pass microbatches=1, or leave out the pipeline axis, if that matters",
        )


def _iterates(model: nn.Module) -> bool:
    """Whether a layer has spectral norm, PyTorch's new or old one, which updates in each call."""
    modules = [each for each in model.modules() if each.training]
    hooks = (hook for each in modules for hook in each._forward_pre_hooks.values())
    return any(isinstance(each, _SpectralNorm | SpectralNorm) for each in (*modules, *hooks))


def outside_divided_layers(found: DryRun, plan: TensorPlan) -> DryRun:
    """Adapt a dry run to divided layers: no cuts inside pairs, where tensors are divided."""
    # A layer without a call of its own computes in the call of its parent.
    inner = [name for name in plan.divisions if name not in found.calls]
    whole = {*inner, *(name.rpartition(".")[0] for name in inner)}
    whole |= {name for name, division in plan.divisions.items() if division.by_itself}
    in_order = sorted(plan.divisions.keys() - whole, key=found.calls.__getitem__)
    begins: int | None = None
    inside: list[tuple[int, int]] = []
    for name in in_order:
        if plan.divisions[name].style == "row" and begins is not None:
            inside.append((begins, found.calls[name]))
            begins = None
        elif plan.divisions[name].style == "column" and begins is None:
            begins = found.calls[name]
    last_read = max(time for times in found.uses.values() for time in times)
    if begins is not None and last_read == begins + 1:  # logits, up to their loss
        inside.append((begins, sys.maxsize))
    experts = tuple(f"{name}." for name, each in plan.divisions.items() if each.style == "experts")
    places = tuple(
        place
        for place in found.places
        if not any(begin < place.time <= end for begin, end in inside)
        and not place.name.startswith(experts)
    )
    divided = _divided_when(found, plan, inside)
    saved = tuple(
        replace(each, nbytes=each.nbytes // plan.ways) if divided(each) else each
        for each in found.saved
    )
    return replace(found, places=places, saved=saved)


def _divided_when(
    found: DryRun, plan: TensorPlan, inside: Sequence[tuple[int, int]]
) -> Callable[[SavedActivation], bool]:
    """A function that says whether ranks have parts of a tensor that autograd keeps.

    ``inside`` has for each pair when the calls of its column and of its row layer begin.
    """
    # A model that is a single layer calls no other.
    calls = sorted((time, name) for name, time in found.calls.items()) or [(0, "")]
    regions = []
    for region in plan.sequence_regions:
        # A layer without a call of its own ends the call of its parent.
        began = [
            found.calls.get(name, found.calls.get(name.rpartition(".")[0], 0))
            for name in (*region.begins, *region.ends)
        ]
        regions.append((min(began), max(began[len(region.begins) :])))
    # The storage of the input of each attention layer.
    taken: dict[str, int] = {}

    def divided(each: SavedActivation) -> bool:
        latest = calls[bisect.bisect_left(calls, (each.time,)) - 1][1]
        division = plan.divisions.get(latest)
        # The first operation of a layer's call keeps its input.
        if any(begin + 1 < each.time <= end + 1 for begin, end in inside):
            return True
        if division and f"{latest}.out_proj".removeprefix(".") in plan.divisions:
            return taken.setdefault(latest, each.storage) != each.storage
        takes_whole = division is not None and division.style == "column"
        return not takes_whole and any(begin + 1 < each.time <= end for begin, end in regions)

    return divided


def require_one_stage_for_each(model: nn.Module, stages: ModuleStages) -> None:
    """Raise if several stages would round the same weights differently."""
    for name, _ in model.named_parameters():
        if len(stages.holders(name)) > 1:
            raise ValueError(
                f"stages {' and '.join(map(str, stages.of_weight[name]))} of the pipeline use "
                f"{name}, and would round it differently when ranks of the data axis agree on "
                "compressed weights: leave out compression=, or choose stages=[...] so that one "
                "stage uses it"
            )
