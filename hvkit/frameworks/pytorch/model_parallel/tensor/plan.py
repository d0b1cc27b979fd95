"""Which linear layers of a model the ranks can divide, proven by following one forward.

A column layer gives each rank a part of its outputs, a row layer takes them and sums (Megatron-LM,
https://arxiv.org/abs/1909.08053). A pair is in the plan only if ``Flow`` saw that everything
between them treats the parts independently of each other. All else stays whole, with a reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.dry_run import (
    OnMeta,
    attributes_kept,
    copied_call,
    on_meta,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.flow import Flow, Linear

Words = Mapping[str, Any]
"""Module names, with ``*`` for any text, and ``"colwise"`` or ``"rowwise"`` for each."""


@dataclass(frozen=True)
class Division:
    """How a layer is divided.

    Attributes:
        kind: "column" divides the outputs, "row" the inputs.
        parts: of a product that holds several tensors, one after the other: 3 for fused queries,
            keys and values. Each rank has its part of each.
        transposed: the weight has the shape (in, out), not (out, in).
    """

    kind: Literal["column", "row"]
    parts: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """What ``divide`` divides.

    Attributes:
        ways: among how many ranks.
        divisions: by the name of a module. For an ``nn.MultiheadAttention`` its own name stands
            for its input projections, and its ``out_proj`` is a row layer.
        whole: the reason why it stays whole, for each linear layer that does.
        share: of the bytes of all parameters, those that are divided.
        regions: modules inside whose forward activations are divided; "" is the model.
    """

    ways: int
    divisions: Mapping[str, Division] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    share: float = 0.0
    regions: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"tensor={self.ways}: {len(self.divisions)} of "
            f"{len(self.divisions) + len(self.whole)} linear layers divided, "
            f"{self.share:.0%} of the bytes of all weights"
        ]
        lines += [f"  {name} stays whole: {why}" for name, why in self.whole.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Group:
    """Layers that can only be divided together."""

    columns: frozenset[str]
    rows: frozenset[str]


def prove(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ways: int,
    words: Words | None = None,
) -> TensorPlan:
    """Find what ``ways`` ranks can divide, by one forward on the meta device.

    Args:
        model: unchanged afterwards; its parameters may be on the meta device.
        args, kwargs: of a call of the model.
        ways: ranks, at least 1.
        words: replaces what the proof would choose, in the words of ``parallelize_module``: names
            of linear layers, with ``*`` for any text, and "colwise" or "rowwise" (or
            ``ColwiseParallel()``, ``RowwiseParallel()``).

    Raises:
        HvkitError: the forward fails on the meta device.
        ValueError: ``words`` names no linear layer, or one that cannot be divided like that.
        TypeError: ``words`` has a value that is no such word.
    """
    if ways == 1 or words == {}:
        return TensorPlan(ways)
    flow = _dry_run(model, args, kwargs, ways)
    linears = _linears(model, flow)
    if words is not None:
        return _as_told(model, words, linears, ways)
    divisions: dict[str, Division] = {}
    regions = set()
    for group in _largest_first(model, _groups(linears, flow)):
        if (group.columns | group.rows) & divisions.keys() or group.columns & group.rows:
            continue
        divisions |= {name: _column(name, linears) for name in group.columns}
        divisions |= {name: _row(name, linears) for name in group.rows}
        regions.add(_common(group.columns | group.rows))
    whole = {n: _why(n, linears, divisions) for n in linears if n not in divisions}
    whole |= {n: why for n, why in flow.heads.items() if why}
    order = [n for n, _ in model.named_modules()]
    return TensorPlan(
        ways,
        {n: divisions[n] for n in order if n in divisions},
        {n: whole[n] for n in order if n in whole},
        _share(model, divisions),
        tuple(n for n in order if n in regions),
    )


def _dry_run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ways: int) -> Flow:
    """Follow one forward; parameters are on the meta device, inputs and buffers as they are."""
    meta, _ = on_meta(model)
    twins = {p: meta[name] for name, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    modules = dict(model.named_modules())
    layers = {
        n: [twins[p] for p in m.parameters(recurse=False)]
        for n, m in modules.items()
        if _may_be_linear(m)
    }
    heads = {n: m for n, m in modules.items() if type(m) is nn.MultiheadAttention}
    flow = Flow(layers, heads, ways)
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            attributes_kept(list(modules.values())),
            flow.entered(modules),
            OnMeta(device),
            flow,
        ):
            args, kwargs = copied_call(tuple(args), dict(kwargs))
            output = torch.func.functional_call(
                model, {**meta, **buffers}, tuple(args), dict(kwargs), tie_weights=False
            )
    except Exception as error:
        raise HvkitError(
            "the forward cannot be followed on the meta device, where tensors have shapes and no "
            f"values ({type(error).__name__}: {error}): take out what reads values of "
            "activations, or pass plan={} to divide nothing"
        ) from error
    flow.returned(output)
    return flow


def _may_be_linear(module: nn.Module) -> bool:
    held = dict(module.named_parameters(recurse=False))
    return [*held] in (["weight"], ["weight", "bias"]) and held["weight"].dim() == 2


def _linears(model: nn.Module, flow: Flow) -> dict[str, Linear]:
    """The linear layers of a model, also those that the forward has not called."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            users.setdefault(id(p), []).append(name)
    inside_heads = {_child(n, "out_proj") for n in flow.heads}
    found = {}
    for name, module in model.named_modules():
        seen = flow.linears.get(name, Linear())
        if name in inside_heads or not (seen.taken_from or isinstance(module, nn.Linear)):
            continue
        found[name] = seen
        others = {n for p in module.parameters(recurse=False) for n in users[id(p)]} - {name}
        if others:
            seen.unusable = f"it shares a parameter with {', '.join(sorted(others))}"
        elif not seen.taken_from:
            seen.unusable = seen.unusable or "the forward does not call it"
    for name in flow.heads:
        if any(len(users[id(p)]) > 1 for p in model.get_submodule(name).parameters()):
            flow.heads[name] = "it shares a weight with another layer"
    return found


