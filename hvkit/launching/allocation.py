"""The hosts that a batch system allocated to this job, read from the job's environment.

``allocation`` tries Slurm, PBS, LSF, Amazon SageMaker and a default hostfile (the Kubernetes MPI
operator's, or a site's), in that order. To add a batch system, write a function from the
environment to an ``Allocation``, ``None`` outside of its jobs, and add it to ``_SYSTEMS`` before
the last one.

SageMaker starts the same command on every host of a job. So ``hvkit run``, or a script with
``hvkit.launch``, runs on every host. On the first it starts the ranks, as soon as it can log in to
the others. On each other host it only waits until the first host's container has ended: SageMaker
stops a container when its command ends.
"""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvkit.errors import HostfileError, LaunchError
from hvkit.host.hardware import gpus as gpus_here
from hvkit.host.system import run
from hvkit.launching.hosts import Host, count, host_name, read_hostfile, shown
from hvkit.launching.ssh import SLURM, explain_ssh, run_on_hosts, ssh_command
from hvkit.log import logger

SAGEMAKER = "SageMaker"
HOSTFILE = "hostfile"

# Seconds for scontrol, which may have to fetch its configuration over the network.
_SCONTROL = 30.0
_TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)

# Each MPI has its own variable for the default hostfile.
_HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
_OPERATOR_HOSTFILE = Path("/etc/mpi/hostfile")
_SAGEMAKER_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
_CURRENT_HOST = "SM_CURRENT_HOST"

# Seconds for the containers of a job to start, which they do at different times.
_STARTED = 600.0
# Seconds without a login, after one, that mean the end of the first host's container.
_ENDED = 30.0
_CONNECT = 10.0
_BETWEEN_TRIES = 2.0
# Prints this line at login, after what the shell's start files may print; ends with its input.
_HERE = "hvkit is logged in"
_SESSION = ("sh", "-c", f"echo {_HERE}; exec cat")
# A host that has vanished is noticed after three of these intervals, in seconds.
_ALIVE = ("-o", "ServerAliveInterval=10")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job, each once, with its slots."""

    system: str  # the batch system, or HOSTFILE for a launcher's default hostfile
    source: str  # the environment variable or file that lists the hosts
    hosts: tuple[Host, ...]


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation of the job that this process runs in; ``None`` outside of a job."""
    return next(filter(None, (system(environ) for system in _SYSTEMS)), None)


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    """Slurm: ``SLURM_JOB_NODELIST`` names the hosts, the first variable set here their slots.

    1. ``SLURM_TASKS_PER_NODE``, from ``--ntasks`` and ``--ntasks-per-node``: ``2(x3),1``;
    2. ``SLURM_GPUS_ON_NODE``, the GPUs of this host: every host gets that number of slots;
    3. ``SLURM_JOB_CPUS_PER_NODE``, the CPUs of each host.
    """
    variable = "SLURM_JOB_NODELIST"
    if (nodelist := environ.get(variable)) is None:
        return None
    names = _names(_expanded(nodelist, variable), variable, nodelist)
    tasks, gpus, cpus = "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"
    if tasks in environ:
        slots = _slots_per_node(environ, tasks, len(names))
    elif environ.get(gpus, "0") != "0":
        slots = [_slots(environ[gpus], gpus, environ[gpus])] * len(names)
    elif cpus in environ:
        slots = _slots_per_node(environ, cpus, len(names))
    else:
        raise LaunchError(
            f"{variable} is set, but none of {tasks}, {gpus} and {cpus}, which give the slots of "
            "its hosts: submit the job with --ntasks-per-node"
        )
    return Allocation(SLURM, variable, tuple(map(Host, names, slots)))


def _expanded(nodelist: str, variable: str) -> list[str]:
    """The host names that Slurm shortens to ``gpu[01-03,7]``, expanded by its ``scontrol``."""
    if nodelist and "[" not in nodelist:
        return nodelist.split(",")
    done = run(["scontrol", "show", "hostnames", nodelist], _SCONTROL)
    if done is None:
        why = "there is no scontrol, Slurm's own program, on PATH"
    elif done.status is None:
        why = f"scontrol does not answer within {_SCONTROL:g} seconds"
    elif done.status == 0 and (names := done.stdout.split()):
        return names
    else:
        # After "Invalid hostlist", too, it ends with status 0.
        lines = done.stderr.strip().splitlines() or ["scontrol prints nothing"]
        why = lines[-1]
    raise _invalid(variable, nodelist, f"cannot be expanded ({why})")


