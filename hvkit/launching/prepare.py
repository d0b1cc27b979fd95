"""Requests for ranks, and how one becomes a launcher's command line that is ready to run.

``hvkit run`` reads a ``Request`` from its command line, ``hvkit.launch`` from its arguments.
``prepared`` checks the hosts, chooses the environment variables that ranks on other hosts get, and
makes the command line; ``shown`` makes the line of ``--dry-run`` from it.
"""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from hvkit.errors import UsageError
from hvkit.host.hardware import usable_cores, visible_gpus
from hvkit.host.mca import WITHOUT_TOOLS, without_interfaces
from hvkit.host.rank_variables import without_rank_variables
from hvkit.host.run_reports import RUN_NAME
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job, Launcher, find_launcher, refuse_users
from hvkit.launching.preflight import choose_hosts
from hvkit.launching.probe import RankCommand
from hvkit.launching.ssh import SLURM
from hvkit.launching.supervision.protocol import (
    KEY_VARIABLE,
    SUPERVISOR_VARIABLE,
    AgentSettings,
    agent_command,
)
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.supervised_run import SupervisedRun
from hvkit.log import counted, logger

LAUNCHERS = ("mpirun", "gloo")  # of any known MPI; ``horovodrun`` with Gloo, without MPI

# All names of the option for the number of ranks.
NUMBER_OF_RANKS = ("-np", "--np", "-n", "--num-proc")

# The most ranks on a host that -np starts without -H: a larger number is probably a typing error.
_MOST_RANKS = 16
_MOST_ON_A_CORE = 8


