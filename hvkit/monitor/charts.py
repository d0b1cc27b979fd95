"""Line charts over steps, as SVG; a metric of training and of validation shares a chart.

All charts of a page share one range of steps.

``report.html`` holds their styles, and the script that shows values under the pointer: it reads the
numbers of each chart from the page's data, and moves the line of class ``at`` in all charts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

Points = Sequence[tuple[float, float]]

COLOURS = tuple(
    f"var(--{name})" for name in ("blue", "orange", "green", "red", "violet", "teal", "pink")
)
"""Of the lines of a chart."""

# The most points of a curve.
_POINTS = 220
# A curve of so few points has a dot at each.
_DOTS = 24
# Larger numbers, and NaN, are left out.
_MOST = 1e100
_WIDTH, _HEIGHT = 560, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 26

# Prefixes of names and their meaning; a prefix that begins with another comes first.
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
        kind: on which data: ``training``, ``validation``; empty if the name does not contain it, as
            for the loss of a batch in a training loop.
    """

    base: str
    kind: str


def name_of(metric: str) -> Name:
    """The parts of a name such as ``epoch_val_loss``."""
    if metric in _NORMS:
        return Name("gradient_norm", _NORMS[metric])
    for prefix, kind in _KINDS.items():
        if metric.startswith(prefix) and len(metric) > len(prefix):
            return Name(metric.removeprefix(prefix), kind)
    for suffix, kind in _SUFFIXES.items():
        if metric.endswith(suffix) and len(metric) > len(suffix):
            return Name(metric.removesuffix(suffix), kind)
    return Name(metric, "")