def _slots_per_node(environ: Mapping[str, str], variable: str, size: int) -> list[int]:
    """The slots of ``size`` hosts, from a list such as ``2(x3),1``."""
    value = environ[variable]
    slots: list[int] = []
    for item in value.split(","):
        match = _TIMES.fullmatch(item)
        if match is None:
            raise _invalid(variable, value, "must be a list such as 2(x3),1")
        times = _slots(match[2] or "1", variable, value)
        slots += [_slots(match[1], variable, value)] * times
    if len(slots) != size:
        raise _invalid(
            variable, value, f"is for {len(slots)} hosts, but SLURM_JOB_NODELIST names {size}"
        )
    return slots


def _pbs(environ: Mapping[str, str]) -> Allocation | None:
    """PBS (Torque, PBS Pro, OpenPBS): the file ``PBS_NODEFILE`` has a line for each slot.

    In PBS Pro a chunk has ``mpiprocs`` lines, 1 by default.
    """
    variable = "PBS_NODEFILE"
    hosts = _hosts_of_file(environ, variable)
    return Allocation("PBS", variable, hosts) if hosts else None


def _lsf(environ: Mapping[str, str]) -> Allocation | None:
    """LSF: the file ``LSB_DJOB_HOSTFILE`` has a line for each slot; else ``LSB_MCPU_HOSTS``.

    On systems with IBM's cluster manager, which sets ``CSM_ALLOCATION_ID``, the job script runs on
    a launch node that takes no ranks. LSF lists it first, with one slot; it is left out here.
    """
    source = "LSB_DJOB_HOSTFILE"
    if (hosts := _hosts_of_file(environ, source)) is None:
        source = "LSB_MCPU_HOSTS"
        if source not in environ:
            return None
        hosts = _hosts_of_pairs(environ[source], source)
    if "CSM_ALLOCATION_ID" in environ and len(hosts) > 1 and hosts[0].slots == 1:
        hosts = hosts[1:]
    return Allocation("LSF", source, hosts)


def _hosts_of_pairs(value: str, variable: str) -> tuple[Host, ...]:
    """The hosts of ``hostA 5 hostB 2``."""
    words = value.split()
    if not words or len(words) % 2:
        raise _invalid(variable, value, "must be pairs of host and slots such as `hostA 5 hostB 2`")
    names = _names(words[::2], variable, value)
    slots: Counter[str] = Counter()
    for name, number in zip(names, words[1::2], strict=True):
        slots[name] += _slots(number, variable, value)
    return tuple(map(Host, slots, slots.values()))


def _sagemaker_job(environ: Mapping[str, str]) -> Allocation | None:
    """SageMaker: ``SM_HOSTS``, a JSON list, and ``SM_NUM_GPUS``, from its training toolkit.

    Without the toolkit only a file lists the hosts, and the GPUs are those found here. The hosts of
    a job have the same hardware: each gets a slot for each GPU of this one. Without GPUs, each gets
    a slot for each of its logical CPUs.
    """
    variable, gpus = "SM_HOSTS", "SM_NUM_GPUS"
    if (value := environ.get(variable)) is not None:
        names = _from_json(value)
    elif (resources := _sagemaker_resources()) is not None:
        variable, names = str(_SAGEMAKER_RESOURCES), resources.get("hosts")
        value = json.dumps(names)
    else:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise _invalid(variable, value, 'must be a list such as ["algo-1", "algo-2"]')
    names = _names(names, variable, value)
    if len({*names}) < len(names):
        raise _invalid(variable, value, "names a host twice")
    number = environ.get(gpus) or str(len(gpus_here().found))
    slots = None if number == "0" else _slots(number, gpus, number)
    return Allocation(SAGEMAKER, variable, tuple(Host(name, slots) for name in names))


def _sagemaker_resources() -> dict[str, Any] | None:
    """SageMaker's description of a job's hosts, a file in each container; ``None`` elsewhere."""
    try:
        text = _SAGEMAKER_RESOURCES.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _invalid(str(_SAGEMAKER_RESOURCES), "", f"cannot be read ({error})") from None
    found = _from_json(text)
    if not isinstance(found, dict):
        raise _invalid(str(_SAGEMAKER_RESOURCES), text, "must be an object in JSON")
    return found


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _default_hostfile(environ: Mapping[str, str]) -> Allocation | None:
    """A hostfile for all jobs: the Kubernetes MPI operator's, or a site's.

    The operator sets the variable of the MPI that its job names and mounts the file at
    ``/etc/mpi/hostfile``. In Kubernetes that path is tried without a variable, too. A site's file
    may have a line for each slot.
    """
    sources = {name: environ[name] for name in _HOSTFILE_VARIABLES if environ.get(name)}
    if "KUBERNETES_SERVICE_HOST" in environ and _OPERATOR_HOSTFILE.is_file():
        sources[str(_OPERATOR_HOSTFILE)] = str(_OPERATOR_HOSTFILE)
    for source, path in sources.items():
        try:
            return Allocation(HOSTFILE, source, read_hostfile(Path(path), add_up=True))
        except HostfileError as error:
            named = f"{source} names an invalid hostfile"
            if source == path:
                named = "the MPI operator's hostfile is invalid"
            raise LaunchError(f"{named}: {error}") from None
    return None


