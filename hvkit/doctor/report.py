"""Runs ``hvkit doctor``'s checks and reports the result: as JSON, and as one screen of text.

Users send reports in issues and mails, so the home directory and the user's name are hidden.
"""

import getpass
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hvkit.doctor.facts import gather
from hvkit.doctor.findings import findings
from hvkit.doctor.self_test import self_test

_PROBLEM, _NOTE, _FINE = "bold red", "yellow", "green"
_SCREEN = 44
_LEAST_OUTPUT = 3
_INTERFACES_SHOWN = 4
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


def examine(
    on_two_ranks: bool, show_step: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Check this host and this Python, and return the report of ``json_report``.

    Args:
        on_two_ranks: whether to start two ranks for an allreduce, which takes a while.
        show_step: called with a text about each step that begins.
    """
    show_step("looking at hardware and software")
    facts = gather()
    test = self_test(facts, show_step=show_step) if on_two_ranks else None
    return json_report({**facts, "self_test": test})


def json_report(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The report that ``hvkit doctor --json`` prints: facts, and the findings about them.

    Later versions may add keys, but remove none. Sizes are in bytes, times in seconds; a thing that
    does not exist is null.

    - ``format``: 1.
    - ``hostname``, and ``addresses``, to which it resolves.
    - ``versions``: of ``python``, ``hvkit``, ``torch``, ``tensorflow``, ``keras``, ``numpy``,
      ``horovod`` and ``mpi4py``.
    - ``python``: the interpreter. ``platform``: ``system``, ``kernel``, ``machine``, ``libc``.
    - ``horovod``: ``version``; ``libraries``, each with ``framework``, ``built_for``, ``error``
      (why it does not load), ``controllers``, ``operations`` and ``mpi`` (``flavour`` and
      ``version``); ``fits``, whether hvkit would make the same build here and now;
      ``differences`` from that.
    - ``launchers``: each MPI's ``flavour``, ``version``, ``program`` and ``on_path``; ``mpi``: the
      first of them.
    - ``compilers``: ``c++``, ``cmake``, ``nvcc``.
    - ``cores``: ``usable``, ``host``, ``limit``. ``memory``: ``total``, ``available``.
      ``shared_memory``: ``size``, ``free``. ``limits``: ``open_files``, ``locked_memory``;
      ``infiniband``, whether the host has it.
    - ``gpus``: each ``index``, ``name``, ``memory``, ``driver``; ``driver_cuda`` and
      ``torch_cuda``, the CUDA versions of the driver and of PyTorch.
    - ``ssh``: ``client``, ``server``, ``running``. ``interfaces``: each ``name``, ``address``,
      ``network``.
    - ``threads``: variables that set numbers of threads; ``environment``: names of other variables.
    - ``set_by_ranks``: a list of ``variable``, ``value`` and ``reason``.
    - ``self_test``: ``launcher``, ``error``, ``ranks``, ``bytes`` of the array, ``rounds``, and
      ``results``, each with ``framework``, ``command``, ``error``, ``output`` (the last lines of a
      failure), ``seconds`` of one allreduce (median), and ``bandwidth``, bytes per second.
    - ``problems`` and ``notes``: each ``what`` and ``fix``.
    """
    report: dict[str, Any] = without_user({**facts, **findings(facts)})
    return report


def without_user(value: Any) -> Any:
    """Hide the home directory and the user's name in a value of dicts, lists and strings.

    The home directory becomes ``~``. The user's name becomes ``USER`` where it is a part of another
    path.
    """
    return _hidden(value, _home(), _user())


def _hidden(value: Any, home: str | None, user: str | None) -> Any:
    if isinstance(value, dict):
        shown = (key for key in value if not key.startswith("_"))
        return {key: _hidden(value[key], home, user) for key in shown}
    if isinstance(value, list | tuple):
        return [_hidden(one, home, user) for one in value]
    if not isinstance(value, str):
        return value
    if home:
        value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
    return re.sub(rf"(?<=/){re.escape(user)}(?![\w.-])", "USER", value) if user else value


def _home() -> str | None:
    try:
        home = str(Path.home())
    except RuntimeError:
        # In a container, a user id may have no name and no home.
        return None
    return None if home == "/" else home


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def show(report: dict[str, Any], console: Console, *, verbose: bool = False) -> None:
    """Print a report of ``json_report`` as text; in colours and within its width on a terminal.

    With ``verbose``, also why ranks set variables.
    """
    rows, findings = list(_rows(report, verbose)), list(_finding_lines(report))
    room = max(_LEAST_OUTPUT, _SCREEN - len(rows) - len(findings) - 2)
    lines = [*findings, *_last_lines(report["self_test"], room), _result(report)]
    if console.is_terminal:
        _show_wrapped(rows, lines, console)
        return
    # Not wrapped, so that lines stay whole when they are pasted.
    width = max(len(label) for label, _ in rows)
    for line in (*(Text(f"{label:{width}}  {text}") for label, text in rows), *lines):
        console.print(line, soft_wrap=True)


def _show_wrapped(rows: Sequence[tuple[str, str]], lines: Sequence[Text], console: Console) -> None:
    """Print rows and lines, with each wrapped line indented below its beginning."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    console.print(table)
    for line in lines:
        indent = len(line.plain) - len(line.plain.lstrip())
        console.print(Padding(line[indent:], (0, 0, 0, indent), expand=False))


def _finding_lines(report: dict[str, Any]) -> Iterator[Text]:
    for problem in report["problems"]:
        yield Text(f"problem: {problem['what']}", _PROBLEM)
        yield Text(f"    fix: {problem['fix']}")
    for note in report["notes"]:
        yield Text(f"note: {note['what']}; fix: {note['fix']}", _NOTE)


def _last_lines(test: dict[str, Any] | None, room: int) -> Iterator[Text]:
    """Output of the first failed test; others mostly fail for the same reason."""
    failed = [result for result in (test["results"] if test else ()) if result["error"]]
    for result in failed[:1]:
        yield Text(f"last lines of the self-test of {result['framework']}:")
        yield from (Text(f"    {line}") for line in result["output"][-room:])


def _result(report: dict[str, Any]) -> Text:
    problems, notes = len(report["problems"]), len(report["notes"])
    counted = f"{problems or 'no'} problem{'s' * (problems != 1)}, {notes or 'no'} note"
    return Text(counted + "s" * (notes != 1), _PROBLEM if problems else _FINE)


def _rows(report: dict[str, Any], verbose: bool) -> Iterator[tuple[str, str]]:
    platform, versions = report["platform"], report["versions"]
    yield "host", f"{report['hostname']} ({', '.join(report['addresses']) or 'does not resolve'})"
    yield "system", ", ".join(filter(None, platform.values()))
    yield "Python", f"{versions['python']} ({report['python']})"
    named = (f"{name} {version or 'none'}" for name, version in versions.items())
    yield "packages", ", ".join(one for one in named if not one.startswith("python "))
    yield from _horovod_rows(report["horovod"])
    for number, launcher in enumerate(report["launchers"]):
        yield ("MPI" if number == 0 else ""), _launcher(launcher)
    if not report["launchers"]:
        yield "MPI", "none"
    compilers = (f"{name} {version or 'none'}" for name, version in report["compilers"].items())
    yield "compilers", ", ".join(compilers)
    yield "cores", _cores(report["cores"])
    yield "memory", _memory(report["memory"], report["shared_memory"])
    yield "GPUs", _gpus(report)
    yield "network", f"{_interfaces(report['interfaces'])}; {_ssh(report['ssh'])}"
    limits = (_limit(name, value) for name, value in report["limits"].items())
    yield "limits", ", ".join(limits)
    settings = [f"{name}={value}" for name, value in report["threads"].items()]
    yield (
        "set in this shell",
        ", ".join([*settings, *report["environment"]]) or "no variables that matter",
    )
    for number, text in enumerate(_set_by_ranks(report["set_by_ranks"], verbose)):
        yield ("" if number else "set by each rank"), text
    yield from _self_test_rows(report["self_test"])


def _set_by_ranks(settings: Sequence[dict[str, str]], verbose: bool) -> Iterator[str]:
    """One line with all variables that ranks set, or one for each reason."""
    named = [("{variable}={value}".format_map(each), each["reason"]) for each in settings]
    if verbose:
        for reason, group in itertools.groupby(named, lambda each: each[1]):
            yield f"{', '.join(name for name, _ in group)}: {reason}"
    elif named:
        yield f"{', '.join(name for name, _ in named)} (--verbose says why)"


def _horovod_rows(horovod: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if horovod is None:
        return
    for library in horovod["libraries"]:
        label = f"Horovod, {library['framework']}"
        if library["error"]:
            yield label, "does not load"
            continue
        mpi = library["mpi"]
        using = f"; uses {mpi['flavour']} {mpi['version']}" if mpi else ""
        yield (
            label,
            f"built for {library['built_for'] or '?'}; controllers "
            f"{', '.join(library['controllers']) or 'none'}; operations "
            f"{', '.join(library['operations']) or 'none'}{using}",
        )


def _launcher(launcher: dict[str, Any]) -> str:
    mpi = f"{launcher['flavour']} {launcher['version']}" if launcher["flavour"] else "unknown"
    return f"{mpi} ({launcher['program']}{'' if launcher['on_path'] else ', not on PATH'})"


def _cores(cores: dict[str, Any]) -> str:
    limit = f", limited to the time of {cores['limit']:g}" if cores["limit"] is not None else ""
    return f"{cores['usable']} usable of {cores['host']}{limit}"


def _memory(memory: dict[str, int], shared: dict[str, int] | None) -> str:
    held = f"{_size(shared['free'])} free of {_size(shared['size'])}" if shared else "none"
    return f"{_size(memory['available'])} free of {_size(memory['total'])}; /dev/shm: {held}"


def _gpus(report: dict[str, Any]) -> str:
    kinds = Counter(
        ", ".join([gpu["name"], _size(gpu["memory"] or 0), f"driver {gpu['driver']}"])
        for gpu in report["gpus"]
    )
    cuda = f", CUDA {report['driver_cuda']}" if report["driver_cuda"] else ""
    return "; ".join(f"{count} x {kind}{cuda}" for kind, count in kinds.items()) or "none"


def _interfaces(interfaces: Sequence[dict[str, Any]]) -> str:
    outer = [one for one in interfaces if not one["network"].startswith(("127.", "::1/", "fe80:"))]
    shown = [f"{one['name']} {one['address']}" for one in outer[:_INTERFACES_SHOWN]]
    more = [f"{len(outer) - len(shown)} more"] if len(outer) > len(shown) else []
    return ", ".join([*shown, *more]) or "loopback only"


def _ssh(ssh: dict[str, Any]) -> str:
    server = "running" if ssh["running"] else "not running" if ssh["server"] else "not installed"
    return f"ssh: {ssh['client'] or 'none'}, sshd {server}"


def _limit(name: str, value: int | None) -> str:
    shown = "unlimited" if value is None else str(value) if name == "open_files" else _size(value)
    return f"{name.replace('_', ' ')} {shown}"


def _self_test_rows(test: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if test is None:
        return
    if test["error"]:
        yield "self-test", "not started"
    for result in test["results"]:
        label = f"self-test, {result['framework']}"
        if result["error"]:
            yield label, f"failed on {test['ranks']} ranks started by {test['launcher']}"
        else:
            yield (
                label,
                f"passed on {test['ranks']} ranks started by {test['launcher']}; allreduce of "
                f"{_size(test['bytes'])} float32 in host memory: {result['seconds'] * 1000:.0f} ms "
                f"(median of {test['rounds']}), {result['bandwidth'] / 1e9:.2f} GB/s per rank",
            )


def _size(count: int) -> str:
    for unit, size in _UNITS:
        if count >= size:
            number = count / size
            return f"{number:.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"
    return f"{count} bytes"
