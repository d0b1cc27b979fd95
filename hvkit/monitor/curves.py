"""Which of a run's numbers belong on one chart: those of training and validation, for example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Prefixes of names, longest first where one begins with another, and what they say.
_KINDS = {
    "epoch_val_": "validation",
    "epoch_": "training",
    "validation_": "validation",
    "valid_": "validation",
    "val_": "validation",
    "eval_": "validation",
    "test_": "test",
    "training_": "training",
    "train_": "training",
}
_SUFFIXES = {
    "_validation": "validation",
    "_val": "validation",
    "_test": "test",
    "_train": "training",
}
_NORMS = {"gradient_norm": "averaged", "applied_gradient_norm": "applied"}


class Name(NamedTuple):
    """A number's name, as a chart shows it.

    Attributes:
        base: what is measured: ``loss``.
        kind: of what: ``training``, ``validation``; empty if the name does not say it, as for what
            a training loop records of its batches.
    """

    base: str
    kind: str


def name_of(metric: str) -> Name:
    """What a name such as ``epoch_val_loss`` says."""
    if metric in _NORMS:
        return Name("gradient_norm", _NORMS[metric])
    for prefix, kind in _KINDS.items():
        if metric.startswith(prefix) and len(metric) > len(prefix):
            return Name(metric.removeprefix(prefix), kind)
    for suffix, kind in _SUFFIXES.items():
        if metric.endswith(suffix) and len(metric) > len(suffix):
            return Name(metric.removesuffix(suffix), kind)
    return Name(metric, "")


def together(metrics: Iterable[str]) -> dict[str, dict[str, str]]:
    """The metrics of each chart, by what they measure: the kind of each, by the metric's name.

    Losses come first: they are what one looks for. Gradient norms come last.
    """
    names = {metric: name_of(metric) for metric in metrics}
    order = sorted(names, key=lambda m: ("loss" not in m, names[m].base == "gradient_norm"))
    charts: dict[str, dict[str, str]] = {}
    for metric in order:
        base, kind = names[metric]
        charts.setdefault(base, {})[metric] = kind or "batches"
    # A chart of one line has the name that the script gave it.
    single = {base: next(iter(some)) for base, some in charts.items() if len(some) == 1}
    return {
        single.get(base, base): {single[base]: single[base]} if base in single else some
        for base, some in charts.items()
    }
