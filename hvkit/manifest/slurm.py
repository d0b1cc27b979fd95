"""A run as a batch script for Slurm.

The script runs ``hvkit run`` on the first host of the allocation, which starts the ranks with
``mpirun``; that starts its own processes on the other hosts through Slurm. ``srun --mpi=pmix``
would need a Slurm that was built for the PMIx of the Open MPI in use, and nothing would watch the
ranks.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvkit.manifest.quantity import Quantity
from hvkit.manifest.size import Size


@dataclass(frozen=True)
class SlurmJob:
    """A run in a Slurm cluster.

    Attributes:
        command: what every rank runs.
        size: ranks, and ranks per host.
        name: of the job.
        gpus: GPUs for each rank.
        cpus: cores for each rank; ``None`` for Slurm's default.
        memory: memory for each rank; ``None`` for Slurm's default.
        time: time limit, ``HH:MM:SS``; ``None`` for that of the partition.
        partition: one or several, with commas between them; ``None`` for the cluster's default.
        account: who pays; ``None`` for the user's default.
        variables: environment variables for all ranks.
        sbatch_options: further options of ``sbatch``: ``--qos=high``.
        run_options: for ``hvkit run``, as words.
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
        """Check what no single argument tells.

        Raises:
            ValueError: two of the attributes do not fit together.
        """
        own = {_name(option): option for option in self._options()}
        for option in self.sbatch_options:
            if _name(option) in own:
                raise ValueError(
                    f"--sbatch {option}: the script has {own[_name(option)]} already, from hvkit's "
                    "own options: change those"
                )

    def script(self) -> str:
        """The script for ``sbatch``."""
        programs = shlex.quote(str(Path(sys.executable).parent))
        variables = [word for pair in self.variables.items() for word in ("-x", "=".join(pair))]
        options = ["-np", str(self.size.ranks), *variables, *self.run_options]
        run = shlex.join(["hvkit", "run", *options, *self.command])
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in (*self._options(), *self.sbatch_options)),
            "set -euo pipefail",
            f'export PATH={programs}:"$PATH"',
            # In place of the shell, which would keep signals to itself.
            f"exec {run}",
        ]
        return "\n".join(lines) + "\n"

    def _options(self) -> Iterator[str]:
        slots = self.size.slots
        yield f"--job-name={self.name}"
        yield f"--nodes={self.size.hosts}"
        yield f"--ntasks={self.size.ranks}"
        yield f"--ntasks-per-node={slots}"
        if self.cpus is not None:
            yield f"--cpus-per-task={self.cpus}"
        if self.gpus:
            # Of the host, not of the task: ranks see all of them and choose by their local rank.
            yield f"--gres=gpu:{self.gpus * slots}"
        if self.memory is not None:
            yield f"--mem={self.memory.times(slots)}"
        if self.time is not None:
            yield f"--time={self.time}"
        if self.partition is not None:
            yield f"--partition={self.partition}"
        if self.account is not None:
            yield f"--account={self.account}"


def _name(option: str) -> str:
    return re.split("[= ]", option, maxsplit=1)[0]
