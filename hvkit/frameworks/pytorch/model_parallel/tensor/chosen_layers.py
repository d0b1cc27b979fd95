"""Layers that are divided without a partner: those of a vocabulary, and those that a user names.

An embedding gives each rank some features of every row, since then only the forward sends anything.
A projection onto the vocabulary gives each rank the logits of some rows, or if these are no
multiple of the ranks, sums over some features. Where both have one weight, the embedding follows
the projection, and each rank looks up its own rows. Logits are gathered at once, unless the dry run
shows that they lead to a loss that can be divided.

``plan=`` names layers in the words of PyTorch's ``parallelize_module``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.meta_device import holders_in
from hvkit.frameworks.pytorch.model_parallel.tensor.linear_trace import LinearUse
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import Kind, LayerDivision

_NEED_WHOLE = ("max_norm", "scale_grad_by_freq", "sparse")


Words = Mapping[str, Any]
"""Module names, with ``*`` for any text, and ``"colwise"`` or ``"rowwise"`` for each."""


@dataclass(frozen=True)
class Vocabulary:
    """The layers that have one weight of the shape (rows, features).

    Attributes:
        embeddings: names of those that look up rows.
        projections: names of linear layers, whose outputs are the rows.
        shape: of the weight.
        problems: by layer, why it cannot be divided; no entry if it can.
        in_loss: the projections' outputs may stay divided up to a loss that can be divided.
    """

    embeddings: tuple[str, ...]
    projections: tuple[str, ...]
    shape: torch.Size
    problems: Mapping[str, str]
    in_loss: bool

    @property
    def layers(self) -> tuple[str, ...]:
        """All of them."""
        return *self.embeddings, *self.projections

    def divided(self, dim: int) -> dict[str, LayerDivision]:
        """How to divide the layers if the weight is divided along this dimension."""
        looked_up: Kind = "column" if dim else "row"
        projected: Kind = "row" if dim else "column"
        return {
            **dict.fromkeys(self.embeddings, LayerDivision(looked_up, 1, True, True)),
            **dict.fromkeys(
                self.projections, LayerDivision(projected, by_itself=not dim and not self.in_loss)
            ),
        }

    def chosen(self, ways: int) -> dict[str, LayerDivision] | dict[str, str]:
        """How ``ways`` ranks divide the layers, else by layer why they stay whole."""
        if self.problems:
            culprit, why = next(iter(self.problems.items()))
            others = f"{culprit}, which has the same weight, stays whole: {why}"
            return {name: self.problems.get(name, others) for name in self.layers}
        rows, features = self.shape
        if not self.projections and rows < features:
            why = f"its {rows} rows are fewer than its {features} features"
            return dict.fromkeys(self.layers, why)
        for dim in (0, 1) if self.projections else (1, 0):
            if self.shape[dim] % ways == 0:
                return self.divided(dim)
        why = f"neither its {rows} rows nor its {features} features are a multiple of {ways} ranks"
        return dict.fromkeys(self.layers, why)


def vocabularies(model: nn.Module, layers: Mapping[str, LinearUse]) -> list[Vocabulary]:
    """The vocabularies of a model.

    A linear layer is a projection if it has the weight of an embedding; or as many outputs as one
    has rows, and no linear layer takes these.
    """
    holders = holders_in(model)
    found: list[Vocabulary] = []

    def of_one_weight(weight: torch.Tensor, names: Sequence[str]) -> Vocabulary:
        held = {p for name in names for p in model.get_submodule(name).parameters(recurse=False)}
        called = {n for p in held for n in holders[p] if layers.get(n, LinearUse()).taken_from}
        return _vocabulary(model, layers, weight, names, called.difference(names))

    for weight, names in holders.items():
        if any(_is_embedding(model, name) for name in names):
            found.append(of_one_weight(weight, names))
    rows = {each.shape[0] for each in found}
    taken = {name for seen in layers.values() for columns in seen.taken_from for name in columns}
    for weight, (name, *others) in holders.items():
        seen = layers.get(name, LinearUse())
        right = weight.dim() == 2 and weight.shape[0] in rows and not seen.transposed
        if right and seen.taken_from and not others and name not in taken:
            found.append(of_one_weight(weight, [name]))
    return found


def _is_embedding(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)) is nn.Embedding


def _vocabulary(
    model: nn.Module,
    layers: Mapping[str, LinearUse],
    weight: torch.Tensor,
    names: Sequence[str],
    others: Collection[str],
) -> Vocabulary:
    """The layers of these names, which ``others`` share something else with, as a bias."""
    embeddings = tuple(n for n in names if _is_embedding(model, n))
    projections = tuple(n for n in names if n not in embeddings)
    problems = {}
    for name in (*embeddings, *projections):
        module, seen = model.get_submodule(name), layers.get(name, LinearUse())
        option = next((o for o in _NEED_WHOLE if getattr(module, o, None)), None)
        if seen.unusable:
            problems[name] = seen.unusable
        elif not seen.taken_from:
            problems[name] = "the forward does not call it"
        elif seen.transposed != (name in embeddings):
            problems[name] = "it multiplies by the weight of an embedding, transposed"
        elif others:
            problems[name] = f"a parameter is also that of {', '.join(sorted(others))}"
        elif name in embeddings and option:
            problems[name] = f"{option}={getattr(module, option)!r} is about whole rows"
    in_loss = all(
        layers[name].ends and not layers[name].column_problem(returned=True)
        for name in projections
        if name in layers
    )
    return Vocabulary(embeddings, projections, weight.shape, problems, in_loss)


def divisions_in_words(
    model: nn.Module,
    words: Words,
    layers: Mapping[str, LinearUse],
    found: Sequence[Vocabulary],
    ways: int,
) -> dict[str, LayerDivision]:
    """How the layers are divided that a user names.

    Raises:
        ValueError: ``words`` names no layer, or one that cannot be divided like that.
        TypeError: ``words`` has a value that is no such word.
    """
    known = {n: seen for n, seen in layers.items() if seen.taken_from}
    kinds: dict[str, Kind] = {}
    for pattern, word in words.items():
        kind = _kind(pattern, word)
        matches = fnmatch.filter(known, pattern)
        if not matches:
            raise ValueError(
                f"plan={{{pattern!r}: ...}} names no linear layer or embedding that the forward "
                f"calls; there are: {', '.join(known)}"
            )
        kinds |= dict.fromkeys(matches, kind)
    of_vocabulary = {name: each for each in found for name in each.layers}
    divisions: dict[str, LayerDivision] = {}
    for name, kind in kinds.items():
        vocabulary = of_vocabulary.get(name)
        _require_divisible(model, name, kind, known[name], ways, vocabulary)
        if vocabulary is not None:
            divisions[name] = _like_others(vocabulary, name, kinds)
        else:
            parts = min(known[name].parts or {1}) if kind == "column" else 1
            divisions[name] = LayerDivision(kind, parts, known[name].transposed)
    for name, division in divisions.items():
        missing = known[name].together - divisions.keys() if division.parts > 1 else None
        if missing:
            raise ValueError(
                f"plan= divides {name} and leaves {', '.join(sorted(missing))} whole, but both "
                "outputs meet before they are split into shares: divide both or none"
            )
    return divisions


def _kind(pattern: str, word: Any) -> Kind:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if word == "colwise" or type(word) is ColwiseParallel:
        kind: Kind = "column"
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


def _require_divisible(
    model: nn.Module,
    name: str,
    kind: Kind,
    seen: LinearUse,
    ways: int,
    vocabulary: Vocabulary | None,
) -> None:
    weight: Any = model.get_submodule(name).weight
    length = weight.shape[(kind == "row") != seen.transposed]
    problem = vocabulary.problems.get(name, "") if vocabulary else seen.unusable
    if not problem and length % ways:
        problem = f"its {length} {'in' if kind == 'row' else 'out'}puts are no multiple of {ways}"
    elif kind == "column" and vocabulary is None:
        problem = seen.column_problem(returned=True)
    if problem:
        raise ValueError(f"plan= cannot divide {name}: {problem}; leave it out of plan=")


def _like_others(vocabulary: Vocabulary, name: str, kinds: Mapping[str, Kind]) -> LayerDivision:
    """How a layer is divided whose weight others may have, which must be divided alike."""
    dim = int((kinds[name] == "row") != (name in vocabulary.embeddings))
    alike = vocabulary.divided(dim)
    for other, division in alike.items():
        if kinds.get(other) != division.kind:
            word = {"column": "colwise", "row": "rowwise"}[division.kind]
            raise ValueError(
                f"plan= divides {name}, and not {other}, which has the same weight, in the same "
                f"way: add {other!r}: {word!r}"
            )
    return alike[name]
