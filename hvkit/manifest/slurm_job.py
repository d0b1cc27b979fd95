"""A run as a batch script for Slurm.

The script starts ``hvkit run`` on the first host of the allocation. That starts the ranks with
``mpirun``, which launches its daemons on the other hosts through Slurm. ``srun --mpi=pmix`` is not
used: it needs a Slurm built for the PMIx of this Open MPI, and nothing would watch the ranks.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvkit.manifest.fields import Quantity, Size


@dataclass(frozen=True)
class SlurmJob:
    """A run in a Slurm cluster.

    Attributes:
        command: the program that every rank runs, with its arguments.
        size: ranks, and ranks per host.
        name: of the job.
        gpus: GPUs for each rank.
        cpus: cores for each rank; ``None`` for Slurm's default.
        memory: memory for each rank; ``None`` for Slurm's default.
        time: time limit, ``HH:MM:SS``; ``None`` for that of the partition.
        partition: one or several, separated by commas; ``None`` for the cluster's default.
        account: the account to charge; ``None`` for the user's default.
        variables: environment variables for all ranks.
        sbatch_options: further options of ``sbatch``: ``--qos=high``.
        run_options: options of ``hvkit run``, one word each.

    Raises:
        ValueError: an option of ``sbatch_options`` is one that the script sets itself.
    """

    command: tuple[str, ...]
    size: Size
    name: str
    gpus: int
    cpus: int | None
    memory: Quantity | None
    time: str | None
    partition: str | None
    account: str | None
    variables: Mapping[str, str] = field(default_factory=dict)
    sbatch_options: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own = {_option_name(option): option for option in self._options()}
        for option in self.sbatch_options:
            if (name := _option_name(option)) in own:
                raise ValueError(
                    f"--sbatch {option}: the script already has {own[name]}, from hvkit's own "
                    "options: change those instead"
                )

    def script(self) -> str:
        """The text of the script."""
        programs = shlex.quote(str(Path(sys.executable).parent))
        variables = [word for pair in self.variables.items() for word in ("-x", "=".join(pair))]
        options = ["-np", str(self.size.ranks), *variables, *self.run_options]
        run = shlex.join(["hvkit", "run", *options, *self.command])
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in (*self._options(), *self.sbatch_options)),
            "set -euo pipefail",
            f'export PATH={programs}:"$PATH"',
            # exec: a shell in between would not pass Slurm's signals on.
            f"exec {run}",
        ]
        return "\n".join(lines) + "\n"

    def _options(self) -> Iterator[str]:
        """The options of ``sbatch`` that follow from the attributes."""
        slots = self.size.slots
        yield f"--job-name={self.name}"
        yield f"--nodes={self.size.hosts}"
        yield f"--ntasks={self.size.ranks}"
        yield f"--ntasks-per-node={slots}"
        if self.cpus is not None:
            yield f"--cpus-per-task={self.cpus}"
        if self.gpus:
            # Per host, not per task: each rank sees all GPUs and picks one by its local rank.
            yield f"--gres=gpu:{self.gpus * slots}"
        if self.memory is not None:
            yield f"--mem={self.memory.times(slots)}"
        if self.time is not None:
            yield f"--time={self.time}"
        if self.partition is not None:
            yield f"--partition={self.partition}"
        if self.account is not None:
            yield f"--account={self.account}"
        if "--max-restarts" in self.run_options:
            # A lost host does not end the job; `hvkit run` alone gets SIGTERM before its time ends.
            yield "--no-kill"
            yield "--signal=B:TERM@60"


def _option_name(option: str) -> str:
    return re.split("[= ]", option, maxsplit=1)[0]
