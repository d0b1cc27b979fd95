"""Problems and notes: what the rules in ``rules.toml`` say about the facts and the self-test.

Here is what the rules name besides the facts of ``hvkit.doctor.facts``.
"""

import ipaddress
import itertools
import os
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from hvkit.host.hardware import within_limit
from hvkit.host.network import Interface

TABLE = tomllib.loads(resources.files("hvkit.doctor").joinpath("rules.toml").read_text("utf-8"))
"""The ``rules``, and ``texts`` that several of them share."""

_JINJA = Environment(undefined=StrictUndefined)
_JINJA.globals["MiB"] = 1024**2
_JINJA.filters["major"] = lambda version: int(version.partition(".")[0])

_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


def findings(facts: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """``problems`` and ``notes`` in the facts: ``what`` is found, and the ``fix``."""
    known = {**TABLE["texts"], **facts, **_about_host(facts)}
    known |= {**_about_horovod(facts), **_about_mpi(facts)}
    found: dict[str, list[dict[str, str]]] = {"problems": [], "notes": []}
    # All findings about an item follow each other.
    for each, group in itertools.groupby(TABLE["rules"], lambda rule: rule.get("each")):
        for item, rule in itertools.product(_value(each, known) if each else [{}], group):
            names = {**known, **item}
            if _value(rule["when"], names):
                severity = "problem" if "problem" in rule else "note"
                texts = {"what": rule[severity], "fix": rule["fix"]}
                rendered = {n: _JINJA.from_string(t).render(names) for n, t in texts.items()}
                found[f"{severity}s"].append(rendered)
    return found


def _value(expression: str, names: Mapping[str, Any]) -> Any:
    return _JINJA.compile_expression(expression, undefined_to_none=False)(names)


def _about_host(facts: Mapping[str, Any]) -> dict[str, Any]:
    addresses = [ipaddress.ip_address(address) for address in facts["addresses"]]
    interfaces = [Interface(**one) for one in facts["interfaces"]]
    outer = sorted((one for one in interfaces if one.outward), key=lambda one: one.version)
    of_this_host = {one.address for one in interfaces}
    return {
        "usable_cpus": within_limit(facts["cores"]["usable"], facts["cores"]["limit"]),
        "thread_counts": [
            {"name": name, "value": value, "count": _threads(value)}
            for name, value in facts["threads"].items()
        ],
        "tensorflow_names": " ".join(one.split()[0] for one in facts["_tensorflows"]),
        "outer_address": outer[0].address if outer else "127.0.1.1",
        "only_loopback": addresses and all(one.is_loopback for one in addresses),
        "foreign": addresses
        and not any(one.is_loopback or str(one) in of_this_host for one in addresses),
    }


def _threads(value: str) -> int:
    """The number of threads that a variable sets; 0 if it is not a positive number."""
    numbers = re.fullmatch(r"([1-9]\d*)(,[1-9]\d*)*", value)
    return int(numbers[1]) if numbers else 0


def _about_horovod(facts: Mapping[str, Any]) -> dict[str, Any]:
    horovod = facts["horovod"] or {"libraries": [], "fits": None, "differences": []}
    libraries, versions = horovod["libraries"], facts["versions"]
    built = [one["framework"] for one in libraries]
    names = " and ".join(_TITLES[name] for name in built)
    frameworks = [
        {"title": title, "installed": versions[name], "has_library": name in built}
        for name, title in _TITLES.items()
        if versions[name]
    ]
    # Without a framework there is nothing to build Horovod for.
    states = [_library(one, versions[one["framework"]]) for one in libraries if frameworks]
    right = frameworks and all(one["state"] == "right" for one in states)
    build = "`hvkit install-horovod`"
    if facts["_cannot_build"]:
        build += f", after fixing this: {' '.join(facts['_cannot_build'].split())}"
    return {
        "frameworks": frameworks,
        "built_frameworks": f"{names} only" if built else "no framework",
        "libraries": states,
        "build": build,
        # Without --force, the installer keeps a build that fits.
        "force": " --force" if horovod["fits"] else "",
        "other_build": right and horovod["fits"] is False,
        "differences": "; ".join(horovod["differences"])
        or "another MPI, compiler, hvkit or option",
        "lacks_nccl": libraries and not any("nccl" in one["operations"] for one in libraries),
    }


def _library(library: Mapping[str, Any], installed: str | None) -> dict[str, Any]:
    """A library of Horovod's, with the ``state`` of it."""
    state = "broken" if library["error"] else "right"
    if installed is None:
        state = "unneeded"
    elif library["built_for"] and not _same_version(library["built_for"], installed):
        state = "outdated"
    title = _TITLES[library["framework"]]
    return {**library, "title": title, "installed": installed, "state": state}


def _same_version(one: str, other: str) -> bool:
    """Whether two versions are the same; ``2.11.0+cu130`` is ``2.11.0`` in the package index."""
    whole = "+" in one and "+" in other
    return one == other if whole else one.partition("+")[0] == other.partition("+")[0]


def _about_mpi(facts: Mapping[str, Any]) -> dict[str, Any]:
    launchers = [
        {**one, "name": _name(one), "folder": os.path.dirname(one["program"])}
        for one in facts["launchers"]
    ]
    first = launchers[0] if launchers else None
    on_path = [one for one in launchers if one["on_path"] and one["name"]]
    names = list(dict.fromkeys(one["name"] for one in on_path))
    libraries = facts["horovod"]["libraries"] if facts["horovod"] else []
    used = next((one["mpi"] for one in libraries if one["mpi"]), None)
    kept = _name(used) if _name(used) in names else next(iter(names), None)
    controllers = [one["controllers"] for one in libraries if not one["error"]]
    mismatch = None
    if first and used and _name(first) not in (None, _name(used)):
        releases = {(one["flavour"], one["version"].partition(".")[0]) for one in (first, used)}
        mismatch = "release" if len(releases) == 1 else "kind"
    return {
        "launchers": launchers,
        "mpi": first,
        "horovods_mpi": _name(used),
        "mpis_on_path": names,
        "folders_of_mpis": " and ".join(f"{one['name']} in {one['folder']}" for one in on_path),
        "count_of_folders": len(on_path),
        "kept_mpi": kept,
        "why_kept": "Horovod uses it" if kept == _name(used) else "it is the first",
        "other_folders": ", ".join(one["folder"] for one in on_path if one["name"] != kept),
        "mismatch": mismatch,
        "needs_no_mpi": controllers and all("mpi" not in one for one in controllers),
    }


def _name(mpi: Mapping[str, Any] | None) -> str | None:
    return f"{mpi['flavour']} {mpi['version']}" if mpi and mpi["flavour"] else None