@dataclass(frozen=True)
class Request:
    """The arguments of ``hvkit run``, under their names there."""

    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()  # that may get ranks; empty for this host
    system: str | None = None  # the batch system that allocated them, as in ``Allocation``
    np: int | None = None  # None for a rank in each slot
    min_np: int | None = None  # the fewest ranks to go on with; None for all of them
    launcher: str = "mpirun"
    # For the ranks, besides those that are forwarded; None for the value that it has here.
    variables: Mapping[str, str | None] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()  # or networks, instead of those found
    bind: Literal["cores", "none"] = "cores"
    lost_after: float = 30.0  # seconds without an acknowledgement
    grace: float = 10.0  # seconds, after a signal or the failure of another rank
    style: Style = field(default_factory=Style)
    verbose: bool = False
    stall: float | None = None  # seconds; None for HVKIT_STALL_LIMIT_SECONDS, or half an hour
    timeline: Path | None = None
    max_restarts: int = 0  # without progress between two failures
    call: Path | None = None  # the folder of the function that ``command`` runs
    from_python: bool = False  # the caller writes np=4, and not -np 4, as do errors

    def checked(self) -> "Request":
        """The request; for this host alone, with a number of ranks."""
        if self.min_np is not None and self.np is not None and self.min_np > self.np:
            raise UsageError(f"--min-np {self.min_np} is more than {self._ranks(self.np)}")
        return self if self.hosts else replace(self, np=self._number_here())

    def _number_here(self) -> int:
        """The number of ranks for this host: ``np``, or one for each of its GPUs."""
        cores = usable_cores()
        has = f"this host has {counted(cores, 'core')}"
        if self.np is None:
            given = {name: value for name, value in self.variables.items() if value is not None}
            if gpus := visible_gpus({**os.environ, **given}):
                logger.info("starts %s, one for each GPU", counted(gpus, "rank"))
                return gpus
            swallowed = any(word.partition("=")[0] in NUMBER_OF_RANKS for word in self.command)
            hint = ", before COMMAND, which gets all options after it" if swallowed else ""
            raise UsageError(
                f"{'np' if self.from_python else '-np'} is missing: {has} and no GPU; give the "
                f"number of ranks{hint}, such as {self._ranks(max(2, cores))}"
            )
        most = max(_MOST_RANKS, _MOST_ON_A_CORE * cores)
        if self.np > most:
            host = f"localhost:{self.np}"
            raise UsageError(
                f"{self._ranks(self.np)} is too many: {has}; start at most {self._ranks(most)}, or "
                f"write {f'hosts={host!r}' if self.from_python else f'-H {host}'} if you mean it"
            )
        return self.np

    def _ranks(self, number: int) -> str:
        return f"np={number}" if self.from_python else f"-np {number}"


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

    ``supervised`` is False if a user types the line. ``least`` is the fewest ranks for a restart: a
    host that was ready before may be lost now. It leaves out the ``preempted`` hosts if the others
    suffice.
    """
    launcher = find_launcher(request.launcher)
    if request.launcher != "mpirun":
        refuse_users(request.hosts, "horovodrun")
    hosts = request.hosts or (Host("localhost", slots=request.np),)
    path = request.variables.get("PATH") or os.environ.get("PATH", os.defpath)
    job = choose_hosts(
        hosts,
        request.np,
        RankCommand.of(request.command, path),
        request.system,
        request.interfaces,
        least=least or request.min_np,
        preempted=preempted,
        connect=_CONNECT if least is None else CONNECT_AGAIN,
    )
    for name, problem in job.left_out.items():
        logger.warning("goes on without %s: %s", name, problem)
    environ = _launcher_environment(request.variables, job.interfaces)
    if request.stall is not None:
        environ["HVKIT_STALL_LIMIT_SECONDS"] = f"{request.stall:g}"
        environ["HVKIT_STALL_SECONDS"] = f"{min(request.stall, _STALL_REPORTED):g}"
    if request.interfaces:
        environ = without_interfaces(environ)
    if request.system == SLURM and "SLURM_STEP_NUM_TASKS" in os.environ:
        # This shell is a step of srun's and holds the cores: mpirun's step would wait for them.
        environ.setdefault("SLURM_OVERLAP", "1")
    names: tuple[str, ...] = ()
    for_this_host: dict[str, str] = {}
    if not job.on_this_host:
        # If all ranks are on this host, they inherit the whole environment.
        names = (*forwarded(environ, request.variables), *(_SUPERVISION if supervised else ()))
        if least is None:
            _name_absent_hyperparameters(environ, names)
        for_this_host = {n: environ[n] for n in _GPU_LISTS - {*names} if n in environ}
        environ = _sendable(environ, names, launcher, request.system)
    job = replace(job, command=agent_command(request.command), environ=environ, forwarded=names)
    if least is None:
        _check_first_start(request, job)
    return SupervisedRun(
        command=launcher.command(job),
        environ=environ,
        launcher=launcher.name,
        size=job.size,
        agents=AgentSettings(
            addresses=job.addresses,
            lost_after=None if job.on_this_host else request.lost_after,
            grace=request.grace,
            bind=request.bind == "cores",
            variables=for_this_host,
            call=None if request.call is None else str(request.call),
        ),
        hosts=tuple(host.name for host in job.hosts for _ in range(host.slots or 0)),
        style=replace(request.style, greetings=request.verbose or _wants_logs(environ)),
    )


def _check_first_start(request: Request, job: Job) -> None:
    if job.crowded:
        listed = ", ".join(
            f"{counted(ranks, 'rank')} on {counted(cpus, 'core')} of {name}"
            for name, (ranks, cpus) in job.crowded.items()
        )
        logger.warning("more ranks than cores, so they take turns: %s", listed)
    if request.np is not None and job.size < request.np:
        logger.warning("%d ranks, not %d: --min-np allows it", job.size, request.np)
    shown_rank = max((ranks[-1] for ranks in request.style.ranks or ()), default=0)
    if shown_rank >= job.size:
        raise UsageError(
            f"--show {shown_rank}: there is no such rank: use ranks from 0 to {job.size - 1}"
        )


def _wants_logs(environ: Mapping[str, str]) -> bool:
    """Whether the user has set that TensorFlow and JAX log more than warnings."""
    more = ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE")
    return environ.get("TF_CPP_MIN_LOG_LEVEL") == "0" or any(name in environ for name in more)


def shown(run: SupervisedRun) -> str:
    """The launcher's command line for a shell, with the variables that hvkit adds and removes.

    Secrets are left out: ``NAME=...``.
    """
    given = dict(os.environ)
    # In the C locale Python sets this itself (PEP 538).
    if "LC_CTYPE" not in psutil.Process().environ():
        given.pop("LC_CTYPE", None)
    removed = [f"-u {shlex.quote(name)}" for name in given if name not in run.environ]
    added = [
        f"{name}={'...' if _is_secret(name) else shlex.quote(value)}"
        for name, value in run.environ.items()
        if given.get(name) != value
    ]
    env = ["env", *removed] if removed else []
    return " ".join([*env, *added, shlex.join(run.command)])


# The variables from which an agent knows its supervisor.
_SUPERVISION = (SUPERVISOR_VARIABLE, KEY_VARIABLE)

# Variables that the launcher itself needs: kept also where it sends its whole environment.
_SLURM_PREFIXES = ("SLURM_", "SLURMD_", "OMPI_", "PRTE_", "PMIX_")
_LOCAL = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "SSH_AUTH_SOCK")

# Ranks on other hosts get these variables: they find programs and modules, or configure software
# below hvkit.
_FORWARDED = {
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TZ", "LANG"),
    *("CUBLAS_WORKSPACE_CONFIG", "XLA_FLAGS", "TQDM_DISABLE", "NO_COLOR", "MALLOC_ARENA_MAX"),
}
_HYPERPARAMETER = "SM_HP_"
_FORWARDED_PREFIXES = (
    *("HVKIT_", "HOROVOD_", "NCCL_", "UCX_", "FI_", "OMPI_MCA_", "MPIR_CVAR_", "GLOO_"),
    *("TORCH", "PYTORCH_", "TF_", "KERAS_", "CUDA_", "OMP_", "KMP_", "GOMP_", "MKL_"),
    *("OPENBLAS_", "NUMEXPR_", "PYTHON", "LC_", "HF_", "WANDB_"),
    # SageMaker's folders and hyperparameters.
    *("SM_CHANNEL", _HYPERPARAMETER, "SM_INPUT_DIR", "SM_MODEL_DIR", "SM_OUTPUT"),
    *("SM_HOSTS", "SM_NUM_"),
)
# A name with one of these is a secret's: anywhere in the name, or as a whole word.
_SECRET = re.compile(
    "TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|(?<![A-Z0-9])(KEYS?|AUTH|PASS)(?![A-Z0-9])"
)
# Lists of GPUs, which apply only to the host where they are set.
_GPU_LISTS = {
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
}
# The others are for this process only.
_NOT_FORWARDED = _GPU_LISTS | {"HVKIT_RANK", "PYTHONSTARTUP", "PYTHONINSPECT"}


def _launcher_environment(
    variables: Mapping[str, str | None], interfaces: Sequence[str]
) -> dict[str, str]:
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


def forwarded(environ: Mapping[str, str], chosen: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the environment variables that ranks on other hosts get, sorted.

    Variables that look like secrets and lists of this host's GPUs are left out, unless the user
    names them.
    """
    named = {n for n in environ if n in _FORWARDED or n.startswith(_FORWARDED_PREFIXES)}
    names = {name for name in named - _NOT_FORWARDED if not _is_secret(name)}
    return tuple(sorted(names | (set(chosen) & environ.keys())))


def _is_secret(name: str) -> bool:
    return _SECRET.search(name.upper()) is not None


def _name_absent_hyperparameters(environ: Mapping[str, str], names: Collection[str]) -> None:
    """Log SageMaker's hyperparameters that are not sent: they would differ on other hosts."""
    for name in sorted(environ.keys() - {*names}):
        if name.startswith(_HYPERPARAMETER):
            logger.warning(
                "%s stays on this host, since its name looks like a secret's: -x %s sends it to "
                "the ranks on other hosts, too",
                *(name, name),
            )


def _sendable(
    environ: Mapping[str, str], names: Collection[str], launcher: Launcher, system: str | None
) -> dict[str, str]:
    """The launcher's environment, without secrets if all of it goes to other hosts."""
    # In Slurm, srun starts Open MPI's daemons and sends its whole environment.
    if not launcher.sends_all and system != SLURM:
        return dict(environ)
    kept = () if launcher.sends_all else _SLURM_PREFIXES
    return {
        name: value
        for name, value in environ.items()
        if name in names or name in _LOCAL or name.startswith(kept)
    }
