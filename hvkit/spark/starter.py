"""The launcher of ``hvkit.spark.run``, which starts nothing: ``python -m hvkit.spark.starter``.

Spark's tasks start the agents. So this process, which is supervised as a launcher is, hands the
agents' variables to the driver, and ends when the driver's job has ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from hvkit.host.call_folder import written
from hvkit.launching.supervision.protocol import KEY_VARIABLE, SUPERVISOR_VARIABLE

_TICK = 0.05


def agents_in(folder: Path) -> Path:
    """The file with the variables of agents, once the supervisor listens."""
    return folder / "agents"


def job_ended_in(folder: Path) -> Path:
    """The file that the driver writes when the job has ended: an exit status."""
    return folder / "job-ended"


def main(folder: Path) -> int:
    """Hand out the agents' variables, and wait for the end of Spark's job; returns its status."""
    variables = {name: os.environ[name] for name in (SUPERVISOR_VARIABLE, KEY_VARIABLE)}
    with written(agents_in(folder)) as file:
        file.write(json.dumps(variables).encode())
    while not job_ended_in(folder).exists():
        time.sleep(_TICK)
    return int(job_ended_in(folder).read_text())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
