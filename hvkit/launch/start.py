"""``hvkit run``: from what was asked to a supervised launcher."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from hvkit.errors import LaunchError
from hvkit.host.mca import without_interfaces
from hvkit.host.rank_variables import without_place
from hvkit.launch.allocation import SLURM
from hvkit.launch.forwarding import GPU_LISTS, forwarded
from hvkit.launch.hosts import Host
from hvkit.launch.job import Job
from hvkit.launch.launchers import Launcher, find_launcher
from hvkit.launch.preflight import examine
from hvkit.launch.supervision.output import Style, make_room
from hvkit.launch.supervision.protocol import KEY_VARIABLE, SUPERVISOR_VARIABLE
from hvkit.launch.supervision.supervised_run import Run, supervise

_AGENT = "hvkit.launch.supervision.agent"
_OF_THE_RUN = (SUPERVISOR_VARIABLE, KEY_VARIABLE)

# What programs of this host need, and other hosts do not, when all of the environment goes there.
_SLURM = ("SLURM_", "SLURMD_", "OMPI_", "PRTE_", "PMIX_")
_AT_HOME = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "SSH_AUTH_SOCK")


@dataclass(frozen=True)
class Request:
    """What ``hvkit run`` was asked for.

    Attributes:
        command: what every rank runs.
        hosts: where ranks may run; empty for this host.
        system: the batch system that gave the hosts, as in ``Allocation``; ``None`` for none.
        size: the number of ranks; ``None`` for one in each slot.
        launcher: one of ``hvkit.launch.launchers.NAMES``.
        variables: environment variables that ranks get besides those that the rule gives them;
            ``None`` for the value that the variable has here.
        interfaces: names of interfaces or networks to use between hosts, instead of those found.
        bind: whether each rank keeps to its share of its host's cores.
        lost_after: seconds without a sign of life after which a host is given up.
        grace: seconds that commands have to end, after a signal or the failure of another rank.
        style: how output is shown.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    system: str | None = None
    size: int | None = None
    launcher: str = "mpirun"
    variables: Mapping[str, str | None] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    bind: bool = True
    lost_after: float = 30.0
    grace: float = 10.0
    style: Style = field(default_factory=Style)


def start(request: Request) -> int:
    """Start the ranks, watch them to their end, and return the exit status.

    Raises:
        LaunchError: something is not as it has to be; nothing was started.
    """
    run = prepared(request)
    if run.style.log_dir is not None:
        try:
            make_room(run.style.log_dir)
        except OSError as error:
            raise LaunchError(
                f"--log-dir {run.style.log_dir} cannot be made ({error.strerror}): name a folder "
                "that can be written to"
            ) from error
    return supervise(run)


def shown(run: Run) -> str:
    """The launcher's command line, for a shell, with the variables that are added and removed."""
    given = _given()
    removed = [f"-u {shlex.quote(name)}" for name in given if name not in run.environ]
    added = [
        f"{name}={shlex.quote(value)}"
        for name, value in run.environ.items()
        if given.get(name) != value
    ]
    env = ["env", *removed] if removed else []
    return " ".join([*env, *added, shlex.join(run.command)])


def _given() -> dict[str, str]:
    """The environment that this process was given."""
    environ = dict(os.environ)
    # In the C locale Python sets this itself (PEP 538).
    if "LC_CTYPE" not in psutil.Process().environ():
        environ.pop("LC_CTYPE", None)
    return environ


def prepared(request: Request, *, supervised: bool = True) -> Run:
    """Find the launcher, examine the hosts, and put the command line together.

    Args:
        request: what is wanted.
        supervised: whether ranks get what they need to be watched; not if the line is typed.

    Raises:
        LaunchError: something is not as it has to be.
    """
    launcher = find_launcher(request.launcher)
    _refuse_unreadable(request)
    if not request.hosts and request.size is None:
        raise LaunchError("how many ranks? Say it with -np, or name hosts with slots")
    hosts = request.hosts or (Host("localhost", slots=request.size),)
    site = examine(hosts, request.size, request.system, request.interfaces)
    interfaces = tuple(dict.fromkeys(interface.name for interface in site.joining))
    environ = _environment(request.variables, interfaces)
    if request.interfaces:
        environ = without_interfaces(environ)
    names: tuple[str, ...] = ()
    here: dict[str, str] = {}
    if not site.here:
        # On this host alone ranks inherit all of it.
        names = (*forwarded(environ, request.variables), *(_OF_THE_RUN if supervised else ()))
        here = {name: environ[name] for name in GPU_LISTS - {*names} if name in environ}
        environ = _sendable(environ, names, launcher, request.system)
    job = Job(
        hosts=site.hosts,
        command=(sys.executable, "-P", "-m", _AGENT, *request.command),
        forwarded=names,
        networks=tuple(dict.fromkeys(interface.network for interface in site.joining)),
        interfaces=interfaces,
        daemon_networks=site.daemon_networks,
        networks_asked_for=bool(request.interfaces),
        environ=environ,
        crowded=site.crowded,
    )
    for some in request.style.ranks or ():
        if some[-1] >= job.size:
            raise LaunchError(
                f"--show {some[-1]}: there is no such rank: they are numbered from 0 to "
                f"{job.size - 1}"
            )
    return Run(
        command=launcher.command(job),
        environ=environ,
        launcher=launcher.name,
        size=job.size,
        addresses=site.addresses,
        lost_after=None if site.here else request.lost_after,
        grace=request.grace,
        bind=request.bind,
        here=here,
        style=request.style,
    )


def _sendable(
    environ: Mapping[str, str], names: Sequence[str], launcher: Launcher, system: str | None
) -> dict[str, str]:
    """The launcher's environment without what may not reach other hosts, if it all goes there."""
    if launcher.sends_all:
        kept: tuple[str, ...] = ()
    elif system == SLURM:
        # There srun, which sends all of it, starts Open MPI's daemons.
        kept = _SLURM
    else:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name in names or name in _AT_HOME or name.startswith(kept)
    }


def _refuse_unreadable(request: Request) -> None:
    """Hosts written in ways that launchers take for something else."""
    for host in request.hosts:
        if ":" in host.name:
            raise LaunchError(
                f"{host.name}: mpirun and horovodrun take no IPv6 addresses on their command "
                "lines: use the host's name, and give it one in DNS or /etc/hosts"
            )
        if host.user is not None and request.launcher != "mpirun":
            raise LaunchError(
                f"{host.user}@{host.name}: horovodrun takes no users: set User {host.user} for "
                "this host in ~/.ssh/config"
            )


def _environment(variables: Mapping[str, str | None], interfaces: Sequence[str]) -> dict[str, str]:
    """The launcher's environment: this process's, what was asked for, and the interfaces."""
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise LaunchError(f"-x {name}: it is not set here: write -x {name}=VALUE")
    environ = without_place(os.environ)
    for name in _OF_THE_RUN:
        # Of a run that this one was started in.
        environ.pop(name, None)
    if interfaces:
        # NCCL reads the sign as "exactly these"; it would also take eth1 for eth10 otherwise.
        environ.setdefault("NCCL_SOCKET_IFNAME", "=" + ",".join(interfaces))
    environ.update({name: value for name, value in variables.items() if value is not None})
    return environ
