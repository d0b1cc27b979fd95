"""The hosts that a batch system allocated to this job, read from the job's environment.

``allocation`` tries Slurm, PBS, LSF, Amazon SageMaker and a default hostfile (the Kubernetes MPI
operator's, or a site's), in that order. To add a batch system, write a function from the
environment to an ``Allocation``, ``None`` outside of its jobs, and add it to ``_SYSTEMS`` before
the last one.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvkit.errors import HostfileError, LaunchError
from hvkit.host.hardware import gpus as gpus_here
from hvkit.host.system import run
from hvkit.launching.hostfile import read_hostfile
from hvkit.launching.hosts import Host, count, host_name, shown

SLURM = "Slurm"
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


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job."""

    system: str
    source: str
    hosts: tuple[Host, ...]


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation of the job that this process runs in; ``None`` outside of a job."""
    for system in _SYSTEMS:
        found = system(environ)
        if found is not None:
            return found
    return None


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    """Slurm: ``SLURM_JOB_NODELIST`` names the hosts, the first variable set here their slots.

    1. ``SLURM_TASKS_PER_NODE``, from ``--ntasks`` and ``--ntasks-per-node``: ``2(x3),1``;
    2. ``SLURM_GPUS_ON_NODE``, the GPUs of this host: every host gets that number of slots;
    3. ``SLURM_JOB_CPUS_PER_NODE``, the CPUs of each host.
    """
    variable = "SLURM_JOB_NODELIST"
    nodelist = environ.get(variable)
    if nodelist is None:
        return None
    names = [_checked(name, variable, nodelist) for name in _expanded(nodelist, variable)]
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
    hosts = (Host(name, slots=number) for name, number in zip(names, slots, strict=True))
    return Allocation(SLURM, variable, tuple(hosts))


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
    if variable not in environ:
        return None
    return Allocation("PBS", variable, _hosts_of_file(environ[variable], variable))


def _lsf(environ: Mapping[str, str]) -> Allocation | None:
    """LSF: the file ``LSB_DJOB_HOSTFILE`` has a line for each slot; else ``LSB_MCPU_HOSTS``.

    On systems with IBM's cluster manager, which sets ``CSM_ALLOCATION_ID``, the job script runs on
    a launch node that takes no ranks. LSF lists it first, with one slot; it is left out here.
    """
    file, pairs = "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"
    if file in environ:
        source, hosts = file, _hosts_of_file(environ[file], file)
    elif pairs in environ:
        source, hosts = pairs, _hosts_of_pairs(environ[pairs], pairs)
    else:
        return None
    if "CSM_ALLOCATION_ID" in environ and len(hosts) > 1 and hosts[0].slots == 1:
        hosts = hosts[1:]
    return Allocation("LSF", source, hosts)


def _hosts_of_pairs(value: str, variable: str) -> tuple[Host, ...]:
    """The hosts of ``hostA 5 hostB 2``."""
    words = value.split()
    if not words or len(words) % 2:
        raise _invalid(variable, value, "must be pairs of host and slots such as `hostA 5 hostB 2`")
    slots: Counter[str] = Counter()
    for name, number in zip(words[::2], words[1::2], strict=True):
        slots[_checked(name, variable, value)] += _slots(number, variable, value)
    return tuple(Host(name, slots=number) for name, number in slots.items())


def sagemaker_job(environ: Mapping[str, str]) -> Allocation | None:
    """SageMaker: ``SM_HOSTS``, a JSON list, and ``SM_NUM_GPUS``, from its training toolkit.

    Without the toolkit only a file lists the hosts, and the GPUs are those found here. The hosts of
    a job have the same hardware: each gets a slot for each GPU of this one. Without GPUs, each gets
    a slot for each of its logical CPUs.
    """
    variable, gpus = "SM_HOSTS", "SM_NUM_GPUS"
    value = environ.get(variable)
    try:
        names = None if value is None else json.loads(value)
    except (ValueError, RecursionError):
        names = None
    if value is None:
        if (resources := sagemaker_resources()) is None:
            return None
        variable, names = str(_SAGEMAKER_RESOURCES), resources.get("hosts")
        value = json.dumps(names)
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise _invalid(variable, value, 'must be a list such as ["algo-1", "algo-2"]')
    checked = [_checked(name, variable, value) for name in names]
    if len({*checked}) < len(checked):
        raise _invalid(variable, value, "names a host twice")
    number = environ.get(gpus) or str(len(gpus_here().found))
    slots = None if number == "0" else _slots(number, gpus, number)
    return Allocation(SAGEMAKER, variable, tuple(Host(name, slots=slots) for name in checked))


def sagemaker_resources() -> dict[str, Any] | None:
    """SageMaker's description of a job's hosts, a file in each container; ``None`` elsewhere."""
    try:
        text = _SAGEMAKER_RESOURCES.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _invalid(str(_SAGEMAKER_RESOURCES), "", f"cannot be read ({error})") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _invalid(str(_SAGEMAKER_RESOURCES), text, "must be an object in JSON")
    return found


def _default_hostfile(environ: Mapping[str, str]) -> Allocation | None:
    """A hostfile for all jobs: the Kubernetes MPI operator's, or a site's.

    The operator sets the variable of the MPI that its job names and mounts the file at
    ``/etc/mpi/hostfile``. In Kubernetes that path is tried without a variable, too.
    """
    for variable in _HOSTFILE_VARIABLES:
        if value := environ.get(variable):
            try:
                return Allocation(HOSTFILE, variable, read_hostfile(Path(value)))
            except HostfileError as error:
                raise LaunchError(f"{variable} names an invalid hostfile: {error}") from None
    if "KUBERNETES_SERVICE_HOST" in environ and _OPERATOR_HOSTFILE.is_file():
        try:
            hosts = read_hostfile(_OPERATOR_HOSTFILE)
        except HostfileError as error:
            raise LaunchError(f"the MPI operator's hostfile is invalid: {error}") from None
        return Allocation(HOSTFILE, str(_OPERATOR_HOSTFILE), hosts)
    return None


def _hosts_of_file(path: str, variable: str) -> tuple[Host, ...]:
    """The hosts of a file with one line for each slot."""
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise _invalid(variable, path, f"names a file that cannot be read ({reason})") from None
    if not lines:
        raise _invalid(variable, path, "names a file without hosts")
    return _counted(_checked(line, variable, path) for line in lines)


def _counted(names: Iterable[str]) -> tuple[Host, ...]:
    """Each host once, in the order of first mention, with a slot for each mention."""
    return tuple(Host(name, slots=times) for name, times in Counter(names).items())


def _checked(name: str, variable: str, value: str) -> str:
    try:
        return host_name(name)
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
_SYSTEMS = (_slurm, _pbs, _lsf, sagemaker_job, _default_hostfile)
