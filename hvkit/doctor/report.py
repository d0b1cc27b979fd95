"""The report as text: one screen, to read or to paste into an issue."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

_PROBLEM, _NOTE, _FINE = "bold red", "yellow", "green"
_SCREEN = 44
_LEAST_OUTPUT = 3
_INTERFACES_SHOWN = 4
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


def show(report: dict[str, Any], console: Console) -> None:
    """Print what :func:`hvkit.doctor.document.document` gave; in colours on a terminal."""
    lines = [*_facts(report), *_findings(report)]
    room = max(_LEAST_OUTPUT, _SCREEN - len(lines) - 2)
    for line in [*lines, *_last_lines(report["self_test"], room), _result(report)]:
        # Long lines stay whole: a terminal wraps them, and whoever pastes them can mend them.
        console.print(line, soft_wrap=True)


def _facts(report: dict[str, Any]) -> Iterator[Text]:
    rows = list(_rows(report))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        yield Text(f"{label:{width}}  {text}")


def _findings(report: dict[str, Any]) -> Iterator[Text]:
    for problem in report["problems"]:
        yield Text(f"problem: {problem['what']}", _PROBLEM)
        yield Text(f"    fix: {problem['fix']}")
    for note in report["notes"]:
        yield Text(f"note: {note['what']}; fix: {note['fix']}", _NOTE)


def _last_lines(test: dict[str, Any] | None, room: int) -> Iterator[Text]:
    """Of the first that failed: the others mostly fail for the same reason."""
    failed = [result for result in (test["results"] if test else ()) if result["error"]]
    for result in failed[:1]:
        yield Text(f"last lines of the self-test of {result['framework']}:")
        yield from (Text(f"    {line}") for line in result["output"][-room:])


def _result(report: dict[str, Any]) -> Text:
    problems, notes = len(report["problems"]), len(report["notes"])
    counted = f"{problems or 'no'} problem{'s' * (problems != 1)}, {notes or 'no'} note"
    return Text(counted + "s" * (notes != 1), _PROBLEM if problems else _FINE)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    platform, versions = report["platform"], report["versions"]
    yield "host", f"{report['hostname']} ({', '.join(report['addresses']) or 'does not resolve'})"
    yield "system", ", ".join(filter(None, platform.values()))
    yield "Python", f"{versions['python']} ({report['python']})"
    named = (f"{name} {version or 'none'}" for name, version in versions.items())
    yield "packages", ", ".join(one for one in named if not one.startswith("python "))
    yield from _horovod(report["horovod"])
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
    yield "variables", ", ".join([*settings, *report["environment"]]) or "none that matter"
    yield from _self_test(report["self_test"])


def _horovod(horovod: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
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
    limit = f", with the time of {cores['limit']:g}" if cores["limit"] is not None else ""
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


def _self_test(test: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
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
                f"right on {test['ranks']} ranks started by {test['launcher']}; allreduce of "
                f"{_size(test['bytes'])} float32 in host memory: {result['seconds'] * 1000:.0f} ms "
                f"(median of {test['rounds']}), {result['bandwidth'] / 1e9:.2f} GB/s per rank",
            )


def _size(count: int) -> str:
    for unit, size in _UNITS:
        if count >= size:
            number = count / size
            return f"{number:.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"
    return f"{count} bytes"
