"""``hvkit run``: from the parsed request to a supervised launcher.

``start`` checks the hosts, chooses the environment variables that go to other hosts, makes the
launcher's command line, and supervises it to its end. ``prepared`` does all but the last; with
``shown`` it makes the line of ``--dry-run``.
"""

import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from hvkit.errors import LaunchError
from hvkit.host.launcher_variables import without_place
from hvkit.host.mca import without_interfaces
from hvkit.host.rank_settings import rank_settings
from hvkit.host.run_reports import RESTART, RUN_NAME, TIMELINE, memory_folder
from hvkit.launch.allocation import SAGEMAKER
from hvkit.launch.forwarding import (
    GPU_LISTS,
    forwarded,
    is_secret,
    name_absent_hyperparameters,
    sendable,
)
from hvkit.launch.host_checks.preflight import choose_hosts
from hvkit.launch.hosts import Host
from hvkit.launch.launchers import Job, find_launcher
from hvkit.launch.restarts import Restarts
from hvkit.launch.sagemaker import wait_for_hosts
from hvkit.launch.ssh import last_line, remote_shell, run_on_hosts
from hvkit.launch.supervision import run_status
from hvkit.launch.supervision.output import Style, make_room
from hvkit.launch.supervision.protocol import KEY_VARIABLE, SUPERVISOR_VARIABLE
from hvkit.launch.supervision.run_status import RunStatus
from hvkit.launch.supervision.signals import EndedBySignal, end_on_signals, undisturbed
from hvkit.launch.supervision.supervised_run import Outcome, Run, supervise
from hvkit.launch.supervision.timeline import Timeline
from hvkit.log import logger

_AGENT = "hvkit.launch.supervision.agent"
_SUPERVISION = (SUPERVISOR_VARIABLE, KEY_VARIABLE)
# Seconds to connect to each host, and to one that may just have been lost.
_CONNECT = 10.0
_CONNECT_AGAIN = 4.0
# Seconds that a restart waits for hosts, and between two looks at them.
_HOSTS_RETURN = 600.0
_BETWEEN_LOOKS = 20.0
# Seconds for each host to delete checkpoints in its memory.
_FREED = 20.0
# Seconds after which ranks report that they wait for another, if that ends the run later.
_STALL_REPORTED = 60.0