def _groups(linears: Mapping[str, Linear], flow: Flow) -> list[_Group]:
    """The pairs, and larger groups, that can be divided."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(role: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(role, role) != role:
            role = parent[role]
        return role

    for name, seen in linears.items():
        for columns in seen.taken_from:
            for column in columns:
                parent[root(("row", name))] = root(("column", column))
    members: dict[tuple[str, str], dict[str, set[str]]] = {}
    for kind, name in list(parent):
        group = members.setdefault(root((kind, name)), {"row": set(), "column": set()})
        group[kind].add(name)
    found = [
        _Group(frozenset(group["column"]), frozenset(group["row"]))
        for group in members.values()
        if not any(_column_problem(linears[n]) for n in group["column"])
        and not any(_row_problem(linears[n]) for n in group["row"])
    ]
    heads = [name for name, problem in flow.heads.items() if not problem]
    return [*found, *(_Group(frozenset([n]), frozenset([_child(n, "out_proj")])) for n in heads)]


def _child(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _largest_first(model: nn.Module, groups: Sequence[_Group]) -> list[_Group]:
    """Groups by the bytes of their weights: where two share a layer, the first is chosen."""
    size = {
        name: sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        for name, module in model.named_modules()
    }
    return sorted(groups, key=lambda g: -sum(size[name] for name in g.columns | g.rows))


def _column_problem(seen: Linear, returned: bool = False) -> str:
    """Why the output of a layer cannot be divided, or an empty text.

    Args:
        returned: whether the model may return it: hvkit then makes it whole.
    """
    if seen.unusable or seen.problem:
        return seen.unusable or seen.problem
    if len(seen.parts) > 1:
        return f"its output is used in {' and in '.join(map(str, sorted(seen.parts)))} shares"
    if returned and seen.parts - {1}:
        return seen.returned
    return "" if returned else seen.returned


def _row_problem(seen: Linear) -> str:
    if seen.unusable or all(seen.taken_from):
        return seen.unusable
    return "it takes whole activations"


def _why(name: str, linears: Mapping[str, Linear], divisions: Mapping[str, Division]) -> str:
    """Why a layer is in no group that was chosen."""
    seen = linears[name]
    if problem := _column_problem(seen):
        return problem
    takers = [n for n, other in linears.items() if any(name in c for c in other.taken_from)]
    if not takers:
        return "no linear layer takes its output"
    for taker in takers:
        if problem := _row_problem(linears[taker]):
            return f"{taker}, which takes its output, stays whole: {problem}"
        if taker in divisions:
            return f"{taker}, which takes its output, is divided with another layer"
    return "a layer that would have to be divided with it stays whole"


def _column(name: str, linears: Mapping[str, Linear]) -> Division:
    if name not in linears:  # nn.MultiheadAttention
        return Division("column", 3)
    (parts,) = linears[name].parts or {1}
    return Division("column", parts, linears[name].transposed)


def _row(name: str, linears: Mapping[str, Linear]) -> Division:
    return Division("row", transposed=name in linears and linears[name].transposed)


def _common(names: Iterable[str]) -> str:
    """The module that holds all of these."""
    first, *others = (name.split(".")[:-1] for name in names)
    for i, part in enumerate(first):
        if any(other[i : i + 1] != [part] for other in others):
            return ".".join(first[:i])
    return ".".join(first)


def _share(model: nn.Module, divisions: Mapping[str, Division]) -> float:
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    divided = 0
    for name, division in divisions.items():
        for which, p in model.get_submodule(name).named_parameters(recurse=False):
            if division.kind == "column" or which == "weight":
                divided += p.numel() * p.element_size()
    return divided / total if total else 0.0


def _as_told(
    model: nn.Module, words: Words, linears: Mapping[str, Linear], ways: int
) -> TensorPlan:
    """The plan in a user's own words."""
    known = {n: seen for n, seen in linears.items() if seen.taken_from}
    divisions: dict[str, Division] = {}
    for pattern, word in words.items():
        kind = _kind(pattern, word)
        matches = fnmatch.filter(known, pattern)
        if not matches:
            raise ValueError(
                f"plan={{{pattern!r}: ...}} names no linear layer that the forward calls; "
                f"there are: {', '.join(known)}"
            )
        for name in matches:
            _require_divisible(model, name, kind, known[name], ways)
            parts = min(known[name].parts or {1}) if kind == "column" else 1
            divisions[name] = Division(kind, parts, known[name].transposed)
    for name, division in divisions.items():
        missing = known[name].together - divisions.keys() if division.parts > 1 else None
        if missing:
            raise ValueError(
                f"plan= divides {name} and leaves {', '.join(sorted(missing))} whole, but both "
                "outputs meet before they are split into shares: divide both or none"
            )
    whole = {n: "plan= does not name it" for n in linears if n not in divisions}
    return TensorPlan(ways, divisions, whole, _share(model, divisions), ("",))


