"""The report as plain dicts and lists, for ``--json``."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hvkit.doctor.facts import Facts
from hvkit.doctor.findings import Finding
from hvkit.doctor.horovod import Horovod
from hvkit.doctor.mpi import MpiLauncher
from hvkit.doctor.privacy import without_user
from hvkit.doctor.two_ranks import SelfTest

FORMAT = 1


def document(facts: Facts, test: SelfTest | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """What ``--json`` prints; the keys are described in :mod:`hvkit.doctor`."""
    launchers = [_launcher(one) for one in facts.launchers]
    limits = asdict(facts.limits)
    contents = {
        "format": FORMAT,
        "hostname": facts.hostname,
        "versions": facts.packages.versions,
        "python": facts.python,
        "platform": asdict(facts.system),
        "horovod": _horovod(facts.horovod),
        "mpi": launchers[0] if launchers else None,
        "launchers": launchers,
        "compilers": facts.compilers,
        "cores": asdict(facts.cores),
        "memory": asdict(facts.memory),
        "shared_memory": asdict(facts.shared_memory) if facts.shared_memory else None,
        "gpus": [asdict(gpu) for gpu in facts.gpus.found],
        "driver_cuda": facts.gpus.driver_cuda,
        "torch_cuda": facts.packages.torch_cuda,
        "ssh": asdict(facts.ssh),
        "addresses": facts.addresses,
        "interfaces": [asdict(one) for one in facts.interfaces],
        "threads": facts.threads,
        "environment": facts.environment,
        "limits": {name: limits[name] for name in ("open_files", "locked_memory")},
        "infiniband": facts.limits.infiniband,
        "self_test": _self_test(test) if test else None,
        **{
            f"{severity}s": [
                {"what": one.what, "fix": one.fix} for one in findings if one.severity == severity
            ]
            for severity in ("problem", "note")
        },
    }
    hidden: dict[str, Any] = without_user(contents)
    return hidden


def _launcher(launcher: MpiLauncher) -> dict[str, Any]:
    return {
        "flavour": launcher.mpi.flavour if launcher.mpi else None,
        "version": launcher.mpi.version if launcher.mpi else None,
        "program": launcher.program,
        "on_path": launcher.on_path,
    }


def _horovod(horovod: Horovod) -> dict[str, Any] | None:
    if horovod.version is None:
        return None
    values = asdict(horovod)
    return {key: values[key] for key in ("version", "libraries", "fits", "differences")}


def _self_test(test: SelfTest) -> dict[str, Any]:
    results = [asdict(one) | {"bandwidth": one.bandwidth} for one in test.results]
    return asdict(test) | {"results": results}
