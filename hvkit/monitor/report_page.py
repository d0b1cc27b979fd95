"""The page of ``hvkit report --html``: what it shows of one run, or of several on the same charts.

A page is a template and the page's contents as JSON, which ``report_assets/page.js`` draws. Each
line of a chart has at most a few hundred points, so a page stays below 300 KB however long a run
was. All charts of a page share one range of steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from hvkit.log import duration
from hvkit.monitor.measurements import PARTS
from hvkit.monitor.recorded_run import RecordedRun
from hvkit.monitor.run_file import flattened
from hvkit.monitor.terminal_report import (
    STARTS,
    clock,
    comparison,
    headline,
    remarks,
    size_of,
    starts,
    troubles,
)

# An entry of a page, as ``page.js`` reads it: a title, and lines over steps, parts of a step, or a
# table.
Card = dict[str, Any]
Points = Sequence[tuple[float, float]]
# The name of a metric: what is measured, such as ``loss``, and on which data: ``training``,
# ``validation``; empty if its name does not contain that, as for the loss of a batch in a training
# loop.
Name = tuple[str, str]

# The most points of a line. Larger numbers, and NaN, are left out.
_POINTS, _MOST = 220, 1e100
# The most charts of metrics, hosts on a chart, and ranks in a table.
_CURVES, _HOSTS, _RANKS = 24, 8, 16

# Names of colours in ``page.html``.
_COLOURS = ("blue", "orange", "green", "red", "violet", "teal", "pink")
_PART_COLOURS = {"data": "amber", "compute": "green", "waiting": "red", "allreduce": "blue"}
_DATA_COLOURS = {"validation": "orange", "test": "green", "applied": "orange"}

# First or last words of metrics' names, and the data that they mean.
_DATA = {
    **dict.fromkeys(("val", "valid", "validation", "eval"), "validation"),
    **dict.fromkeys(("train", "training"), "training"),
    "test": "test",
}
_NORMS = {"gradient_norm": "averaged", "applied_gradient_norm": "applied"}
_LOADS = {
    "cpu": "CPU, %",
    "memory": "memory, %",
    "gpu": "GPU, %",
    "gpu_memory": "GPU memory, %",
    "sent_mb_s": "sent, MB/s",
    "received_mb_s": "received, MB/s",
}


def page(run: RecordedRun) -> str:
    """The page of a run, as HTML."""
    marks = [start.step for start in run.starts[1:]]
    about = [f"{headline(run)}. Started {clock(run.starts[0].time)}."]
    if marks:
        about.append("Dashed lines: a restart or resumption.")
    busy = [(f"{run.busy():.0%}", "of the time ranks were busy")]
    numbers = [
        *(busy if run.starts[-1].size > 1 else []),
        (f"{run.mean('samples_per_second'):,.0f}", "samples a second, all ranks"),
        (f"{1e3 * run.mean('seconds/step'):,.3g} ms", "a step"),
        (f"{run.taken:,}", f"steps in {duration(run.seconds)}"),
        (f"{len(marks)}", "restarts or resumptions"),
    ]
    sections = {
        "Metrics over steps": _metrics(run),
        "Where the time went": _times(run),
        "Who was last": _slow_ranks(run),
        "Speed": [_speed_chart([("all ranks", run)])],
        "Hosts": _hosts(run),
        "Starts": [_table("", [*zip(STARTS, ("", "n", "n", "n", ""), strict=True)], starts(run))],
    }
    return _html([run], about, troubles(run), sections, numbers=numbers, marks=marks)


def page_of_several(runs: Sequence[RecordedRun]) -> str:
    """The page that compares runs, as HTML; their names must differ."""
    about = [f"{run.name}: {headline(run)}. Started {clock(run.starts[0].time)}." for run in runs]
    notes = [f"{run.name}: {line}" for run in runs for line in troubles(run)] + remarks(runs)
    columns = [("", ""), *((run.name, "n") for run in runs)]
    names: dict[Name, str] = {}
    for metrics in _by_chart(dict.fromkeys(name for run in runs for name in run.curves)).values():
        for metric in metrics:
            names.setdefault(_name_of(metric), metric)
    sections = {
        "Numbers": [_table("", columns, [(what, *row) for what, row in comparison(runs)])],
        "Metrics over steps": [
            # The scripts may call it by different names.
            _chart(title, [(run.name, _points_of(run, name)) for run in runs])
            for name, title in list(names.items())[:_CURVES]
        ],
        "Where the time went": [
            _bar(f"{run.name}, {1e3 * run.mean('seconds/step'):.3g} ms a step", run) for run in runs
        ],
        "Speed": [_speed_chart([(run.name, run) for run in runs])],
    }
    return _html(runs, about, notes, sections)


def _html(
    runs: Sequence[RecordedRun],
    about: Sequence[str],
    notes: Sequence[str],
    sections: Mapping[str, Iterable[Card]],
    **more: Any,
) -> str:
    title = ", ".join(run.name for run in runs)
    filled = {name: [card for card in cards if card] for name, cards in sections.items()}
    contents = {
        "title": title,
        "about": about,
        "notes": [f"{line[:1].upper()}{line[1:]}." for line in notes],
        "first": min(run.starts[0].step for run in runs),
        "last": max(run.steps for run in runs),
        "sections": [{"title": name, "cards": cards} for name, cards in filled.items() if cards],
    } | ({"numbers": [], "marks": []} | more)
    values = {
        "title": escape(title),
        "data": json.dumps(contents, separators=(",", ":")).replace("<", "\\u003c"),
    }
    assets = files("hvkit.monitor") / "report_assets"

    def text(name: str) -> str:
        return values[name] if name in values else (assets / name).read_text(encoding="utf-8")

    return re.sub(r"\{\{([\w.]+)\}\}", lambda name: text(name[1]), text("page.html"))


def _chart(
    title: str,
    lines: Iterable[tuple[str, Points]],
    colours: Sequence[str] = _COLOURS,
    *,
    faint: str = "",
    zero: bool = False,
) -> Card:
    """A chart; empty if no line has a point.

    ``lines`` are names and points: steps and values. The line ``faint`` is drawn behind one that
    shows the same with less noise; with ``zero`` the vertical axis begins at 0.
    """
    drawn = []
    for number, (name, all_points) in enumerate(lines):
        if points := thinned(all_points):
            steps, values = ([_rounded(each) for each in row] for row in zip(*points, strict=True))
            line = {"name": name, "steps": steps, "values": values, "faint": name == faint}
            drawn.append(line | {"colour": colours[number % len(colours)]})
    return {"title": title, "lines": drawn, "from_zero": zero} if drawn else {}


def _table(
    title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]], text: str = ""
) -> Card:
    """A table; empty without rows. Columns are titles, with the class ``n`` for numbers, or none.

    A row has texts, or numbers from 0 to 1, which are drawn as bars; ``text`` goes below.
    """
    found = list(rows)
    return {"title": title, "columns": columns, "rows": found, "text": text} if found else {}


def _numbers(*titles: str) -> list[tuple[str, str]]:
    """Columns of numbers."""
    return [(title, "n") for title in titles]


def _bar(title: str, run: RecordedRun) -> Card:
    parts = [(name, seconds, _PART_COLOURS[name]) for name, seconds in run.parts().items()]
    return {"title": title, "parts": parts}


def _metrics(run: RecordedRun) -> list[Card]:
    cards = []
    curves = {name: points for name, points in run.curves.items() if points}
    for title, metrics in list(_by_chart(curves).items())[:_CURVES]:
        # The metric of batches is faint behind that of whole epochs.
        faint = "batches" if "training" in metrics.values() else ""
        names = [title] if len(metrics) == 1 else list(metrics.values())
        names = [name if name != "batches" or faint else "training" for name in names]
        colours = [_DATA_COLOURS.get(name, _COLOURS[0]) for name in names]
        lines = zip(names, (curves[metric] for metric in metrics), strict=True)
        cards.append(_chart(title, lines, colours, faint=faint))
    return cards


def _by_chart(metrics: Iterable[str]) -> dict[str, dict[str, str]]:
    """The metrics of each chart, by its title: the data of each metric, by the metric's name.

    Losses come first, gradient norms last.
    """
    names = {metric: _name_of(metric) for metric in metrics}
    order = sorted(names, key=lambda m: ("loss" not in m, names[m][0] == "gradient_norm"))
    charts: dict[str, dict[str, str]] = {}
    for metric in order:
        measure, data = names[metric]
        charts.setdefault(measure, {})[metric] = data or "batches"
    # A chart with one line keeps the metric's own name.
    single = {measure: metric for measure, (metric, *more) in charts.items() if not more}
    return {single.get(measure, measure): some for measure, some in charts.items()}


def _name_of(metric: str) -> Name:
    """The parts of a name such as ``epoch_val_loss``."""
    if metric in _NORMS:
        return "gradient_norm", _NORMS[metric]
    first, *more = metric.split("_")
    if more and first == "epoch":  # Keras's, of all ranks
        measure, data = _name_of("_".join(more))
        return measure, data or "training"
    if more and first in _DATA:
        return "_".join(more), _DATA[first]
    if more and more[-1] in _DATA:
        return "_".join((first, *more[:-1])), _DATA[more[-1]]
    return metric, ""


def _points_of(run: RecordedRun, name: Name) -> Points:
    return next((some for metric, some in run.curves.items() if _name_of(metric) == name), ())


def _times(run: RecordedRun) -> list[Card]:
    if not sum(run.parts().values()):
        return []
    lines = [
        (name, [(each["step"], 1e3 * each["seconds"].get(name, 0.0)) for each in run.records])
        for name in PARTS
    ]
    sent = [(purpose, size_of(size)) for purpose, size in run.sent().items()]
    return [
        _bar("", run),
        _chart("parts of a step, ms", lines, [_PART_COLOURS[name] for name in PARTS]),
        _table("bytes", [("sent for", ""), ("by a rank, a step", "n")], sent)
        or {"title": "bytes", "text": "Nothing was sent."},
    ]


def _slow_ranks(run: RecordedRun) -> list[Card]:
    last = run.last()
    rows = []
    for rank, share in last[:_RANKS]:
        by_record = [each["ranks"]["samples_per_second"] for each in run.records]
        speeds = [each[rank] for each in by_record if rank < len(each)]
        speed = sum(speeds) / max(len(speeds), 1)
        rows.append((f"{rank}", run.host_of(rank), f"{speed:,.0f}", f"{share:.0%}", share))
    columns = [*_numbers("rank"), ("host", ""), *_numbers("samples a second", "last in")]
    columns.append(("of steps", ""))
    more = f"{len(last) - _RANKS} more ranks" if len(last) > _RANKS else ""
    return [_table("", columns, rows, more)]


def _speed_chart(runs: Iterable[tuple[str, RecordedRun]]) -> Card:
    lines = [
        (name, [(r["step"], r["samples_per_second"]) for r in run.records]) for name, run in runs
    ]
    return _chart("samples a second, all ranks", lines, zero=True)


def _hosts(run: RecordedRun) -> list[Card]:
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {load: {} for load in _LOADS}
    for each in run.records:
        for name, value in flattened(each["host"]).items():
            host, _, load = name.rpartition("/")
            curves.setdefault(load, {}).setdefault(host, []).append((each["step"], value))
    return [
        _chart(title, list(curves[load].items())[:_HOSTS], zero=True)
        for load, title in _LOADS.items()
        if any(value for points in curves[load].values() for _, value in points)
    ]


def thinned(points: Points) -> Points:
    """At most ``_POINTS`` points: means over equal numbers of them; finite ones only."""
    found = [(float(x), float(y)) for x, y in points if abs(x) < _MOST and abs(y) < _MOST]
    size = math.ceil(len(found) / _POINTS)
    groups = [found[i : i + size] for i in range(0, len(found), size or 1)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _rounded(value: float) -> float:
    """A number rounded to five digits; an int if it is whole."""
    rounded = float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded
