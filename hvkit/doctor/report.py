"""Runs ``hvkit doctor``'s checks and reports the result: as JSON, and as one screen of text.

Users send reports in issues and mails, so the home directory and the user's name are hidden.
"""

import contextlib
import getpass
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hvkit.doctor.facts import gather
from hvkit.doctor.findings import findings
from hvkit.doctor.self_test import self_test
from hvkit.log import counted

_PROBLEM, _NOTE, _FINE = "bold red", "yellow", "green"
_SCREEN = 44
_LEAST_OUTPUT = 3
_INTERFACES_SHOWN = 4


def examine(
    on_two_ranks: bool, show_step: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Check this host and this Python, and return the report of ``json_report``.

    ``show_step`` is called with a text about each step that begins.
    """
    show_step("looking at hardware and software")
    facts = gather()
    test = self_test(facts, show_step=show_step) if on_two_ranks else None
    return json_report({**facts, "self_test": test})


def json_report(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What ``hvkit doctor --json`` prints. Later versions may add keys, but remove none."""
    report: dict[str, Any] = without_user({**facts, **findings(facts)})
    return report


def without_user(value: Any) -> Any:
    """The value with ``~`` and ``USER`` in paths, and without keys that begin with ``_``."""
    text = json.dumps(value, ensure_ascii=False)
    # In a container, a user id may have no name and no home.
    with contextlib.suppress(RuntimeError):
        if (home := str(Path.home())) != "/":
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    with contextlib.suppress(KeyError, OSError):
        text = re.sub(rf"(?<=/){re.escape(getpass.getuser())}(?![\w.-])", "USER", text)
    return json.loads(
        text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if not k.startswith("_")}
    )


def show(report: dict[str, Any], console: Console, *, verbose: bool = False) -> None:
    """Print a report of ``json_report`` as text; ``verbose``: also why ranks set variables."""
    rows, found = list(_rows(report, verbose)), list(_findings(report))
    width = max(len(label) for label, _ in rows)
    room = max(_LEAST_OUTPUT, _SCREEN - len(rows) - len(found) - 2)
    lines = [(f"{label:{width}}  ", Text(text)) for label, text in rows]
    numbers = (counted(len(report[f"{name}s"]), name) for name in ("problem", "note"))
    result = ", ".join(re.sub("^0", "no", number) for number in numbers)
    last = "", Text(result, _PROBLEM if report["problems"] else _FINE)
    if not console.is_terminal:  # lines stay whole, for those who paste them
        console.width = 10**6
    for begin, text in (*lines, *found, *_last_lines(report["self_test"], room), last):
        # On a terminal, each wrapped line goes on below its text's beginning.
        grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"))
        grid.add_row(Text(begin), text)
        console.print(grid if begin else text)