def numbers_by_chart(metrics: Iterable[str]) -> dict[str, dict[str, str]]:
    """The metrics of each chart, by its title: the kind of each metric, by the metric's name.

    Losses come first, gradient norms last.
    """
    names = {metric: name_of(metric) for metric in metrics}
    order = sorted(names, key=lambda m: ("loss" not in m, names[m].base == "gradient_norm"))
    charts: dict[str, dict[str, str]] = {}
    for metric in order:
        base, kind = names[metric]
        charts.setdefault(base, {})[metric] = kind or "batches"
    # A chart with one line keeps the metric's own name.
    single = {base: next(iter(some)) for base, some in charts.items() if len(some) == 1}
    return {
        single.get(base, base): {single[base]: single[base]} if base in single else some
        for base, some in charts.items()
    }


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: for the legend.
        points: step and value.
        colour: as CSS.
        faint: whether it is drawn faintly, behind a line that shows the same with less noise.
    """

    name: str
    points: Points
    colour: str = COLOURS[0]
    faint: bool = False


@dataclass
class Charts:
    """The charts of one page.

    Args:
        first: the first step on all of them.
        last: the last.
        marks: steps after which a restart began.
    """

    first: float
    last: float
    marks: Sequence[float] = ()
    _numbers: list[list[list[float]]] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """For the page's script: the range of steps, and each chart's lines.

        A line is a list in which steps and values alternate.
        """
        inner = {"left": _LEFT, "right": _WIDTH - _RIGHT, "width": _WIDTH}
        return {"first": self.first, "last": self.last, **inner, "charts": self._numbers}

    def card(self, title: str, lines: Sequence[ChartLine], *, from_zero: bool = False) -> str:
        """A card with a title, a legend and a chart.

        Args:
            title: what the values are.
            lines: in the order of the legend.
            from_zero: whether the vertical axis begins at 0.
        """
        kept = [(line, thinned(line.points)) for line in lines]
        kept = [(line, points) for line, points in kept if points]
        if not kept:
            return card(title, "<p>no values</p>")
        self._numbers.append([[_rounded(n) for point in some for n in point] for _, some in kept])
        keys = "".join(
            f'<span class="key" style="--c:{line.colour}">'
            f"{escape(line.name) if len(kept) > 1 or line.name != title else ''}"
            f" <b>{short(points[-1][1])}</b></span>"
            for line, points in kept
        )
        return card(title, f'<div class="keys">{keys}</div>{self._drawn(kept, from_zero)}')

    def _drawn(
        self, kept: Sequence[tuple[ChartLine, list[tuple[float, float]]]], from_zero: bool
    ) -> str:
        values = [value for _, points in kept for _, value in points]
        low, high = (min(0.0, min(values)) if from_zero else min(values)), max(values)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            low, high = low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9
        ticks = _ticks(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        bottom = _HEIGHT - _BOTTOM

        def across(step: float) -> float:
            part = (step - self.first) / ((self.last - self.first) or 1)
            return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

        def down(value: float) -> float:
            return bottom - (value - low) / (high - low) * (bottom - _TOP)

        drawn = [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(tick):.1f}" '
            f'y2="{down(tick):.1f}"/><text x="{_LEFT - 8}" y="{down(tick) + 4:.1f}" '
            f'text-anchor="end">{short(tick)}</text>'
            for tick in ticks
        ]
        for step in _steps_on_axis(self.first, self.last):
            x = across(step)
            anchor = "end" if x > _WIDTH - 2 * _LEFT else "middle"
            drawn.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{short(step)}</text>'
            )
        for mark in self.marks:
            if self.first <= mark <= self.last:
                drawn.append(
                    f'<line class="mark" x1="{across(mark):.1f}" x2="{across(mark):.1f}" '
                    f'y1="{_TOP}" y2="{bottom}"><title>restart</title></line>'
                )
        for line, points in kept:
            at = [(across(step), down(value)) for step, value in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            faint = ' class="faint"' if line.faint else ""
            drawn.append(f'<polyline{faint} points="{path}" stroke="{line.colour}"/>')
            if len(at) <= _DOTS:
                drawn += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{line.colour}"/>'
                    for x, y in at
                ]
        drawn.append(
            f'<line class="at" x1="0" x2="0" y1="{_TOP}" y2="{bottom}" visibility="hidden"/>'
        )
        number = len(self._numbers) - 1
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" data-chart="{number}">'
            f"{''.join(drawn)}</svg>"
        )


def card(title: str, body: str) -> str:
    """A box with a title."""
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'


def section(title: str, cards: Iterable[str]) -> str:
    """A heading, and cards side by side; nothing without cards."""
    inside = "".join(cards)
    return f'<h2>{escape(title)}</h2><div class="charts">{inside}</div>' if inside else ""


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts.

    Args:
        columns: their titles, each with the class of its cells: ``n`` for numbers, or none.
        rows: a text for each column.
    """
    classes = [f' class="{kind}"' if kind else "" for _, kind in columns]

    def row(tag: str, texts: Iterable[str]) -> str:
        cells = zip(classes, texts, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(text)}</{tag}>' for kind, text in cells)}</tr>"

    heads = row("th", (title for title, _ in columns))
    return f"<table>{heads}{''.join(row('td', each) for each in rows)}</table>"


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most ``_POINTS`` points: means over equal numbers of them; finite ones only."""
    found = [(float(x), float(y)) for x, y in points if abs(x) < _MOST and abs(y) < _MOST]
    group = max(1, math.ceil(len(found) / _POINTS))
    if group == 1:
        return found
    return [
        (sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some))
        for some in (found[i : i + group] for i in range(0, len(found), group))
    ]


def _rounded(value: float) -> float:
    """A number rounded to five digits; an int if it is whole."""
    rounded = float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that span the range."""
    step = _round_step((high - low) / 2, (high - low) / 4)
    first = math.floor(low / step)
    return [n * step for n in range(first, math.ceil(high / step) + 1)][:8]


def _steps_on_axis(first: float, last: float) -> list[float]:
    """Round steps inside the range, and its first."""
    if last <= first:
        return [first]
    step = _round_step((last - first) / 2, (last - first) / 5)
    inside = [n * step for n in range(math.ceil(first / step), math.floor(last / step) + 1)]
    return [first, *(each for each in inside if each - first > 0.4 * step)]


def _round_step(most: float, least: float) -> float:
    """1, 2 or 5 times a power of ten: the first that is not below ``least``."""
    step: float = 10 ** math.floor(math.log10(most))
    return next((step * factor for factor in (1, 2, 5) if step * factor >= least), 10 * step)


def short(value: float) -> str:
    """A number for an axis: ``12k``."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:.4g}"
