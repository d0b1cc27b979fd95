"""Draws a run as one HTML page that needs nothing else: styles and charts (SVG) are inside.

The charts hold few hundred points each, so a page stays below 300 KB however long the run was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from hvkit.monitor.recorded_run import Run, Start
from hvkit.monitor.report import clock, headline, size_of, troubles
from hvkit.monitor.step_shares import PARTS
from hvkit.monitor.writers import flattened
from hvkit.wording import duration

Points = Sequence[tuple[float, float]]

# Of a curve, and curves of one kind.
_POINTS = 300
# Numbers beyond this have no place on an axis; NaN is not below it either.
_MOST = 1e100
_CURVES = 24
_HOSTS = 12
_RANKS = 16
_WIDTH, _HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 12, 26
_COLOURS = {
    "data": "var(--amber)",
    "compute": "var(--green)",
    "waiting": "var(--red)",
    "allreduce": "var(--blue)",
}
_LOADS = {
    "cpu": ("CPU", "%"),
    "memory": ("memory", "%"),
    "gpu": ("GPU", "%"),
    "gpu_memory": ("GPU memory", "%"),
    "sent_mb_s": ("sent", "MB/s"),
    "received_mb_s": ("received", "MB/s"),
}

_STYLE = """
:root{--paper:#f6f7f9;--card:#fff;--ink:#1c2330;--soft:#667085;--line:#e3e7ee;--blue:#2f6fde;
--green:#2a9d6f;--red:#d64550;--amber:#e0a030}
@media (prefers-color-scheme:dark){:root{--paper:#12161d;--card:#1a2029;--ink:#e6eaf0;
--soft:#93a0b4;--line:#2c3542;--blue:#6a9df5;--green:#4cc492;--red:#f0717b;--amber:#efbb58}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:34px 0 12px}h3{font-size:14px;margin:0 0 6px}
p{margin:4px 0 0;color:var(--soft)}
.row{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));margin-top:20px}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.card b{display:block;font-size:24px;line-height:1.25;font-weight:650}
.card span{color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}
.bar{display:flex;height:34px;border-radius:6px;overflow:hidden;margin:4px 0 10px}
.bar i{display:block;min-width:2px}
.key{display:inline-block;margin-right:18px;font-size:14px}
.key::before{content:"";display:inline-block;width:11px;height:11px;border-radius:3px;
margin-right:6px;background:var(--c)}
table{border-collapse:collapse;width:100%;font-size:14px}
th{color:var(--soft);font-weight:500;text-align:left}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.note{border-left:4px solid var(--red);margin-top:14px}.note p{color:var(--ink)}
.track{background:var(--line);border-radius:4px;height:10px;min-width:90px}
.track i{display:block;height:10px;border-radius:4px;background:var(--blue)}
"""


def page(run: Run) -> str:
    """The page, as HTML."""
    sections = [
        _head(run),
        _troubles(run),
        _curves(run),
        _time(run),
        _slow_ranks(run),
        _speed(run),
        _hosts(run),
        _starts(run),
    ]
    title = escape(run.name)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main></body></html>\n"
    )


def _head(run: Run) -> str:
    numbers = [
        (f"{run.busy():.0%}", "busy: not waiting, exchanging nothing"),
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


def _troubles(run: Run) -> str:
    lines = "".join(f"<p>{escape(line[:1].upper() + line[1:])}.</p>" for line in troubles(run))
    return f'<div class="card note">{lines}</div>' if lines else ""


def _curves(run: Run) -> str:
    marks = [start.step for start in run.starts[1:]]
    # Losses first: they are what one looks for.
    names = sorted(run.curves, key=lambda name: ("loss" not in name, name.startswith("grad")))
    charts = [
        _card(name, _chart([(name, run.curves[name], "var(--blue)")], marks))
        for name in names[:_CURVES]
        if run.curves[name]
    ]
    return _section("Metrics over steps", charts) if charts else ""


def _time(run: Run) -> str:
    parts = run.parts()
    whole = sum(parts.values())
    if not whole:
        return ""
    bar = "".join(
        f'<i style="width:{100 * parts[name] / whole:.2f}%;background:{_COLOURS[name]}" '
        f'title="{name} {1e3 * parts[name]:.3g} ms"></i>'
        for name in PARTS
    )
    keys = "".join(
        f'<span class="key" style="--c:{_COLOURS[name]}">{name} '
        f"{1e3 * parts[name]:.3g} ms, {parts[name] / whole:.0%}</span>"
        for name in PARTS
    )
    lines = [
        (
            name,
            [(each["step"], 1e3 * each["seconds"].get(name, 0.0)) for each in run.records],
            _COLOURS[name],
        )
        for name in PARTS
    ]
    sent = "".join(
        f'<tr><td>{escape(purpose)}</td><td class="n">{size_of(size)}</td></tr>'
        for purpose, size in run.sent().items()
    )
    table = (
        f'<table><tr><th>sent for</th><th class="n">by a rank, a step</th></tr>{sent}</table>'
        if sent
        else "<p>Nothing was sent.</p>"
    )
    marks = [start.step for start in run.starts[1:]]
    charts = [_card("parts of a step, ms", _chart(lines, marks)), _card("bytes", table)]
    return (
        f'<h2>Where the time went</h2><div class="card"><div class="bar">{bar}</div>{keys}</div>'
        f'<div class="charts" style="margin-top:14px">{"".join(charts)}</div>'
    )


def _slow_ranks(run: Run) -> str:
    last = run.last()
    if not last:
        return ""
    rows = []
    for rank, share in last[:_RANKS]:
        host = run.hosts[rank] if rank < len(run.hosts) else "?"
        speeds = [
            each["ranks"]["samples_per_second"][rank]
            for each in run.records
            if rank < len(each["ranks"]["samples_per_second"])
        ]
        speed = sum(speeds) / len(speeds) if speeds else 0.0
        rows.append(
            f'<tr><td class="n">{rank}</td><td>{escape(host)}</td><td class="n">{speed:,.0f}</td>'
            f'<td class="n">{share:.0%}</td><td style="width:45%"><div class="track">'
            f'<i style="width:{100 * share:.1f}%"></i></div></td></tr>'
        )
    more = f"<p>{len(last) - _RANKS} more ranks</p>" if len(last) > _RANKS else ""
    return (
        '<h2>Who was last</h2><div class="card"><table><tr><th class="n">rank</th><th>host</th>'
        '<th class="n">samples a second</th><th class="n">last in</th><th>of steps</th></tr>'
        f"{''.join(rows)}</table>{more}</div>"
    )


def _speed(run: Run) -> str:
    marks = [start.step for start in run.starts[1:]]
    together = [(each["step"], each["samples_per_second"]) for each in run.records]
    lines = [("all ranks", together, "var(--blue)")]
    charts = [_card("samples a second, all ranks", _chart(lines, marks, from_zero=True))]
    scaling = run.scaling()
    if len(scaling) > 1:
        first = min(scaling)
        rows = "".join(
            f'<tr><td class="n">{ranks}</td><td class="n">{speed:,.0f}</td>'
            f'<td class="n">{speed / (scaling[first] or 1.0) * first / ranks:.0%}</td></tr>'
            for ranks, speed in scaling.items()
        )
        charts.append(
            _card(
                "scaling",
                '<table><tr><th class="n">ranks</th><th class="n">samples a second</th>'
                f'<th class="n">of {first} ranks\' pace</th></tr>{rows}</table>',
            )
        )
    return _section("Speed", charts)


def _hosts(run: Run) -> str:
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in run.records:
        for name, value in flattened({"host": each["host"]}).items():
            host, _, load = name.removeprefix("host/").rpartition("/")
            curves.setdefault(load, {}).setdefault(host, []).append((each["step"], value))
    colours = ["var(--blue)", "var(--green)", "var(--red)", "var(--amber)"]
    charts = []
    for load, (name, unit) in _LOADS.items():
        lines = [
            (host, points, colours[number % len(colours)])
            for number, (host, points) in enumerate(curves.get(load, {}).items())
        ]
        if any(value for _, points, _ in lines for _, value in points):
            chart = _chart(lines[:_HOSTS], [], from_zero=True)
            charts.append(_card(f"{name}, {unit}", chart))
    return _section("Hosts", charts) if charts else ""


def _starts(run: Run) -> str:
    if len(run.starts) < 2:
        return ""
    rows = "".join(map(_start_row, run.starts))
    return (
        '<h2>Starts</h2><div class="card"><table><tr><th>time</th><th class="n">after step</th>'
        '<th class="n">steps lost</th><th class="n">ranks</th><th>reason</th></tr>'
        f"{rows}</table></div>"
    )


def _start_row(start: Start) -> str:
    return (
        f'<tr><td>{escape(clock(start.time))}</td><td class="n">{start.step:,}</td>'
        f'<td class="n">{start.lost:,}</td><td class="n">{start.size}</td>'
        f"<td>{escape(start.reason)}</td></tr>"
    )


def _section(title: str, charts: Iterable[str]) -> str:
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(charts)}</div>'


def _card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'


def _chart(
    lines: Sequence[tuple[str, Points, str]], marks: Iterable[float], *, from_zero: bool = False
) -> str:
    """Lines over steps, as SVG.

    Args:
        lines: name, points and colour of each.
        marks: steps at which a restart began.
        from_zero: whether the vertical axis begins at 0.
    """
    kept = [(name, _thinned(points), colour) for name, points, colour in lines]
    points = [point for _, some, _ in kept for point in some]
    if not points:
        return "<p>no values</p>"
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right = min(xs), max(xs)
    low, high = (min(0.0, min(ys)) if from_zero else min(ys)), max(ys)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / (high - low)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    drawn = []
    for tick in ticks:
        y = at(left, tick)[1]
        drawn.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="var(--line)"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" '
            f'text-anchor="end">{_short(tick)}</text>'
        )
    for x, anchor in ((left, "start"), (right, "end")):
        drawn.append(
            f'<text x="{at(x, low)[0]:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">'
            f"{_short(x)}</text>"
        )
    for mark in marks:
        if left <= mark <= right:
            x = at(mark, low)[0]
            drawn.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
                'stroke="var(--soft)" stroke-dasharray="3 3"><title>restart</title></line>'
            )
    for name, some, colour in kept:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in some))
        last = f"{escape(name)}: {some[-1][1]:.4g}" if some else escape(name)
        if len(some) == 1:
            x, y = at(*some[0])
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" '
            f'stroke-linejoin="round"><title>{last}</title></polyline>'
        )
    keys = ""
    if len(kept) > 1:
        keys = "".join(
            f'<span class="key" style="--c:{colour}">{escape(name)}</span>'
            for name, _, colour in kept
        )
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg>'
    return svg + keys


def _thinned(points: Points) -> list[tuple[float, float]]:
    """At most ``_POINTS`` points: means over equal numbers of them; finite ones only."""
    found = [(float(x), float(y)) for x, y in points if abs(x) < _MOST and abs(y) < _MOST]
    group = max(1, math.ceil(len(found) / _POINTS))
    if group == 1:
        return found
    return [
        (sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some))
        for some in (found[i : i + group] for i in range(0, len(found), group))
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that span the range."""
    step = 10 ** math.floor(math.log10((high - low) / 2))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= 4:
            step *= factor
            break
    first = math.floor(low / step)
    return [n * step for n in range(first, math.ceil(high / step) + 1)][:8]


def _short(value: float) -> str:
    """A number for an axis: ``1.2k``."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:.4g}"
