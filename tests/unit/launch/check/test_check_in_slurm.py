"""In a job of Slurm hosts are checked by way of srun, also where nobody can log in."""

import os
from pathlib import Path

import pytest

from hvkit.launch import check as checks
from hvkit.launch.check.meeting import Met, meet
from hvkit.launch.hosts import Host
from hvkit.launch.shells import shell_of
from hvkit.launch.ssh import SSH

HOSTS = [Host("node1.invalid"), Host("node2.invalid")]
# Runs the command here; the name that it was to run on is kept.
SRUN = """#!/bin/sh
while :; do
    case $1 in
        --nodelist=*) echo "${1#--nodelist=}" >> "$(dirname "$0")/asked"; shift ;;
        -*) shift ;;
        *) exec "$@" ;;
    esac
done
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a srun that runs all commands here, and of a ssh that runs none."""
    for name, text in (("srun", SRUN), ("ssh", "#!/bin/sh\nexit 255\n")):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_hosts_try_to_reach_each_other(srun: Path) -> None:
    met = meet(HOSTS, shell_of("Slurm"))
    assert met.absent == ()
    assert {(reach.source, reach.target) for reach in met.reaches} == {
        ("node1.invalid", "node2.invalid"),
        ("node2.invalid", "node1.invalid"),
    }
    asked = (srun / "asked").read_text().split()
    assert sorted(asked) == ["node1.invalid", "node2.invalid"]


def test_a_check_asks_in_the_way_that_a_run_does(
    srun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shells = []
    examined = [checks.Examined(host, None, "away") for host in HOSTS]
    monkeypatch.setattr(checks, "examine", lambda hosts, shell: shells.append(shell) or examined)
    monkeypatch.setattr(checks, "meet", lambda hosts, shell: Met())
    checks.check(HOSTS, "Slurm")
    checks.check(HOSTS)
    (slurm, other) = shells
    assert slurm.command(HOSTS[0], ["true"], 10)[0] == "srun"
    assert other is SSH


def test_without_srun_there_is_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shell_of("Slurm") is SSH
