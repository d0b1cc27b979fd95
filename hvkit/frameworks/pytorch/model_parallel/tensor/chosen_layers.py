"""Layers that are divided without a partner: those of a vocabulary, and those named by ``plan=``.

An embedding gives each rank some features of every row, so that only the forward communicates. A
projection onto the vocabulary gives each rank the logits of some rows. If the rows are no multiple
of the ranks, each rank sums over some features. Where both share a weight, the embedding follows
the projection, and each rank looks up its own rows. Logits are gathered at once, unless the dry run
shows that they lead to a loss that can be divided.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.meta_device import holders_in
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import LayerDivision, Style
from hvkit.frameworks.pytorch.model_parallel.tensor.linear_trace import LinearUse

_NEED_WHOLE = ("max_norm", "scale_grad_by_freq", "sparse")

_STYLES: Mapping[str, Style] = {"colwise": "column", "rowwise": "row"}

Styles = Mapping[str, str]
"""``plan=``: by module name, with ``*`` for any text, ``"colwise"`` or ``"rowwise"``."""


@dataclass(frozen=True)
class Vocabulary:
    """The layers that share one weight of the shape (rows, features).

    ``embeddings`` look up rows; ``projections`` compute an output for each row, which may stay
    divided ``in_loss``. ``problems`` say why layers cannot be divided.
    """

    embeddings: tuple[str, ...]
    projections: tuple[str, ...]
    shape: torch.Size
    problems: Mapping[str, str]
    in_loss: bool

    @property
    def layers(self) -> tuple[str, ...]:
        return *self.embeddings, *self.projections

    def divided(self, dim: int) -> dict[str, LayerDivision]:
        """The divisions of the layers if the weight is divided along this dimension."""
        looked_up: Style = "column" if dim else "row"
        projected: Style = "row" if dim else "column"
        return {
            **dict.fromkeys(self.embeddings, LayerDivision(looked_up, 1, True, True)),
            **dict.fromkeys(
                self.projections, LayerDivision(projected, by_itself=not dim and not self.in_loss)
            ),
        }

    def chosen(self, ways: int) -> dict[str, LayerDivision] | dict[str, str]:
        """The divisions of the layers among ``ways`` ranks, or why each stays whole."""
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


def vocabularies(model: nn.Module, layers: defaultdict[str, LinearUse]) -> list[Vocabulary]:
    """The vocabularies of a model.

    A linear layer is a projection if it shares the weight of an embedding; or if it has as many
    outputs as an embedding has rows, and no linear layer takes them.
    """
    holders = holders_in(model)
    found = {w: n for w, n in holders.items() if any(_is_embedding(model, name) for name in n)}
    rows = {len(weight) for weight in found}
    taken = {name for seen in layers.values() for columns in seen.taken_from for name in columns}
    for weight, (name, *others) in holders.items():
        seen = layers[name]
        projects = seen.taken_from and not seen.transposed and name not in taken
        if projects and not others and weight.dim() == 2 and len(weight) in rows:
            found[weight] = [name]
    return [_vocabulary(model, layers, holders, *each) for each in found.items()]


def _is_embedding(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)) is nn.Embedding


def _vocabulary(
    model: nn.Module,
    layers: defaultdict[str, LinearUse],
    holders: Mapping[torch.Tensor, Sequence[str]],
    weight: torch.Tensor,
    names: Sequence[str],
) -> Vocabulary:
    parameters = [p for n in names for p in model.get_submodule(n).parameters(recurse=False)]
    # Layers that share another parameter with these, as a bias.
    others = {n for p in parameters for n in holders[p] if layers[n].taken_from} - {*names}
    embeddings = tuple(n for n in names if _is_embedding(model, n))
    projections = tuple(n for n in names if n not in embeddings)
    problems = {}
    for name in (*embeddings, *projections):
        module, seen = model.get_submodule(name), layers[name]
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
        layers[name].ends and not layers[name].problem_as("column", gathered=True)
        for name in projections
    )
    return Vocabulary(embeddings, projections, weight.shape, problems, in_loss)


def requested_divisions(
    model: nn.Module,
    requested: Styles,
    layers: Mapping[str, LinearUse],
    found: Sequence[Vocabulary],
    ways: int,
) -> dict[str, LayerDivision]:
    """The divisions that ``plan=`` requests, if the layers can be divided like that."""
    known = {n: seen for n, seen in layers.items() if seen.taken_from}
    styles: dict[str, Style] = {}
    for pattern, value in requested.items():
        if not isinstance(value, str) or value not in _STYLES:
            raise TypeError(
                f"plan={{{pattern!r}: {value!r}}}: a layer is divided by 'colwise' or 'rowwise'"
            )
        matches = fnmatch.filter(known, pattern)
        if not matches:
            raise ValueError(
                f"plan={{{pattern!r}: ...}} names no linear layer or embedding that the forward "
                f"calls; there are: {', '.join(known)}"
            )
        styles |= dict.fromkeys(matches, _STYLES[value])
    of_vocabulary = {name: each for each in found for name in each.layers}
    divisions: dict[str, LayerDivision] = {}
    for name, style in styles.items():
        vocabulary = of_vocabulary.get(name)
        _require_divisible(model, name, style, known[name], ways, vocabulary)
        if vocabulary is not None:
            divisions[name] = _with_same_weight(vocabulary, name, styles)
        else:
            divisions[name] = known[name].division(style)
    for name, division in divisions.items():
        missing = known[name].combined - divisions.keys() if division.parts > 1 else None
        if missing:
            raise ValueError(
                f"plan= divides {name} and leaves {', '.join(sorted(missing))} whole, but both "
                "outputs meet before they are split into shares: divide both or none"
            )
    return divisions


def _require_divisible(
    model: nn.Module,
    name: str,
    style: Style,
    seen: LinearUse,
    ways: int,
    vocabulary: Vocabulary | None,
) -> None:
    weight: Any = model.get_submodule(name).weight
    length = weight.shape[(style == "row") != seen.transposed]
    problem = vocabulary.problems.get(name, "") if vocabulary else seen.unusable
    if not problem and length % ways:
        problem = f"its {length} {'in' if style == 'row' else 'out'}puts are no multiple of {ways}"
    elif style == "column" and vocabulary is None:
        problem = seen.problem_as("column", gathered=True)
    if problem:
        raise ValueError(f"plan= cannot divide {name}: {problem}; leave it out of plan=")


def _with_same_weight(
    vocabulary: Vocabulary, name: str, styles: Mapping[str, Style]
) -> LayerDivision:
    """The division of a layer whose weight others may share, which need the same."""
    dim = int((styles[name] == "row") != (name in vocabulary.embeddings))
    divisions = vocabulary.divided(dim)
    for other, division in divisions.items():
        if styles.get(other) != division.style:
            value = next(word for word, style in _STYLES.items() if style == division.style)
            raise ValueError(
                f"plan= divides {name}, and not {other}, which has the same weight, in the same "
                f"way: add {other!r}: {value!r}"
            )
    return divisions[name]
