"""What ``plan=`` divides: names of layers, in the words of PyTorch's ``parallelize_module``."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hvkit.frameworks.pytorch.model_parallel.tensor.flow import Linear
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import Division, Kind
from hvkit.frameworks.pytorch.model_parallel.tensor.vocabulary import Vocabulary

Words = Mapping[str, Any]
"""Module names, with ``*`` for any text, and ``"colwise"`` or ``"rowwise"`` for each."""


def divisions_in_words(
    model: nn.Module,
    words: Words,
    layers: Mapping[str, Linear],
    found: Sequence[Vocabulary],
    ways: int,
) -> dict[str, Division]:
    """How the layers are divided that a user names.

    Args:
        model: the whole one.
        words: the user's.
        layers: linear layers and embeddings, as a dry run has seen them.
        found: the vocabularies among them.
        ways: among how many ranks.

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
    divisions: dict[str, Division] = {}
    for name, kind in kinds.items():
        vocabulary = of_vocabulary.get(name)
        _require_divisible(model, name, kind, known[name], ways, vocabulary)
        if vocabulary is not None:
            divisions[name] = _like_others(vocabulary, name, kinds)
        else:
            parts = min(known[name].parts or {1}) if kind == "column" else 1
            divisions[name] = Division(kind, parts, known[name].transposed)
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
    seen: Linear,
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


def _like_others(vocabulary: Vocabulary, name: str, kinds: Mapping[str, Kind]) -> Division:
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