def _kind(pattern: str, word: Any) -> Literal["column", "row"]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if word == "colwise" or type(word) is ColwiseParallel:
        kind: Literal["column", "row"] = "column"
        expected: tuple[Any, Any] = (Replicate(),), (Shard(-1),)
    elif word == "rowwise" or type(word) is RowwiseParallel:
        kind, expected = "row", ((Shard(-1),), (Replicate(),))
    else:
        raise TypeError(
            f"plan={{{pattern!r}: {word!r}}}: a layer is divided by 'colwise', 'rowwise', "
            "ColwiseParallel() or RowwiseParallel()"
        )
    if not isinstance(word, str) and (word.input_layouts, word.output_layouts) != expected:
        raise ValueError(
            f"plan={{{pattern!r}: {type(word).__name__}(...)}} has layouts of its own "
            f"({word.input_layouts}, {word.output_layouts}): hvkit moves activations where the "
            f"model needs them, so leave input_layouts and output_layouts out"
        )
    return kind


def _require_divisible(model: nn.Module, name: str, kind: str, seen: Linear, ways: int) -> None:
    weight = model.get_submodule(name).weight
    assert isinstance(weight, torch.Tensor)
    length = weight.shape[(kind == "row") != seen.transposed]
    problem = seen.unusable
    if not problem and length % ways:
        problem = f"its {length} {'in' if kind == 'row' else 'out'}puts are no multiple of {ways}"
    elif kind == "column":
        problem = _column_problem(seen, returned=True)
    if problem:
        raise ValueError(f"plan= cannot divide {name}: {problem}; leave it out of plan=")