def _hosts_of_file(environ: Mapping[str, str], variable: str) -> tuple[Host, ...] | None:
    """The hosts of a file with one line for each slot, in the order of first mention."""
    if (path := environ.get(variable)) is None:
        return None
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise _invalid(variable, path, f"names a file that cannot be read ({reason})") from None
    if not lines:
        raise _invalid(variable, path, "names a file without hosts")
    slots = Counter(_names(lines, variable, path))
    return tuple(map(Host, slots, slots.values()))


def _names(names: Iterable[str], variable: str, value: str) -> list[str]:
    try:
        return list(map(host_name, names))
    except HostfileError as error:
        raise _invalid(variable, value, f"has an invalid host name ({error})") from None


def _slots(text: str, variable: str, value: str) -> int:
    try:
        return count(text, "each number")
    except HostfileError as error:
        raise _invalid(variable, value, f"is invalid ({error})") from None


def _invalid(variable: str, value: str, why: str) -> LaunchError:
    return LaunchError(
        f"{variable} {why}, got {shown(value)}: name the hosts with a hostfile or -H instead"
    )


# The default hostfile is last: a site can set its variable for all jobs of its batch system.
_SYSTEMS = (_slurm, _pbs, _lsf, _sagemaker_job, _default_hostfile)


def are_of_a_job(hosts: Sequence[Host]) -> bool:
    """Whether all of these hosts belong to the SageMaker job that this process runs in."""
    try:
        job = _sagemaker_job(os.environ)
    except LaunchError:  # the list cannot be read, so the user has named the hosts
        return False
    return job is not None and {h.name for h in hosts} <= {h.name for h in job.hosts}


def starts_ranks(hosts: Sequence[Host]) -> bool:
    """Whether this host, of a job whose hosts these are, starts the ranks: the first one does."""
    here = os.environ.get(_CURRENT_HOST)
    if here is None:  # without SageMaker's training toolkit
        here = (_sagemaker_resources() or {}).get("current_host")
    job = _sagemaker_job(os.environ)
    names = [host.name for host in (job.hosts if job else hosts)]
    if here not in names:
        raise LaunchError(
            f"{_CURRENT_HOST} must be one of the job's hosts ({', '.join(names)}), got {here!r}: "
            "name the hosts with a hostfile or -H instead"
        )
    return here == hosts[0].name


def leave_to_first(system: str | None, hosts: Sequence[Host]) -> bool:
    """If another host of a SageMaker job starts the ranks, wait until it has ended; whether so."""
    if system != SAGEMAKER or starts_ranks(hosts):
        return False
    follow(hosts[0])
    return True


def wait_for_hosts(hosts: Sequence[Host]) -> None:
    """Wait until all hosts let this one log in, for ten minutes at most.

    ``hvkit.launching.preflight`` reports those that still do not.
    """
    deadline = time.monotonic() + _STARTED
    said = False
    while time.monotonic() < deadline:
        late = [each for each in run_on_hosts(hosts, ["true"], _CONNECT) if each.problem]
        if not late:
            return
        if not said:
            said = True
            names = ", ".join(answer.host.name for answer in late)
            logger.info("waits for %s: %s", names, late[0].problem)
        time.sleep(_BETWEEN_TRIES)


def follow(first: Host) -> None:
    """Wait until the container of the host that starts the ranks has ended.

    Signals do not end this process: ``hvkit run`` on the first host gets SageMaker's signals, too,
    and ends the ranks here.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logger.info("%s starts the ranks; this host waits until it has ended", first.name)
    seen = False
    deadline = time.monotonic() + _STARTED
    while (problem := _session(first)) is None or time.monotonic() < deadline:
        if problem is None:
            seen, deadline = True, time.monotonic() + _ENDED
        time.sleep(_BETWEEN_TRIES)
    if not seen:
        raise LaunchError(f"{first.name}, which starts the ranks, cannot be reached: {problem}")


def _session(host: Host) -> str | None:
    """Stay logged in on a host until it ends; return why there was no login, else ``None``."""
    ssh, *words = ssh_command(host, _SESSION, 2 * _CONNECT)
    # Nothing comes from this end of its input, and an end only with this process.
    here, there = socket.socketpair()
    with here, there:
        try:
            done = subprocess.run(
                [ssh, *_ALIVE, *words],
                stdin=there.fileno(),
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            return f"{ssh} cannot be started here ({error.strerror}): install openssh-client"
    if _HERE in map(str.strip, done.stdout.splitlines()):
        return None
    return explain_ssh(host, done.returncode, done.stderr) or "its shell runs no commands"