@dataclass(frozen=True)
class Request:
    """The arguments of ``hvkit run``.

    Attributes:
        command: the command of every rank.
        hosts: the hosts that may get ranks; empty for this host.
        system: the batch system that allocated the hosts, as in ``Allocation``; ``None`` for none.
        size: the number of ranks; ``None`` for one in each slot.
        launcher: one of ``hvkit.launch.launchers.NAMES``.
        variables: environment variables for the ranks besides those of ``forwarded``; ``None``
            for the value that the variable has here.
        interfaces: interfaces or networks to use between hosts, instead of those found.
        bind: whether to bind each rank to its share of its host's cores.
        lost_after: give up a host after this time without a sign of life, in seconds.
        grace: the time that commands have to end, after a signal or the failure of another rank,
            in seconds.
        style: how to show output.
        verbose: whether to print how ranks are started, and what they set.
        stall: seconds after which a rank that others wait for ends the run; ``None`` for what
            ``HVKIT_STALL_LIMIT_SECONDS`` says, or half an hour.
        timeline: a file for the trace of all ranks; None for none.
        max_restarts: how often to start the ranks again without progress between two failures.
        min_size: the fewest ranks to go on with; ``None`` for all of them.
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
    verbose: bool = False
    stall: float | None = None
    timeline: Path | None = None
    max_restarts: int = 0
    min_size: int | None = None


def start(request: Request) -> int:
    """Start the ranks, supervise them to their end, and return the exit status.

    Where the request allows restarts, ranks that failed are started again. Hosts that are not ready
    are then left out, and are taken back at a restart at which they are. SIGINT, SIGTERM and SIGHUP
    end the run at any time, with 128 plus the signal's number. ``hvkit top`` shows the run until it
    ends.

    Raises:
        LaunchError: the request cannot be met; nothing was started.
    """
    own = {}
    if request.timeline is not None:
        own[TIMELINE] = "1"
    if request.max_restarts:
        own[RUN_NAME] = secrets.token_hex(8)
    request = replace(request, variables={**request.variables, **own})
    status = RunStatus()
    try:
        with end_on_signals(lambda: status.now.saved), run_status.serve(status.read):
            return _start(request, status)
    except EndedBySignal as end:
        return end.code


def _start(request: Request, status: RunStatus) -> int:
    if request.system == SAGEMAKER:
        wait_for_hosts(request.hosts)
    run = replace(prepared(request), status=status)
    if request.timeline is None:
        return _with_restarts(request, run)
    timeline = Timeline(request.timeline)
    try:
        return _with_restarts(request, replace(run, timeline=timeline))
    finally:
        timeline.close()


def _with_restarts(request: Request, run: Run) -> int:
    restarts = Restarts(request.max_restarts)
    least = request.min_size or run.size
    replicas, failed = False, True
    try:
        while True:
            outcome = _supervised(request, run)
            reached = max((each.get("step", 0) for each in run.status.now.ranks), default=0)
            run.status.update(phase="ends", reason=outcome.reason, ranks=())
            replicas |= outcome.replicas
            failed = outcome.status != 0
            if not restarts.again(outcome):
                if request.max_restarts and outcome.restartable:
                    logger.error("gives up after %s", restarts.budget)
                return outcome.status
            _report_restart(run, restarts, outcome)
            said = {"restart": restarts.made, "reason": outcome.reason, "reached": reached}
            variables = {**request.variables, RESTART: json.dumps(said)}
            request = replace(request, variables=variables)
            try:
                going = _going(run, outcome.terminated, replicas=replicas)
                run = _prepared_again(request, run, least, restarts, going)
            except LaunchError as error:
                logger.error("gives up: %s", error)
                return outcome.status
    finally:
        if replicas:
            run.status.update(phase="deletes checkpoints from the memory of the hosts")
            with undisturbed():
                _free_memory(request, failed=failed)


def _report_restart(run: Run, restarts: Restarts, outcome: Outcome) -> None:
    # A try that has ended before it resumed has saved nothing itself.
    saved = outcome.saved
    if saved is None:
        saved = max(run.saved_in.values(), default=None)
    from_step = f"from step {saved}"
    if saved is None:
        from_step = "from the beginning, as hvkit.Checkpoint has saved nothing"
    logger.warning("%s, %s: %s", restarts.budget, from_step, outcome.reason)
    if run.timeline is not None:
        run.timeline.note(f"restart {restarts.made}: {outcome.reason}")


def _free_memory(request: Request, *, failed: bool) -> None:
    """Delete the checkpoints of a run that has ended from the memory of its hosts.

    After a failure they stay if a host does not answer, as its disk may be the one with the others.
    """
    folder = memory_folder(request.variables[RUN_NAME])
    shell = remote_shell(request.system, _CONNECT_AGAIN)
    if failed:
        answers = run_on_hosts(request.hosts, ["ls", "-d", str(folder)], _FREED, shell)
        lost = ", ".join(answer.host.name for answer in answers if answer.problem)
        holders = ", ".join(answer.host.name for answer in answers if answer.status == 0)
        if lost and holders:
            logger.warning(
                "%s does not answer, and the newest checkpoint may be in the memory of %s alone: "
                "copy the step-... folder below %s there into the directory of checkpoints to go "
                "on from it, then delete %s",
                *(lost, holders, folder, folder),
            )
            return
    for answer in run_on_hosts(request.hosts, ["rm", "-rf", "--", str(folder)], _FREED, shell):
        if answer.problem or answer.status:
            why = answer.problem or last_line(answer.stderr)
            logger.warning("%s may still hold checkpoints in %s: %s", answer.host.name, folder, why)


def _going(run: Run, terminated: Collection[int], *, replicas: bool) -> set[str]:
    """The hosts that are probably taken away: those of ranks that got SIGTERM.

    Not rank 0's: its disk may be the only one with the checkpoints. Copies in memory change that.
    """
    going = {run.hosts[rank] for rank in terminated}
    return going if replicas else going.difference(run.hosts[:1])


def _prepared_again(
    request: Request, before: Run, least: int, restarts: Restarts, going: Collection[str]
) -> Run:
    """Pause, and prepare a restart as soon as enough hosts are ready.

    Args:
        request: the request.
        before: the try that has ended.
        least: the fewest ranks to go on with.
        restarts: how many there were, with this one, and the pause before the first look at hosts.
        going: hosts to leave out if the others suffice.

    Raises:
        LaunchError: there were not enough for ten minutes.
    """
    deadline = time.monotonic() + _HOSTS_RETURN
    pause, status = restarts.pause, before.status
    status.update(phase=f"begins restart {restarts.made} after a pause of {pause:g} s")
    said = ""
    while True:
        time.sleep(pause)
        try:
            run = prepared(request, least=least, going=going)
        except LaunchError as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != said:
                said = str(error)
                logger.warning("waits for hosts: %s", said)
                status.update(phase=f"waits for hosts before restart {restarts.made}: {said}")
            pause = min(2 * pause, _BETWEEN_LOOKS)
            continue
        if run.size != before.size:
            logger.warning("%d ranks now, %d before", run.size, before.size)
        status.update(restarts=restarts.made)
        return replace(run, status=status, timeline=before.timeline, saved_in=before.saved_in)


def _supervised(request: Request, run: Run) -> Outcome:
    if run.style.log_dir is not None:
        try:
            make_room(run.style.log_dir)
        except OSError as error:
            raise LaunchError(
                f"--log-dir {run.style.log_dir} cannot be made ({error.strerror}): name a folder "
                "that you can write to"
            ) from error
    if request.verbose:
        logger.info("starts %s", shown(run))
        for each in rank_settings(run.environ):
            logger.info("ranks set %s=%s: %s", each.variable, each.value, each.reason)
    return supervise(run)


def prepared(
    request: Request,
    *,
    supervised: bool = True,
    least: int | None = None,
    going: Collection[str] = (),
) -> Run:
    """Find the launcher, check the hosts, and make the command line.

    Args:
        request: the request.
        supervised: whether the ranks connect to a supervisor; not if a user types the line.
        least: the fewest ranks for a restart: a host that was ready before may be lost now.
        going: hosts to leave out of a restart if the others suffice.

    Raises:
        LaunchError: the request cannot be met.
    """
    launcher = find_launcher(request.launcher)
    _refuse_unsupported(request)
    if not request.hosts and request.size is None:
        raise LaunchError("the number of ranks is missing: add -np N, or name hosts with slots")
    hosts = request.hosts or (Host("localhost", slots=request.size),)
    site = choose_hosts(
        hosts,
        request.size,
        request.system,
        request.interfaces,
        least=least or request.min_size,
        going=going,
        connect=_CONNECT if least is None else _CONNECT_AGAIN,
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
    names: tuple[str, ...] = ()
    here: dict[str, str] = {}
    if not site.here:
        # On this host alone ranks inherit the whole environment.
        names = (*forwarded(environ, request.variables), *(_SUPERVISION if supervised else ()))
        if least is None:
            name_absent_hyperparameters(environ, names)
        here = {name: environ[name] for name in GPU_LISTS - {*names} if name in environ}
        environ = sendable(environ, names, launcher, request.system)
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
    if least is None and request.size is not None and job.size < request.size:
        logger.warning("%d ranks, not %d: --min-np allows it", job.size, request.size)
    if least is None:
        _refuse_absent_ranks(request.style, job.size)
    return Run(
        command=launcher.command(job),
        environ=environ,
        launcher=launcher.name,
        size=job.size,
        addresses=site.addresses,
        lost_after=None if site.here else request.lost_after,
        grace=request.grace,
        bind=request.bind,
        hosts=tuple(host.name for host in job.hosts for _ in range(host.slots or 0)),
        here=here,
        style=request.style,
    )


def shown(run: Run) -> str:
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


def _refuse_unsupported(request: Request) -> None:
    """Reject hosts that launchers misread on their command lines."""
    for host in request.hosts:
        if ":" in host.name:
            raise LaunchError(
                f"{host.name}: mpirun and horovodrun accept no IPv6 addresses on their command "
                "lines: use the host's name, and add it to DNS or /etc/hosts"
            )
        if host.user is not None and request.launcher != "mpirun":
            raise LaunchError(
                f"{host.user}@{host.name}: horovodrun accepts no users: set User {host.user} for "
                "this host in ~/.ssh/config"
            )


def _refuse_absent_ranks(style: Style, size: int) -> None:
    for ranks in style.ranks or ():
        if ranks[-1] >= size:
            raise LaunchError(
                f"--show {ranks[-1]}: there is no such rank: use ranks from 0 to {size - 1}"
            )


def _environment(variables: Mapping[str, str | None], interfaces: Sequence[str]) -> dict[str, str]:
    """The launcher's environment: this process's, the user's variables, and the interfaces."""
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise LaunchError(f"-x {name}: it is not set here: write -x {name}=VALUE")
    environ = without_place(os.environ)
    for name in (*_SUPERVISION, RUN_NAME):
        # Set if this run was started inside another one.
        environ.pop(name, None)
    if interfaces:
        # NCCL reads = as "exactly these names"; without it, eth1 would match eth10, too.
        environ.setdefault("NCCL_SOCKET_IFNAME", "=" + ",".join(interfaces))
    environ.update({name: value for name, value in variables.items() if value is not None})
    return environ


def _given_environment() -> dict[str, str]:
    """The environment that this process was started with."""
    environ = dict(os.environ)
    # In the C locale Python sets this itself (PEP 538).
    if "LC_CTYPE" not in psutil.Process().environ():
        environ.pop("LC_CTYPE", None)
    return environ
