"""Ranks on Spark's executors: ``hvkit.spark.run`` calls a function on each.

::

    job              on the driver: run, from the arguments to a barrier job and its results; in
                     place of a launcher (python -m hvkit.spark.job), it waits
    task             on the executors: gives ranks their positions, and starts an agent for each,
                     which runs the rank (python -m hvkit.spark.task); keeps the store of addresses
                     where a rank's Horovod finds the others, and who may use it

The agents, their connections and the function's way to the ranks are those of ``hvkit.launch`` on
several hosts (``hvkit.functions``, ``hvkit.launching.supervision``). Horovod runs on Gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvkit.spark.job import run as run


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not at the top: executors need less.
    from hvkit.spark.job import run

    return run
