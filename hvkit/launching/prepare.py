"""From the parsed request of ``hvkit run`` to a launcher's command line that is ready to run.

``prepared`` checks the hosts, chooses the environment variables that go to other hosts, and makes
the command line; ``shown`` makes the line of ``--dry-run`` from it.
"""

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import psutil

from hvkit.errors import UsageError
from hvkit.host.mca import WITHOUT_TOOLS, without_interfaces
from hvkit.host.rank_variables import without_rank_variables
from hvkit.host.run_reports import RUN_NAME
from hvkit.launching.allocation import SLURM
from hvkit.launching.forwarded_variables import (
    GPU_LISTS,
    forwarded,
    is_secret,
    name_absent_hyperparameters,
    sendable,
)
from hvkit.launching.host_checks.preflight import choose_hosts
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job, find_launcher, refuse_ipv6, refuse_users
from hvkit.launching.rank_command import RankCommand
from hvkit.launching.request import Request
from hvkit.launching.supervision.protocol import (
    KEY_VARIABLE,
    SUPERVISOR_VARIABLE,
    AgentSettings,
    agent_command,
)
from hvkit.launching.supervision.supervised_run import SupervisedRun
from hvkit.log import logger
from hvkit.wording import counted

_SUPERVISION = (SUPERVISOR_VARIABLE, KEY_VARIABLE)
# Seconds to connect to each host, and to one that may just have been lost.
_CONNECT = 10.0
CONNECT_AGAIN = 4.0
# Seconds after which a wait is reported, if the limit that ends the run is longer.
_STALL_REPORTED = 60.0


def prepared(
    request: Request,
    *,
    supervised: bool = True,
    least: int | None = None,
    preempted: Collection[str] = (),
) -> SupervisedRun:
    """Find the launcher, check the hosts, and make the command line.

    Args:
        request: the request.
        supervised: whether the ranks connect to a supervisor; not if a user types the line.
        least: the fewest ranks for a restart: a host that was ready before may be lost now.
        preempted: hosts to leave out of a restart if the others suffice.

    Raises:
        LaunchError: the request cannot be met.
    """
    launcher = find_launcher(request.launcher)
    refuse_ipv6(request.hosts, "the command line of mpirun or horovodrun")
    if request.launcher != "mpirun":
        refuse_users(request.hosts, "horovodrun")
    hosts = request.hosts or (Host("localhost", slots=request.np),)
    path = request.variables.get("PATH") or os.environ.get("PATH", os.defpath)
    site = choose_hosts(
        hosts,
        request.np,
        RankCommand.of(request.command, path),
        request.system,
        request.interfaces,
        least=least or request.min_np,
        preempted=preempted,
        connect=_CONNECT if least is None else CONNECT_AGAIN,
    )
    for name, problem in site.left_out.items():
        logger.warning("goes on without %s: %s", name, problem)
    interfaces = tuple(dict.fromkeys(interface.name for interface in site.joining))
    environ = _environment(request.variables, interfaces)
    if request.stall is not None:
        environ["HVKIT_STALL_LIMIT_SECONDS"] = f"{request.stall:g}"
        environ["HVKIT_STALL_SECONDS"] = f"{min(request.stall, _STALL_REPORTED):g}"
    if request.interfaces:
        environ = without_interfaces(environ)
    if request.system == SLURM and "SLURM_STEP_NUM_TASKS" in os.environ:
        # This shell is a step of srun's and holds the cores: mpirun's step would wait for them.
        environ.setdefault("SLURM_OVERLAP", "1")
    names: tuple[str, ...] = ()
    here: dict[str, str] = {}
    if not site.here:
        # If all ranks are on this host, they inherit the whole environment.
        names = (*forwarded(environ, request.variables), *(_SUPERVISION if supervised else ()))
        if least is None:
            name_absent_hyperparameters(environ, names)
        here = {name: environ[name] for name in GPU_LISTS - {*names} if name in environ}
        environ = sendable(environ, names, launcher, request.system)
    job = Job(
        hosts=site.hosts,
        command=agent_command(request.command),
        forwarded=names,
        networks=tuple(dict.fromkeys(interface.network for interface in site.joining)),
        interfaces=interfaces,
        daemon_networks=site.daemon_networks,
        networks_asked_for=bool(request.interfaces),
        environ=environ,
        crowded=bool(site.crowded),
    )
    if least is None:
        if site.crowded:
            logger.warning("more ranks than cores, so they take turns: %s", _numbers(site.crowded))
        if request.np is not None and job.size < request.np:
            logger.warning("%d ranks, not %d: --min-np allows it", job.size, request.np)
        _refuse_absent_ranks(request.style.ranks or (), job.size)
    return SupervisedRun(
        command=launcher.command(job),
        environ=environ,
        launcher=launcher.name,
        size=job.size,
        agents=AgentSettings(
            addresses=site.addresses,
            lost_after=None if site.here else request.lost_after,
            grace=request.grace,
            bind=request.bind == "cores",
            variables=here,
            call=None if request.call is None else str(request.call),
        ),
        hosts=tuple(host.name for host in job.hosts for _ in range(host.slots or 0)),
        style=replace(request.style, greetings=request.verbose or _wants_logs(environ)),
    )


def _wants_logs(environ: Mapping[str, str]) -> bool:
    """Whether the user has set that TensorFlow and JAX log more than warnings."""
    more = ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE")
    return environ.get("TF_CPP_MIN_LOG_LEVEL") == "0" or any(name in environ for name in more)


def _numbers(crowded: Mapping[str, tuple[int, int]]) -> str:
    listed = (
        f"{counted(ranks, 'rank')} on {counted(cpus, 'core')} of {name}"
        for name, (ranks, cpus) in crowded.items()
    )
    return ", ".join(listed)


def shown(run: SupervisedRun) -> str:
    """The launcher's command line for a shell, with the variables that hvkit adds and removes.

    Secrets are left out: ``NAME=...``.
    """
    given = _given_environment()
    removed = [f"-u {shlex.quote(name)}" for name in given if name not in run.environ]
    added = [
        f"{name}={'...' if is_secret(name) else shlex.quote(value)}"
        for name, value in run.environ.items()
        if given.get(name) != value
    ]
    env = ["env", *removed] if removed else []
    return " ".join([*env, *added, shlex.join(run.command)])


def _refuse_absent_ranks(show: Sequence[range], size: int) -> None:
    for ranks in show:
        if ranks[-1] >= size:
            raise UsageError(
                f"--show {ranks[-1]}: there is no such rank: use ranks from 0 to {size - 1}"
            )


def _environment(variables: Mapping[str, str | None], interfaces: Sequence[str]) -> dict[str, str]:
    """The launcher's environment: this process's, the user's variables, and the interfaces."""
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise UsageError(f"-x {name}: it is not set here: write -x {name}=VALUE")
    environ = without_rank_variables(os.environ)
    for name in (*_SUPERVISION, RUN_NAME):
        # Set if this run was started inside another one.
        environ.pop(name, None)
    if interfaces:
        # NCCL reads = as "exactly these names"; without it, eth1 would match eth10, too.
        environ.setdefault("NCCL_SOCKET_IFNAME", "=" + ",".join(interfaces))
    environ.setdefault(*WITHOUT_TOOLS)
    environ.update({name: value for name, value in variables.items() if value is not None})
    return environ


def _given_environment() -> dict[str, str]:
    """The environment that this process was started with."""
    environ = dict(os.environ)
    # In the C locale Python sets this itself (PEP 538).
    if "LC_CTYPE" not in psutil.Process().environ():
        environ.pop("LC_CTYPE", None)
    return environ
