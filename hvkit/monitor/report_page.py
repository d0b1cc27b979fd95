"""Draws runs as one HTML page that contains its styles, script and charts (SVG).

Each chart has at most a few hundred points, so a page stays below 300 KB however long a run was.
``report.html`` is the template of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from importlib.resources import files

from hvkit.monitor import comparison
from hvkit.monitor.charts import (
    COLOURS,
    ChartLine,
    Charts,
    Name,
    Points,
    card,
    name_of,
    numbers_by_chart,
    section,
    table,
)
from hvkit.monitor.recorded_run import RecordedRun
from hvkit.monitor.step_times import PARTS
from hvkit.monitor.terminal_report import clock, headline, size_of, troubles
from hvkit.monitor.writers import flattened
from hvkit.wording import duration

_CURVES = 24
_HOSTS = 8
_RANKS = 16
_PART_COLOURS = {
    "data": "var(--amber)",
    "compute": "var(--green)",
    "waiting": "var(--red)",
    "allreduce": "var(--blue)",
}
_KIND_COLOURS = {
    "validation": "var(--orange)",
    "test": "var(--green)",
    "applied": "var(--orange)",
}
_LOADS = {
    "cpu": ("CPU", "%"),
    "memory": ("memory", "%"),
    "gpu": ("GPU", "%"),
    "gpu_memory": ("GPU memory", "%"),
    "sent_mb_s": ("sent", "MB/s"),
    "received_mb_s": ("received", "MB/s"),
}


def page(run: RecordedRun) -> str:
    """The page of a run, as HTML."""
    marks = [start.step for start in run.starts[1:]]
    charts = Charts(run.starts[0].step, run.steps, marks)
    parts = [
        _head(run),
        _troubles(troubles(run)),
        _curves(run, charts),
        _time(run, charts),
        _slow_ranks(run),
        _speed(run, charts),
        _hosts(run, charts),
        _starts(run),
    ]
    return _filled(run.name, parts, charts)


def page_of_several(runs: Sequence[RecordedRun]) -> str:
    """The page that compares runs, as HTML; their names must differ."""
    first = min(run.starts[0].step for run in runs)
    charts = Charts(first, max(run.steps for run in runs))
    about = "".join(
        f"<p>{escape(run.name)}: {escape(headline(run))}. Started {clock(run.starts[0].time)}.</p>"
        for run in runs
    )
    said = [f"{run.name}: {line}" for run in runs for line in troubles(run)]
    said += comparison.remarks(runs)
    title = ", ".join(run.name for run in runs)
    parts = [
        f"<h1>{escape(title)}</h1>{about}",
        _troubles(said),
        _numbers_of_several(runs),
        _curves_of_several(runs, charts),
        _times_of_several(runs),
        section(
            "Speed",
            [
                charts.card(
                    "samples a second, all ranks",
                    _by_run(runs, list(map(_speeds, runs))),
                    from_zero=True,
                )
            ],
        ),
    ]
    return _filled(title, parts, charts)


def _filled(title: str, parts: Sequence[str], charts: Charts) -> str:
    template = files("hvkit.monitor").joinpath("report.html").read_text(encoding="utf-8")
    values = {
        "title": escape(title),
        "body": "\n".join(part for part in parts if part),
        "data": json.dumps(charts.data(), separators=(",", ":")),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], template)


def _head(run: RecordedRun) -> str:
    busy = [(f"{run.busy():.0%}", "of the time ranks were busy")]
    numbers = [
        *(busy if run.starts[-1].size > 1 else []),
        (f"{run.mean('samples_per_second'):,.0f}", "samples a second, all ranks"),
        (f"{1e3 * run.mean('seconds/step'):,.3g} ms", "a step"),
        (f"{run.taken:,}", f"steps in {duration(run.seconds)}"),
        (f"{len(run.starts) - 1}", "restarts or resumptions"),
    ]
    cards = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in numbers
    )
    started = clock(run.starts[0].time)
    return (
        f"<h1>{escape(run.name)}</h1><p>{escape(headline(run))}. Started {escape(started)}.</p>"
        f'<div class="row">{cards}</div>'
    )


def _troubles(said: Sequence[str]) -> str:
    lines = "".join(f"<p>{escape(line[:1].upper() + line[1:])}.</p>" for line in said)
    return f'<div class="card note">{lines}</div>' if lines else ""


def _curves(run: RecordedRun, charts: Charts) -> str:
    drawn = {name: points for name, points in run.curves.items() if points}
    cards = [
        charts.card(
            title, [_line(kind, drawn[name], kinds.values()) for name, kind in kinds.items()]
        )
        for title, kinds in list(numbers_by_chart(drawn).items())[:_CURVES]
    ]
    return section("Metrics over steps", cards)


def _line(kind: str, points: Points, kinds: Collection[str]) -> ChartLine:
    """A metric's line; that of batches is faint behind that of whole epochs."""
    faint = kind == "batches" and "training" in kinds
    name = "training" if kind == "batches" and not faint else kind
    return ChartLine(name, points, _KIND_COLOURS.get(kind, COLOURS[0]), faint)


