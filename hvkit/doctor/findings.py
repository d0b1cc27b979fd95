"""Problems and notes: ``hvkit.doctor.rules`` applied to the facts and the self-test."""

import ipaddress
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hvkit.doctor.rules import NOTES, PROBLEMS, Rule
from hvkit.host.cpus import within_limit
from hvkit.host.network import Interface

_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
_MIB = 1024**2


def findings(facts: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """The ``problems`` and ``notes`` of ``hvkit.doctor.report.json_report``.

    Args:
        facts: from ``hvkit.doctor.facts.gather``, with ``self_test``; that is ``None`` if no ranks
            were started.
    """
    values = _values(facts)
    return {"problems": list(_found(PROBLEMS, values)), "notes": list(_found(NOTES, values))}


def _found(rules: Iterable[Rule], values: Mapping[str, Any]) -> Iterable[dict[str, str]]:
    # All findings about an item follow each other.
    for each, group in itertools.groupby(rules, lambda rule: rule.each):
        about = tuple(group)
        for item in values[each] if each else [{}]:
            of_item = {**values, **item}
            for rule in about:
                if rule.when(of_item):
                    yield {
                        "what": rule.what.format_map(of_item),
                        "fix": rule.fix.format_map(of_item),
                    }


def _values(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, and the values that rules derive from them."""
    shared = facts["shared_memory"] or {"size": 0, "free": 0}
    locked = facts["limits"]["locked_memory"]
    driver, torch = (_major(facts[name]) for name in ("driver_cuda", "torch_cuda"))
    return {
        **facts,
        **_about_horovod(facts),
        **_about_mpi(facts),
        **_about_addresses(facts),
        "tensorflows": " and ".join(facts["_tensorflows"]),
        "tensorflow_names": " ".join(one.split()[0] for one in facts["_tensorflows"]),
        "shm_mib": shared["size"] / _MIB,
        "free_shm_mib": shared["free"] / _MIB,
        "free_mib": facts["memory"]["available"] / _MIB,
        "lockable_kib": None if locked is None else locked / 1024,
        "usable_cpus": within_limit(facts["cores"]["usable"], facts["cores"]["limit"]),
        "thread_counts": [
            {"name": name, "value": value, "count": _threads(value)}
            for name, value in facts["threads"].items()
        ],
        "count_of_gpus": len(facts["gpus"]),
        "driver_major": driver,
        "driver_too_old": driver and torch and torch > driver,
        "results": facts["self_test"]["results"] if facts["self_test"] else [],
    }


def _threads(value: str) -> int:
    """The number of threads that a variable sets; 0 if it is not a positive number."""
    numbers = re.fullmatch(r"([1-9]\d*)(,[1-9]\d*)*", value)
    return int(numbers[1]) if numbers else 0


def _major(version: str | None) -> int | None:
    return int(version.partition(".")[0]) if version else None


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
    if installed is None:
        state = "not needed"
    elif library["built_for"] and not _same_version(library["built_for"], installed):
        state = "other version"
    else:
        state = "broken" if library["error"] else "right"
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
    horovods = next((one["mpi"] for one in libraries if one["mpi"]), None)
    kept = _name(horovods) if _name(horovods) in names else next(iter(names), None)
    controllers = [one["controllers"] for one in libraries if not one["error"]]
    return {
        "launchers": launchers,
        "mpi": first,
        "horovods_mpi": _name(horovods),
        "mpis_on_path": " and ".join(f"{one['name']} in {one['folder']}" for one in on_path),
        "count_of_folders": len(on_path),
        "count_of_mpis": len(names),
        "kept_mpi": kept,
        "why_kept": "Horovod uses it" if kept == _name(horovods) else "it is the first",
        "other_folders": ", ".join(one["folder"] for one in on_path if one["name"] != kept),
        "mismatch": _mismatch(first, horovods),
        "needs_no_mpi": controllers and all("mpi" not in one for one in controllers),
    }


def _name(mpi: Mapping[str, Any] | None) -> str | None:
    return f"{mpi['flavour']} {mpi['version']}" if mpi and mpi["flavour"] else None


def _mismatch(first: Mapping[str, Any] | None, horovods: Mapping[str, Any] | None) -> str | None:
    """How the first launcher's MPI differs from Horovod's: by its ``kind`` or its ``release``."""
    if first is None or horovods is None or _name(first) in (None, _name(horovods)):
        return None
    of_both = {(one["flavour"], one["version"].partition(".")[0]) for one in (first, horovods)}
    return "release" if len(of_both) == 1 else "kind"


def _about_addresses(facts: Mapping[str, Any]) -> dict[str, Any]:
    addresses = [ipaddress.ip_address(address) for address in facts["addresses"]]
    own = [Interface(**one) for one in facts["interfaces"]]
    outer = sorted((one for one in own if one.outward), key=lambda one: one.version)
    of_this_host = {one.address for one in own}
    return {
        "outer_address": outer[0].address if outer else "127.0.1.1",
        "only_loopback": addresses and all(one.is_loopback for one in addresses),
        "foreign": addresses
        and not any(one.is_loopback or str(one) in of_this_host for one in addresses),
    }