def _findings(report: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    for problem in report["problems"]:
        yield "", Text(f"problem: {problem['what']}", _PROBLEM)
        yield "    ", Text(f"fix: {problem['fix']}")
    for note in report["notes"]:
        yield "", Text(f"note: {note['what']}; fix: {note['fix']}", _NOTE)


def _last_lines(test: dict[str, Any] | None, room: int) -> Iterator[tuple[str, Text]]:
    """Output of the first failed test; others mostly fail for the same reason."""
    failed = [result for result in (test["results"] if test else ()) if result["error"]]
    for result in failed[:1]:
        yield "", Text(f"last lines of the self-test of {result['framework']}:")
        yield from (("    ", Text(line)) for line in result["output"][-room:])


def _rows(report: dict[str, Any], verbose: bool) -> Iterator[tuple[str, str]]:
    versions, cores, memory = dict(report["versions"]), report["cores"], report["memory"]
    shared, ssh = report["shared_memory"], report["ssh"]
    yield "host", f"{report['hostname']} ({', '.join(report['addresses']) or 'does not resolve'})"
    yield "system", ", ".join(filter(None, report["platform"].values()))
    yield "Python", f"{versions.pop('python')} ({report['python']})"
    yield "packages", _versions(versions)
    for library in report["horovod"]["libraries"] if report["horovod"] else ():
        yield f"Horovod, {library['framework']}", _library(library)
    mpis = [
        f"{_mpi(one)} ({one['program']}{'' if one['on_path'] else ', not on PATH'})"
        for one in report["launchers"]
    ]
    yield from _labelled("MPI", mpis or ["none"])
    yield "compilers", _versions(report["compilers"])
    limit = f", limited to the time of {cores['limit']:g}" if cores["limit"] is not None else ""
    yield "cores", f"{cores['usable']} usable of {cores['host']}{limit}"
    free = f"{_size(shared['free'])} free of {_size(shared['size'])}" if shared else "none"
    whole = f"{_size(memory['available'])} free of {_size(memory['total'])}"
    yield "memory", f"{whole}; /dev/shm: {free}"
    yield "GPUs", _gpus(report)
    server = "running" if ssh["running"] else "not running" if ssh["server"] else "not installed"
    network = _interfaces(report["interfaces"])
    yield "network", f"{network}; ssh: {ssh['client'] or 'none'}, sshd {server}"
    files, locked = report["limits"]["open_files"], report["limits"]["locked_memory"]
    locked = "unlimited" if locked is None else _size(locked)
    files = "unlimited" if files is None else files
    yield "limits", f"open files {files}, locked memory {locked}"
    settings = [f"{name}={value}" for name, value in report["threads"].items()]
    settings += report["environment"]
    yield "set in this shell", ", ".join(settings) or "no variables that matter"
    yield from _labelled("set by each rank", _set_by_ranks(report["set_by_ranks"], verbose))
    yield from _self_test_rows(report["self_test"])


def _labelled(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    return zip(itertools.chain([label], itertools.repeat("")), texts, strict=False)


def _versions(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'none'}" for name, version in found.items())


def _mpi(mpi: Mapping[str, str | None]) -> str:
    return f"{mpi['flavour']} {mpi['version']}" if mpi["flavour"] else "unknown"


def _set_by_ranks(settings: list[dict[str, str]], verbose: bool) -> Iterator[str]:
    """One line with all variables that ranks set, or one for each reason."""
    by_reason = itertools.groupby(settings, lambda each: each["reason"] if verbose else "")
    for reason, group in by_reason:
        names = ", ".join(f"{each['variable']}={each['value']}" for each in group)
        yield f"{names}: {reason}" if reason else f"{names} (--verbose says why)"


def _library(library: dict[str, Any]) -> str:
    if library["error"]:
        return "does not load"
    parts = [
        f"{name} {', '.join(library[name]) or 'none'}" for name in ("controllers", "operations")
    ]
    parts += [f"uses {_mpi(library['mpi'])}"] if library["mpi"] else []
    return "; ".join([f"built for {library['built_for'] or '?'}", *parts])


def _gpus(report: dict[str, Any]) -> str:
    models = Counter(
        f"{gpu['name']}, {_size(gpu['memory'] or 0)}, driver {gpu['driver']}"
        for gpu in report["gpus"]
    )
    cuda = f", CUDA {report['driver_cuda']}" if report["driver_cuda"] else ""
    return "; ".join(f"{count} x {model}{cuda}" for model, count in models.items()) or "none"


def _interfaces(interfaces: list[dict[str, Any]]) -> str:
    outer = [one for one in interfaces if not one["network"].startswith(("127.", "::1/", "fe80:"))]
    shown = [f"{one['name']} {one['address']}" for one in outer[:_INTERFACES_SHOWN]]
    more = [f"{len(outer) - len(shown)} more"] if len(outer) > len(shown) else []
    return ", ".join([*shown, *more]) or "loopback only"


def _self_test_rows(test: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if test is None:
        return
    if test["error"]:
        yield "self-test", "not started"
    for result in test["results"]:
        text = f"on {test['ranks']} ranks started by {test['launcher']}"
        if not result["error"]:
            text += (
                f"; allreduce of {_size(test['bytes'])} float32 in host memory: "
                f"{result['seconds'] * 1000:.0f} ms (median of {test['rounds']}), "
                f"{result['bandwidth'] / 1e9:.2f} GB/s per rank"
            )
        passed = "failed" if result["error"] else "passed"
        yield f"self-test, {result['framework']}", f"{passed} {text}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.{0 if count >= 10 * size else 1}f} {unit}"
    return f"{count} bytes"