def _curves_of_several(runs: Sequence[RecordedRun], charts: Charts) -> str:
    order = numbers_by_chart(dict.fromkeys(name for run in runs for name in run.curves))
    titles: dict[Name, str] = {}
    for metric in (metric for kinds in order.values() for metric in kinds):
        titles.setdefault(name_of(metric), metric)
    cards = []
    for name, title in list(titles.items())[:_CURVES]:
        curves = [_curve(run, name) for run in runs]
        if any(curves):
            cards.append(charts.card(title, _by_run(runs, curves)))
    return section("Metrics over steps", cards)


def _curve(run: RecordedRun, name: Name) -> Points:
    """The run's points of the metric with this meaning, whatever the script calls it."""
    return next((some for metric, some in run.curves.items() if name_of(metric) == name), ())


def _by_run(runs: Sequence[RecordedRun], curves: Sequence[Points]) -> list[ChartLine]:
    return [
        ChartLine(run.name, points, COLOURS[number % len(COLOURS)])
        for number, (run, points) in enumerate(zip(runs, curves, strict=True))
    ]


def _bar(parts: Mapping[str, float]) -> str:
    whole = sum(parts.values()) or 1.0
    pieces = "".join(
        f'<i style="width:{100 * parts[name] / whole:.2f}%;background:{_PART_COLOURS[name]}" '
        f'title="{name} {1e3 * parts[name]:.3g} ms"></i>'
        for name in PARTS
        if parts[name] > 0
    )
    keys = "".join(
        f'<span class="key" style="--c:{_PART_COLOURS[name]}">{name} '
        f"<b>{1e3 * parts[name]:.3g} ms</b>, {parts[name] / whole:.0%}</span>"
        for name in PARTS
    )
    return f'<div class="bar">{pieces}</div>{keys}'


def _time(run: RecordedRun, charts: Charts) -> str:
    parts = run.parts()
    if not sum(parts.values()):
        return ""
    lines = [
        ChartLine(
            name,
            [(each["step"], 1e3 * each["seconds"].get(name, 0.0)) for each in run.records],
            _PART_COLOURS[name],
        )
        for name in PARTS
    ]
    sent = [(purpose, size_of(size)) for purpose, size in run.sent().items()]
    columns = [("sent for", ""), ("by a rank, a step", "n")]
    bytes_sent = table(columns, sent) if sent else "<p>Nothing was sent.</p>"
    cards = [charts.card("parts of a step, ms", lines), card("bytes", bytes_sent)]
    return (
        f'<h2>Where the time went</h2><div class="card">{_bar(parts)}</div>'
        f'<div class="charts" style="margin-top:14px">{"".join(cards)}</div>'
    )


