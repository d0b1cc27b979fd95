"""A run as a batch script for Slurm: the values for ``slurm_job.sh``.

The script starts ``hvkit run`` on the first host of the allocation. That starts the ranks with
``mpirun``, which launches its daemons on the other hosts through Slurm. ``srun --mpi=pmix`` is not
used: it needs a Slurm built for the PMIx of this Open MPI, and nothing would watch the ranks.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvkit.manifest.fields import HvkitRun

_PLACE = re.compile(r"\{\{(\w+)\}\}")


def script(options: Mapping[str, Any], run: HvkitRun) -> str:
    """The text of the script.

    Args:
        options: the values of ``hvkit manifest slurm``'s options, by name.
        run: what the script starts.

    Raises:
        ValueError: an option of ``sbatch`` is one that the script sets itself.
    """
    slots, memory, gpus = run.size.slots, options["memory"], options["gpus"]
    variables = ("=".join(pair) for pair in run.variables.items())
    values = {
        **options,
        "hosts": run.size.hosts,
        "ranks": run.size.ranks,
        "slots": slots,
        "gpus": gpus and gpus * slots,
        "memory": memory and memory.times(slots),
        # A lost host does not end the job; `hvkit run` alone gets SIGTERM before its time ends.
        "for_restarts": ["--no-kill", "--signal=B:TERM@60"] if options["max_restarts"] else [],
        "programs": shlex.quote(str(Path(sys.executable).parent)),
        "run": shlex.join(["hvkit", *run.words(variables)]),
    }
    _check_further(options["sbatch"], _filled({**values, "sbatch": []}))
    return "\n".join([*_filled(values), ""])


def _check_further(further: list[str], lines: Iterator[str]) -> None:
    words = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    own = {_option_name(option): option for option in words}
    for option in further:
        if (name := _option_name(option)) in own:
            raise ValueError(
                f"--sbatch {option}: the script already has {own[name]}, from hvkit's own "
                "options: change those instead"
            )


def _option_name(option: str) -> str:
    return re.split("[= ]", option, maxsplit=1)[0]


def _filled(values: Mapping[str, Any]) -> Iterator[str]:
    """The template's lines with their values."""
    template = files("hvkit.manifest").joinpath("slurm_job.sh").read_text(encoding="utf-8")
    for line in template.splitlines():
        if line.startswith("# "):
            continue
        place = _PLACE.search(line)
        if place is None:
            yield line
            continue
        found = values[place[1]]
        for value in found if isinstance(found, list) else [found]:
            if value is not None:
                yield line.replace(place[0], str(value))
