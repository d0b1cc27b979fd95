"""What a caller asks for: the ranks to start, on which hosts, and how to watch them.

``hvkit run`` reads a ``Request`` from its command line, ``hvkit.launch`` from its arguments.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hvkit.errors import UsageError
from hvkit.host.hardware import usable_cores, visible_gpus
from hvkit.launching.hosts import Host
from hvkit.launching.supervision.rank_output import Style
from hvkit.log import logger
from hvkit.wording import counted

LAUNCHERS = ("mpirun", "horovodrun", "gloo")
"""``mpirun`` of any known MPI; ``horovodrun`` over MPI; ``horovodrun`` with Gloo, without MPI."""

NUMBER_OF_RANKS = ("-np", "--np", "-n", "--num-proc")
"""All names of the option for the number of ranks."""

# The most ranks on a host that -np starts without -H: a larger number is probably a typing error.
_MOST_RANKS = 16
_MOST_ON_A_CORE = 8


@dataclass(frozen=True)
class Request:
    """The arguments of ``hvkit run``, under their names there.

    Attributes:
        command: the command of every rank.
        hosts: the hosts that may get ranks; empty for this host.
        system: the batch system that allocated the hosts, as in ``Allocation``; ``None`` for none.
        np: the number of ranks; ``None`` for one in each slot.
        min_np: the fewest ranks to go on with; ``None`` for all of them.
        launcher: one of ``LAUNCHERS``.
        variables: environment variables for the ranks besides those of ``forwarded``; ``None``
            for the value that the variable has here.
        interfaces: interfaces or networks to use between hosts, instead of those found.
        bind: whether each rank is bound to its share of its host's cores.
        lost_after: seconds without an acknowledgement after which a host counts as lost.
        grace: seconds that commands have to end, after a signal or the failure of another rank.
        style: how to show output.
        verbose: whether to print how ranks are started, what they set, and what TensorFlow and JAX
            print though nothing is wrong.
        stall: seconds after which a rank that others wait for ends the run; ``None`` for the value
            of ``HVKIT_STALL_LIMIT_SECONDS``, or half an hour.
        timeline: a file for the trace of all ranks; None for none.
        max_restarts: how often to start the ranks again without progress between two failures.
        call: the folder of the function that ``command`` runs; ``None`` for other commands.
        from_python: whether the caller writes ``np=4``, and not ``-np 4``; for errors.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    system: str | None = None
    np: int | None = None
    min_np: int | None = None
    launcher: str = "mpirun"
    variables: Mapping[str, str | None] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    bind: Literal["cores", "none"] = "cores"
    lost_after: float = 30.0
    grace: float = 10.0
    style: Style = field(default_factory=Style)
    verbose: bool = False
    stall: float | None = None
    timeline: Path | None = None
    max_restarts: int = 0
    call: Path | None = None
    from_python: bool = False

    def checked(self) -> "Request":
        """The request; for this host alone, with a number of ranks.

        Raises:
            UsageError: the number of ranks is missing, too large, or smaller than ``min_np``.
        """
        if self.min_np is not None and self.np is not None and self.min_np > self.np:
            raise UsageError(f"--min-np {self.min_np} is more than {self._ranks(self.np)}")
        return self if self.hosts else replace(self, np=self._number_here())

    def _number_here(self) -> int:
        """The number of ranks for this host: ``np``, or that of its GPUs."""
        cores = usable_cores()
        has = f"this host has {counted(cores, 'core')}"
        if self.np is None:
            given = {name: value for name, value in self.variables.items() if value is not None}
            if gpus := visible_gpus({**os.environ, **given}):
                logger.info("starts %s, one for each GPU", counted(gpus, "rank"))
                return gpus
            swallowed = any(word.partition("=")[0] in NUMBER_OF_RANKS for word in self.command)
            place = ", before COMMAND, which gets all options after it" if swallowed else ""
            raise UsageError(
                f"{'np' if self.from_python else '-np'} is missing: {has} and no GPU; give the "
                f"number of ranks{place}, such as {self._ranks(max(2, cores))}"
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
        """A number of ranks as the caller writes it."""
        return f"np={number}" if self.from_python else f"-np {number}"