def _times_of_several(runs: Sequence[RecordedRun]) -> str:
    bars = "".join(
        f'<h3 style="margin-top:10px">{escape(run.name)}, {1e3 * run.mean("seconds/step"):.3g} ms '
        f"a step</h3>{_bar(run.parts())}"
        for run in runs
    )
    return f'<h2>Where the time went</h2><div class="card">{bars}</div>'


def _numbers_of_several(runs: Sequence[RecordedRun]) -> str:
    columns = [("", ""), *((run.name, "n") for run in runs)]
    rows = [(what, *values) for what, values in comparison.numbers(runs)]
    return f'<h2>Numbers</h2><div class="card wide">{table(columns, rows)}</div>'


def _slow_ranks(run: RecordedRun) -> str:
    last = run.last()
    if not last:
        return ""
    rows = []
    for rank, share in last[:_RANKS]:
        speeds = [
            each["ranks"]["samples_per_second"][rank]
            for each in run.records
            if rank < len(each["ranks"]["samples_per_second"])
        ]
        speed = sum(speeds) / len(speeds) if speeds else 0.0
        rows.append(
            f'<tr><td class="n">{rank}</td><td>{escape(run.host_of(rank))}</td>'
            f'<td class="n">{speed:,.0f}</td><td class="n">{share:.0%}</td><td style="width:45%">'
            f'<div class="track"><i style="width:{100 * share:.1f}%"></i></div></td></tr>'
        )
    more = f"<p>{len(last) - _RANKS} more ranks</p>" if len(last) > _RANKS else ""
    return (
        '<h2>Who was last</h2><div class="card"><table><tr><th class="n">rank</th><th>host</th>'
        '<th class="n">samples a second</th><th class="n">last in</th><th>of steps</th></tr>'
        f"{''.join(rows)}</table>{more}</div>"
    )


def _speeds(run: RecordedRun) -> Points:
    return [(each["step"], each["samples_per_second"]) for each in run.records]


def _speed(run: RecordedRun, charts: Charts) -> str:
    title = "samples a second, all ranks"
    cards = [charts.card(title, [ChartLine(title, _speeds(run))], from_zero=True)]
    scaling = run.scaling()
    if len(scaling) > 1:
        first = min(scaling)
        columns = [("ranks", "n"), ("samples a second", "n"), (f"of {first} ranks' pace", "n")]
        rows = [
            (f"{ranks}", f"{speed:,.0f}", f"{speed / (scaling[first] or 1.0) * first / ranks:.0%}")
            for ranks, speed in scaling.items()
        ]
        cards.append(card("scaling", table(columns, rows)))
    return section("Speed", cards)


def _hosts(run: RecordedRun, charts: Charts) -> str:
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in run.records:
        for name, value in flattened({"host": each["host"]}).items():
            host, _, load = name.removeprefix("host/").rpartition("/")
            curves.setdefault(load, {}).setdefault(host, []).append((each["step"], value))
    cards = []
    for load, (name, unit) in _LOADS.items():
        lines = [
            ChartLine(host, points, COLOURS[number % len(COLOURS)])
            for number, (host, points) in enumerate(curves.get(load, {}).items())
        ]
        if any(value for line in lines for _, value in line.points):
            cards.append(charts.card(f"{name}, {unit}", lines[:_HOSTS], from_zero=True))
    return section("Hosts", cards)


def _starts(run: RecordedRun) -> str:
    if len(run.starts) < 2:
        return ""
    columns = [
        *(("time", ""), ("after step", "n"), ("steps lost", "n"), ("ranks", "n"), ("reason", "")),
    ]
    rows = [
        (clock(each.time), f"{each.step:,}", f"{each.lost:,}", f"{each.size}", each.reason)
        for each in run.starts
    ]
    return f'<h2>Starts</h2><div class="card">{table(columns, rows)}</div>'
