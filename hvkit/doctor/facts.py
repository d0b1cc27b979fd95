"""All that is found out about this host and this Python."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvkit.doctor.compilers import compilers
from hvkit.doctor.horovod import Horovod, horovod
from hvkit.doctor.machine import (
    Cores,
    Limits,
    Memory,
    SharedMemory,
    System,
    cores,
    limits,
    memory,
    shared_memory,
    system,
)
from hvkit.doctor.mpi import MpiLauncher, launchers_here
from hvkit.doctor.network import Ssh, own_addresses, ssh
from hvkit.doctor.packages import Packages, packages
from hvkit.doctor.settings import rank_of, setting_names, thread_settings
from hvkit.host.gpus import Gpus, gpus
from hvkit.host.network import Interface, interfaces


@dataclass(frozen=True)
class Facts:
    """What was found; see the classes of the parts.

    Attributes:
        python: the interpreter.
        addresses: what the hostname resolves to.
        threads: numbers of threads that the environment sets.
        environment: names of other variables that change how ranks run.
        launched: what makes hvkit take this process for a rank; ``None`` if nothing does.
    """

    hostname: str
    python: str
    system: System
    packages: Packages
    horovod: Horovod
    launchers: tuple[MpiLauncher, ...]
    compilers: dict[str, str | None]
    cores: Cores
    memory: Memory
    shared_memory: SharedMemory | None
    limits: Limits
    gpus: Gpus
    addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    ssh: Ssh
    threads: dict[str, str]
    environment: tuple[str, ...]
    launched: str | None


def gather() -> Facts:
    """Look at everything; where other programs are asked, at the same time."""
    with ThreadPoolExecutor() as pool:
        built = pool.submit(horovod)
        cards = pool.submit(gpus)
        starting = pool.submit(launchers_here)
        compiling = pool.submit(compilers)
        resolved = pool.submit(own_addresses)
        shell = pool.submit(ssh)
        return Facts(
            hostname=socket.gethostname(),
            python=sys.executable,
            system=system(),
            packages=packages(),
            horovod=built.result(),
            launchers=starting.result(),
            compilers=compiling.result(),
            cores=cores(),
            memory=memory(),
            shared_memory=shared_memory(),
            limits=limits(),
            gpus=cards.result(),
            addresses=resolved.result(),
            interfaces=tuple(interfaces()),
            ssh=shell.result(),
            threads=thread_settings(os.environ),
            environment=setting_names(os.environ),
            launched=rank_of(os.environ),
        )
