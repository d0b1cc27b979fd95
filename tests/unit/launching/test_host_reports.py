"""The doctor's report of another host, read from output with other text around it."""

import json
import subprocess
import sys
from typing import Any

import pytest

from hvkit.launching.host_checks.hosts_check import HostReport, read_report


def _report(**changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "hostname": "node1",
        "versions": {"python": "3.11.2", "torch": None},
        "mpi": {"flavour": "Open MPI", "version": "5.0.11", "program": "~/bin/mpirun"},
        "cores": {"usable": 8, "host": 16, "limit": None},
        "memory": {"total": 2**35, "available": 2**34},
        "gpus": [{"index": 0}, {"index": 1}],
        "addresses": ["10.0.0.1"],
        "interfaces": [
            {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"},
            {"name": "eth0", "address": "10.0.0.1", "network": "10.0.0.0/24"},
            {"name": "lo", "address": "::1", "network": "::1/128"},
        ],
        "problems": [{"what": "no compiler", "fix": "install one"}],
        **changes,
    }


def test_a_report_is_read():
    assert read_report(json.dumps(_report(), indent=2)) == HostReport(
        hostname="node1",
        versions={"python": "3.11.2", "torch": None, "MPI": "Open MPI 5.0.11"},
        cores=8,
        memory=2**34,
        gpus=2,
        own_addresses=("10.0.0.1",),
        outward=("10.0.0.1",),
        problems=("no compiler: install one",),
    )


def test_text_that_shells_print_around_it_is_skipped():
    text = f"Welcome {{user}}!\n{json.dumps(_report(), indent=2)}\nGoodbye.\n"
    assert read_report(text).hostname == "node1"


@pytest.mark.parametrize(("limit", "cores"), [(None, 8), (1.5, 2), (0.3, 1), (64.0, 8)])
def test_a_limit_on_cpu_time_limits_the_cores(limit, cores):
    report = _report(cores={"usable": 8, "host": 16, "limit": limit})
    assert read_report(json.dumps(report, indent=2)).cores == cores


def test_no_mpi_is_no_version():
    assert read_report(json.dumps(_report(mpi=None), indent=2)).versions["MPI"] is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it printed no report"),
        ("Welcome!\n", "it printed no report"),
        ("{\n", "its report is invalid"),
        (json.dumps(_report(format=2), indent=2), "its report has format 2, not 1"),
        (json.dumps({"format": 1}, indent=2), "its report is invalid .KeyError: 'mpi'."),
        (json.dumps(_report(memory=None), indent=2), "its report is invalid .TypeError"),
    ],
)
def test_anything_else_is_an_error(text, why):
    with pytest.raises(ValueError, match=why):
        read_report(text)


def test_this_host_s_own_report_is_read():
    command = [sys.executable, "-m", "hvkit.cli", "doctor", "--json", "--no-self-test"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    report = read_report(printed)
    assert report.cores >= 1
    assert report.memory > 0
    assert report.versions["python"] == ".".join(map(str, sys.version_info[:3]))
