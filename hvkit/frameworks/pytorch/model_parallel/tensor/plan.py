"""Plans which layers of a model the ranks divide, by following one forward.

A column layer gives each rank a part of its outputs, a row layer takes them and sums (Megatron-LM,
https://arxiv.org/abs/1909.08053). A pair is in the plan only if ``LinearTrace`` saw that everything
between them treats the parts independently of each other. Embeddings and what projects onto a
vocabulary are divided without a partner. All else stays whole, with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.meta_device import (
    OnMeta,
    forward_on_meta,
    holders_in,
    on_meta,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.chosen_layers import (
    Styles,
    Vocabulary,
    requested_divisions,
    vocabularies,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import (
    LayerDivision,
    Placement,
    Style,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.experts import divisions_of_experts
from hvkit.frameworks.pytorch.model_parallel.tensor.linear_trace import LinearTrace, LinearUse
from hvkit.frameworks.pytorch.model_parallel.tensor.sequence_parallel import (
    SequenceRegion,
    SequenceTrace,
    united,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import bytes_of, copied_call, tensors_in

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorPlan:
    """How ``divide`` divides the layers of a model.

    ``divisions`` of an ``nn.MultiheadAttention`` are those of its input projections; its
    ``out_proj`` is a row layer. ``whole`` has reasons. ``fraction`` is that of the bytes of all
    parameters which is divided. ``vocabularies`` are names of layers that share a weight.
    """

    ways: int
    divisions: Mapping[str, LayerDivision] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    fraction: float = 0.0
    vocabularies: tuple[frozenset[str], ...] = ()
    sequence_regions: tuple[SequenceRegion, ...] = ()
    whole_regions: tuple[str, ...] = ()
    called: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()

    def __str__(self) -> str:
        divided = len(self.divisions.keys() & self.experts)
        sets = f", and {divided} of {len(self.experts)} sets of experts" if self.experts else ""
        lines = [
            f"tensor={self.ways}: {len(self.divisions) - divided} of "
            f"{len({*self.divisions, *self.whole} - self.experts)} linear layers and embeddings"
            f"{sets} divided, {self.fraction:.0%} of all weights"
        ]
        lines += [f"  {name} stays whole: {why}" for name, why in self.whole.items()]
        lines += [
            f"  between {region.begins[0]} and {region.ends[-1]} activations that pairs of layers "
            "leave whole are divided along the sequence"
            for region in self.sequence_regions
        ]
        lines += [f"  activations between pairs {why}" for why in self.whole_regions]
        return "\n".join(lines)


def plan_layers(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ways: int,
    requested: Styles | None = None,
    left: Set[str] = frozenset(),
) -> TensorPlan:
    """Find the layers that ``ways`` ranks can divide, except ``left``, by a forward on meta."""
    if ways == 1 or requested == {}:
        return TensorPlan(ways)
    meta, _ = on_meta(model)
    trace = LinearTrace(model, meta, ways)
    _watch_forward(trace, model, meta, args, kwargs)
    found = vocabularies(model, trace.linears)
    linears = _linears(model, trace)
    if requested is None:
        device = next((t.device for t in tensors_in((args, kwargs)) if not t.is_meta), _CPU)
        divisions, whole = _chosen(model, trace, linears, found, left, device)
    else:
        divisions = requested_divisions(model, requested, linears, found, ways)
        whole = dict.fromkeys([*linears, *trace.experts], "plan= does not name it")
    order = [name for name, _ in model.named_modules()]
    called = (
        *(name for name, seen in trace.linears.items() if seen.taken_from),
        *(each for name in trace.heads for each in (name, _child(name, "out_proj"))),
        *(name for name, seen in trace.experts.items() if seen.calls),
    )
    divisions = {n: divisions[n] for n in order if n in divisions}
    sequence = SequenceTrace(model, divisions, ways)
    _watch_forward(sequence, model, meta, args, kwargs)
    regions, problems = sequence.found()
    return TensorPlan(
        ways,
        divisions,
        {n: whole[n] for n in order if n in whole and n not in divisions},
        _divided_fraction(model, divisions),
        tuple(frozenset(each.layers) for each in found),
        tuple(regions),
        tuple(problems),
        frozenset(called),
        frozenset(trace.experts),
    )


def _chosen(
    model: nn.Module,
    trace: LinearTrace,
    linears: Mapping[str, LinearUse],
    found: Sequence[Vocabulary],
    left: Set[str],
    device: torch.device,
) -> tuple[dict[str, LayerDivision], dict[str, str]]:
    divisions: dict[str, LayerDivision] = {}
    for group in _groups(model, linears, trace):
        if group.keys().isdisjoint({*left, *divisions}):
            divisions |= group
    whole = {n: _why(n, linears, divisions) for n in linears if n not in divisions}
    whole |= {n: why for n, why in trace.heads.items() if why}
    tried: dict[str, LayerDivision | str] = {}
    for vocabulary in found:
        if {*left, *divisions, *tried}.isdisjoint(vocabulary.layers):
            tried |= vocabulary.chosen(trace.ways)
    kept = {name: each for name, each in trace.experts.items() if name not in left}
    tried |= divisions_of_experts(model, kept, trace.ways, device)
    divisions |= {name: each for name, each in tried.items() if isinstance(each, LayerDivision)}
    whole |= {name: why for name, why in tried.items() if isinstance(why, str)}
    whole |= dict.fromkeys(left, "training and evaluation use it in different ways")
    return divisions, whole


def in_both_modes(
    model: nn.Module, plan: TensorPlan, other: TensorPlan
) -> tuple[TensorPlan, set[str]]:
    """A plan for training and evaluation, from those of both, and layers that they use differently.

    Layers that one mode alone calls, as a head for training, are divided as there. A vocabulary
    that both divide differently stays whole. Logits that stay divided up to the loss in one mode
    alone are gathered. Sequence regions of one mode alone stay whole.
    """
    here, there, whole = dict(plan.divisions), dict(other.divisions), dict(plan.whole)
    for layers in {*plan.vocabularies, *other.vocabularies}:
        if all(n in here and n in there and _is_same(here[n], there[n]) for n in layers):
            for n in layers:
                by_itself = here[n].by_itself or there[n].by_itself
                here[n] = there[n] = replace(here[n], by_itself=by_itself)
        elif not layers.isdisjoint({*here, *there}):
            for n in layers:
                here.pop(n, None)
                there.pop(n, None)
                whole[n] = "training and evaluation use its weight in different ways"
    here |= {n: division for n, division in there.items() if n not in plan.called}
    there |= {n: division for n, division in here.items() if n not in other.called}
    begun = {region.begins for region in other.sequence_regions}
    both = replace(
        plan,
        divisions={n: here[n] for n, _ in model.named_modules() if n in here},
        whole={n: why for n, why in whole.items() if n not in here},
        fraction=_divided_fraction(model, here),
        sequence_regions=tuple(each for each in plan.sequence_regions if each.begins in begun),
    )
    return both, {n for n in {*here, *there} if here.get(n) != there.get(n)}


def _is_same(one: LayerDivision, other: LayerDivision) -> bool:
    """Whether both divide a weight in the same way, for results that may be gathered or not."""
    return one == replace(other, by_itself=one.by_itself)


def _watch_forward(
    trace: LinearTrace | SequenceTrace,
    model: nn.Module,
    meta: Mapping[str, nn.Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    tensors = {**meta, **{n: b.clone() for n, b in model.named_buffers()}}
    device = next((p.device for p in model.parameters() if not p.is_meta), _CPU)
    args, kwargs = copied_call(tuple(args), dict(kwargs))
    modes: Sequence[Any] = trace.entered(), torch.no_grad(), OnMeta(device, _nothing), trace
    try:
        with forward_on_meta(model, tensors, args, kwargs, device, modes) as (out, kept):
            # The script may compute with what the forward keeps, as with what it returns.
            for each in (out, [change.value for change in kept.changes().values()]):
                trace.returned(each)
    except Exception as error:
        raise HvkitError(
            "the forward cannot be followed on the meta device, where tensors have shapes and no "
            f"values ({type(error).__name__}: {error}): take out what reads values of "
            "activations, or pass plan={} to divide nothing"
        ) from error


def _nothing(error: Exception) -> None:
    """Accept reads of values: all ranks of the tensor axis see the same ones."""


def _linears(model: nn.Module, trace: LinearTrace) -> dict[str, LinearUse]:
    holders = holders_in(model)
    inside_heads = {_child(n, "out_proj") for n in trace.heads}
    found = {}
    for name, module in model.named_modules():
        seen = trace.linears[name]
        if name in inside_heads or not (
            seen.taken_from or isinstance(module, nn.Linear | nn.Embedding)
        ):
            continue
        found[name] = seen
        others = {n for p in module.parameters(recurse=False) for n in holders[p]} - {name}
        if others:
            seen.unusable = f"it shares a parameter with {', '.join(sorted(others))}"
        elif not seen.taken_from:
            seen.unusable = seen.unusable or "the forward does not call it"
    for name in trace.heads:
        if any(len(holders[p]) > 1 for p in model.get_submodule(name).parameters()):
            trace.heads[name] = "it shares a weight with another layer"
    return found


def _groups(
    model: nn.Module, linears: Mapping[str, LinearUse], trace: LinearTrace
) -> list[dict[str, LayerDivision]]:
    """Layers that are divided together or not at all, mostly pairs; the most bytes first.

    Of two groups that share a layer, the first is chosen.
    """
    roles: list[set[tuple[Style, str]]] = [
        {("row", name), *(("column", column) for column in columns)}
        for name, seen in linears.items()
        for columns in seen.taken_from
        if columns
    ]
    groups = []
    for group in united(roles):
        divisions = {n: linears[n].division(style) for style, n in group}
        # A layer with both roles is in no group.
        if len(divisions) == len(group) and not any(linears[n].problem_as(s) for s, n in group):
            groups.append(divisions)
    groups += [
        {name: LayerDivision("column", 3), _child(name, "out_proj"): LayerDivision("row")}
        for name, problem in trace.heads.items()
        if not problem
    ]
    modules = model.named_modules()
    size = {name: bytes_of(module.parameters(recurse=False)) for name, module in modules}
    return sorted(groups, key=lambda group: -sum(size[name] for name in group))


def _child(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _why(
    name: str, linears: Mapping[str, LinearUse], divisions: Mapping[str, LayerDivision]
) -> str:
    """Why a layer is in no group that was chosen."""
    if problem := linears[name].problem_as("column"):
        return problem
    takers = [n for n, other in linears.items() if any(name in c for c in other.taken_from)]
    if not takers:
        return "no linear layer takes its output"
    for taker in takers:
        if problem := linears[taker].problem_as("row"):
            return f"{taker}, which takes its output, stays whole: {problem}"
        if taker in divisions:
            return f"{taker}, which takes its output, is divided with another layer"
    return "a layer that would have to be divided with it stays whole"


def placements_of(model: nn.Module, divisions: Mapping[str, LayerDivision]) -> dict[str, Placement]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: placement
        for name, division in divisions.items()
        for which, p in model.get_submodule(name).named_parameters(recurse=False)
        if (placement := division.placement(which, p))
    }


def _divided_fraction(model: nn.Module, divisions: Mapping[str, LayerDivision]) -> float:
    total = bytes_of(model.parameters())
    divided = bytes_of(map(model.get_parameter, placements_of(model, divisions)))
    return divided / total if total else 0.0
