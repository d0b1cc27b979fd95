"""A real Slurm on the hosts of a rig."""

import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rig import Host, Rig

# The programs and Debian's packages of them.
_PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
_CPUS = 2
_SECONDS_TO_START = 30

# Below /run is what each host has for itself.
_CONFIGURATION = """\
ClusterName=rig
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# The machine may have fewer CPUs than its hosts together.
SlurmdParameters=config_overrides
KillWait=10
MpiDefault=none
NodeName={names} CPUs={cpus} RealMemory=4000
PartitionName=main Nodes=ALL Default=YES
"""

_PREPARE = """\
mkdir -p /etc/slurm /run/slurm/state /run/slurm/spool /run/munge
cat > /etc/slurm/slurm.conf
umask 077
printf %s "$KEY" > /run/munge/key
exec munged --force --key-file /run/munge/key --log-file /run/munge/log \
    --pid-file /run/munge/pid --seed-file /run/munge/seed
"""


def missing() -> list[str]:
    """The programs of Slurm that are not on this machine, with the packages that have them."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    return [
        f"{program} is not there: install {package} (Debian's name for it)"
        for program, package in _PACKAGES.items()
        if shutil.which(program, path=path) is None
    ]


@dataclass(frozen=True)
class Job:
    """A job that has ended: its exit status as ``sbatch --wait`` gives it, and its output."""

    status: int
    output: str


class Slurm:
    """A Slurm that runs on all hosts of a rig, and is controlled from the first.

    Args:
        rig: the hosts.
        folder: for scripts and output; all hosts have it.
    """

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.first: Host = rig.hosts[0]
        self._folder = folder

    def run(self, script: str, timeout: float, cwd: Path) -> Job:
        """Submit a script from the folder ``cwd``, and wait for its end."""
        ended = self.first.run(
            ["sbatch", "--wait", *self._arguments(script)], timeout=timeout, cwd=cwd
        )
        assert "Submitted batch job" in ended.stdout, ended.stderr
        return Job(ended.returncode, self.output())

    def submit(self, script: str, cwd: Path) -> str:
        """Submit a script from the folder ``cwd``; the number of the job."""
        submitted = self.first.run(["sbatch", "--parsable", *self._arguments(script)], cwd=cwd)
        assert submitted.returncode == 0, submitted.stderr
        return submitted.stdout.strip()

    def output(self) -> str:
        """What the last job has written so far."""
        file = self._folder / "output"
        return file.read_text() if file.exists() else ""

    def _arguments(self, script: str) -> Sequence[str | Path]:
        file = self._folder / "job.sh"
        file.write_text(script)
        return [f"--output={self._folder / 'output'}", file]


@contextmanager
def slurm_on(rig: Rig, folder: Path) -> Iterator[Slurm]:
    """Start Slurm on all hosts of a rig; at the end, end it.

    Args:
        rig: the hosts, each of which gets 2 CPUs.
        folder: an empty one, for scripts and output; all hosts have it.
    """
    configuration = _CONFIGURATION.format(
        first=rig.hosts[0].name, names=",".join(host.name for host in rig.hosts), cpus=_CPUS
    )
    key = secrets.token_hex(64)
    for host in rig.hosts:
        ready = host.run(["sh", "-ec", _PREPARE], env={"KEY": key}, input=configuration)
        assert ready.returncode == 0, ready.stderr
    slurm = Slurm(rig, folder)
    with ExitStack() as daemons:
        _start(daemons, slurm.first, "slurmctld", folder)
        for host in rig.hosts:
            _start(daemons, host, "slurmd", folder)
        _wait_until_idle(slurm.first, len(rig.hosts), folder)
        yield slurm


def _start(daemons: ExitStack, host: Host, program: str, folder: Path) -> None:
    log = daemons.enter_context((folder / f"{program}-{host.name}.log").open("w"))
    daemon = host.popen(
        [program, "-D"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )
    daemons.callback(daemon.wait, timeout=30)
    daemons.callback(daemon.terminate)


def _wait_until_idle(host: Host, count: int, folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while host.run(["sinfo", "--noheader", "--format=%D %T"]).stdout.split() != [
        str(count),
        "idle",
    ]:
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
            raise TimeoutError(f"Slurm does not start within {_SECONDS_TO_START} s:\n{logs}")
        time.sleep(0.2)
