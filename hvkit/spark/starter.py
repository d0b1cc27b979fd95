"""The process beside Spark's driver that supervises the ranks: ``python -m hvkit.spark.starter``.

Spark's tasks start the agents, so the launcher that is supervised is this module again, which
waits: it hands the agents' variables to the driver, and ends when the driver's job has ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from hvkit.functions.supervised import supervise_below
from hvkit.host.call_folder import written
from hvkit.launching.prepare import Request
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.protocol import KEY_VARIABLE, SUPERVISOR_VARIABLE
from hvkit.launching.supervision.run_status import RunStatus
from hvkit.launching.supervision.supervised_run import Outcome, SupervisedRun, supervise

_TICK = 0.05


def run_in(folder: Path) -> Path:
    """The file with the number of ranks, the driver's addresses, and what ``hvkit top`` shows."""
    return folder / "spark-run"


def agents_in(folder: Path) -> Path:
    """The file with the variables of agents, once the supervisor listens."""
    return folder / "agents"


def job_ended_in(folder: Path) -> Path:
    """The file that the driver writes when the job has ended: an exit status."""
    return folder / "job-ended"


def main(folder: Path, parent: int) -> None:
    """Supervise the ranks until they have ended."""

    def run() -> Outcome:
        wanted = json.loads(run_in(folder).read_text())
        status = RunStatus()
        status.update(command=wanted["command"])
        with run_status.serve(status.read):
            return supervise(
                SupervisedRun(
                    command=[sys.executable, "-P", "-m", "hvkit.spark.starter", str(folder)],
                    environ=os.environ,
                    launcher="Spark",
                    size=wanted["size"],
                    addresses=tuple(wanted["addresses"]),
                    lost_after=Request.lost_after,
                    grace=Request.grace,
                    bind=False,  # Spark's executors share the cores of their hosts
                    status=status,
                    call=folder,
                )
            )

    supervise_below(folder, parent, run)


def wait_for_job(folder: Path) -> int:
    """Hand out the agents' variables, and wait for the end of Spark's job; returns its status."""
    variables = {name: os.environ[name] for name in (SUPERVISOR_VARIABLE, KEY_VARIABLE)}
    with written(agents_in(folder)) as file:
        file.write(json.dumps(variables).encode())
    while not job_ended_in(folder).exists():
        time.sleep(_TICK)
    return int(job_ended_in(folder).read_text())


if __name__ == "__main__":
    place, *parents = sys.argv[1:]
    if parents:
        main(Path(place), int(parents[0]))
    else:
        sys.exit(wait_for_job(Path(place)))
