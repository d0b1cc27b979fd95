"""From facts to findings: plain functions, a module for each part."""

from hvkit.doctor.facts import Facts
from hvkit.doctor.findings.finding import Finding
from hvkit.doctor.findings.gpus import gpu_findings
from hvkit.doctor.findings.horovod import horovod_findings
from hvkit.doctor.findings.machine import machine_findings
from hvkit.doctor.findings.mpi import mpi_findings
from hvkit.doctor.findings.network import network_findings
from hvkit.doctor.findings.packages import package_findings
from hvkit.doctor.findings.self_test import self_test_findings
from hvkit.doctor.two_ranks import SelfTest

__all__ = ["Finding", "findings"]


def findings(facts: Facts, self_test: SelfTest | None) -> tuple[Finding, ...]:
    """What is wrong or worth knowing: problems first.

    Args:
        facts: what was found out.
        self_test: how two ranks did; ``None`` if they were not started.
    """
    found = [
        *package_findings(facts.packages),
        *horovod_findings(facts.horovod, facts.packages),
        *mpi_findings(facts.launchers, facts.horovod),
        *machine_findings(facts),
        *gpu_findings(facts),
        *network_findings(facts),
        *(self_test_findings(self_test) if self_test else ()),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "problem"))
