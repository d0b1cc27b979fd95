"""``hvkit.spark.run``: a function on ranks that Spark's executors start.

Spark's tasks start the agents. So the launcher that is supervised (``python -m hvkit.spark.job``)
starts nothing: it hands the agents' variables to the driver, and ends when the driver's job has
ended.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvkit.argument_checks import check_count
from hvkit.errors import LaunchError, RankLostError
from hvkit.functions import supervised
from hvkit.functions.pickling import call_folder, check_environ, check_function
from hvkit.functions.rank import command_of_rank
from hvkit.host.network import addresses_for_others
from hvkit.launching.prepare import Request
from hvkit.launching.supervision.protocol import (
    KEY_VARIABLE,
    SUPERVISOR_VARIABLE,
    AgentSettings,
    written,
)
from hvkit.launching.supervision.run_status import RunStatus
from hvkit.launching.supervision.supervised_run import SupervisedRun
from hvkit.log import counted, logger, shortened
from hvkit.spark.task import RankTask

R = TypeVar("R")

# Files in the folder of the call: the agents' variables, once the supervisor listens, and the exit
# status of the driver's job, once that has ended.
_AGENTS, _JOB_ENDED = "agents", "job-ended"

# All in seconds. For executors to come before a job that needs more of them is refused.
_EXECUTORS_COME = 30.0
# For Spark to notice that its tasks have ended, before the job is cancelled.
_JOB_ENDS = 10.0
_TICK = 0.05
# What ends a job, in Py4J's text: an error of hvkit's in a task, or else Spark's own.
_REASONS = (r"hvkit\.errors\.\w+: (.+)", r".*org\.apache\.spark\.SparkException: (.+)")
# Characters of Spark's error in ours.
_ERROR = 500


def run(
    function: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    env: Mapping[str, str] | None = None,
) -> list[R]:
    """Run a function on ranks that Spark's executors start, and return what it returns on each.

    The active ``SparkSession`` runs a barrier job of ``num_proc`` tasks, each of which starts a
    rank. Everything else is as with ``hvkit.launch``: output is shown here as it is printed, an
    exception is raised with its own type, and functions and results travel by cloudpickle.

    hvkit, with Horovod and the framework, must be installed on the executors. Ranks talk over Gloo,
    and over NCCL between GPUs; Spark's GPU scheduling is respected.

    Args:
        function: the function, not its result.
        args: its arguments.
        kwargs: its named arguments.
        num_proc: the number of ranks; by default Spark's default parallelism, in general the number
            of the executors' cores.
        env: environment variables of the ranks, besides the executors'.

    Returns:
        By rank, what the function has returned there.

    Raises:
        Exception: what the function has raised on the rank that failed first; a note has the
            traceback of that rank.
        TypeError: the function, an argument or a result cannot be pickled.
        RankLostError: a rank was killed, or has ended without returning; an executor is lost.
        LaunchError: there is no session with enough executors; the job has failed or was cancelled;
            this process is a rank itself.
    """
    check_function("hvkit.spark.run", function, "hvkit.spark.run(train, num_proc=2)")
    environ = check_environ("hvkit.spark.run", env)
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(
            f"hvkit.spark.run: args must be a tuple of the function's arguments, got {args!r}: "
            f"args=({args!r},)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            "hvkit.spark.run: kwargs must be a dict of the function's named arguments, got "
            f"{kwargs!r}: kwargs={{'epochs': 10}}"
        )
    supervised.refuse_on_ranks("hvkit.spark.run")
    context = _context()
    size = context.defaultParallelism if num_proc is None else check_count("num_proc", num_proc)
    _await_executors(context, size)
    name = f"hvkit.spark.run({getattr(function, '__name__', type(function).__name__)})"
    with call_folder(function, args, kwargs or {}) as folder:
        process = supervised.begin(_supervised(context, size, name, folder), folder)
        job = _Job(context, folder, process, size, name)
        try:
            job.start(command_of_rank(function, "hvkit.spark.task")[1:], environ)
            supervised.follow(process)
        finally:
            job.end()
        ended = supervised.outcome_of(process, folder)
        if (error := supervised.error_of(folder, ended)) is None:
            return supervised.results_of(folder, ended)
        if job.problem is not None and supervised.raised_by_first(folder, ended) is None:
            if lost := job.lost_executors():
                raise RankLostError(
                    f"Spark has lost the executor at {' and at '.join(lost)}, with the ranks "
                    f"there: Spark's log has the reason ({job.reason(ended.reason)})"
                ) from job.problem
            why = f"the Spark job has failed: {job.reason(ended.reason)}"
            raise LaunchError(why) from job.problem
        raise error


def _supervised(context: Any, size: int, name: str, folder: Path) -> SupervisedRun:
    """How to supervise the ranks, whose agents Spark's tasks start."""
    status = RunStatus()
    status.update(command=name)
    agents = AgentSettings(
        addresses=_addresses(context),
        lost_after=Request.lost_after,
        grace=Request.grace,
        bind=False,  # Spark's executors share the cores of their hosts
        call=str(folder),
    )
    command = [sys.executable, "-P", "-m", "hvkit.spark.job", str(folder)]
    return SupervisedRun(command, dict(os.environ), "Spark", size, agents, status=status)


@dataclass
class _Job:
    """The barrier job that starts the ranks, in a thread of its own."""

    context: Any
    folder: Path
    supervisor: subprocess.Popen[bytes]
    size: int
    name: str
    problem: Exception | None = None  # that has ended it
    thread: Any = None

    def __post_init__(self) -> None:
        self.group = f"hvkit-{secrets.token_hex(8)}"
        self.executors = _executors(self.context)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the thread; its tasks begin as soon as the supervisor listens."""
        from pyspark import InheritableThread

        self.thread = InheritableThread(target=self._run, args=[command, environ])
        self.thread.daemon = True
        self.thread.start()

    def end(self) -> None:
        """Wait until the job has ended, and cancel it if it does not end by itself."""
        if self.thread is None:
            return
        self.thread.join(_JOB_ENDS)
        if self.thread.is_alive():
            self.context.cancelJobGroup(self.group)
            self.thread.join(_JOB_ENDS)

    def lost_executors(self) -> list[str]:
        """The addresses of the executors that were there at the beginning, and are not now."""
        return sorted(self.executors - _executors(self.context))

    def reason(self, of_supervisor: str) -> str:
        """Why it has failed, in a line."""
        text = str(self.problem).strip()
        found = next(filter(None, (re.search(each, text) for each in _REASONS)), None)
        reason = shortened(found[1] if found else text.partition("\n")[0], _ERROR)
        return f"{reason} ({of_supervisor})" if of_supervisor else reason

    def _run(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        while not (self.folder / _AGENTS).exists():
            if self.supervisor.poll() is not None:  # what it printed, or left, says why
                return
            time.sleep(_TICK)
        agent = json.loads((self.folder / _AGENTS).read_bytes())
        task = RankTask(agent, environ, secrets.token_bytes(32), command)
        try:
            description = f"{self.name} on {counted(self.size, 'rank')}"
            self.context.setJobGroup(self.group, description, interruptOnCancel=True)
            tasks = self.context.parallelize(range(self.size), self.size)
            tasks.barrier().mapPartitions(task).collect()
        except Exception as problem:
            self.problem = problem
        finally:
            # The folder is gone if Spark has not ended a cancelled job for long.
            with suppress(FileNotFoundError), written(self.folder / _JOB_ENDED) as file:
                file.write(b"1" if self.problem else b"0")


def _context() -> Any:
    """The context of this thread's session, or else of the session that all threads share."""
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "hvkit.spark.run needs pyspark: pip install 'hvkit[spark]'", name=missing.name
        ) from missing
    none = "there is no active SparkSession: create one with SparkSession.builder.getOrCreate()"
    try:
        session = SparkSession.active()
    except PySparkRuntimeError as problem:
        raise LaunchError(none) from problem
    try:
        context = session.sparkContext
    except Exception as problem:  # PySparkAttributeError of Spark Connect
        raise LaunchError(
            "this SparkSession is one of Spark Connect, whose clients cannot start barrier tasks "
            "that reach them: run in the driver, such as a cluster's own notebook or spark-submit"
        ) from problem
    if context._jsc is None:  # it was stopped without its session
        raise LaunchError(none)
    return context


def _executors(context: Any) -> set[str]:
    """The addresses of the driver's and the executors' storage."""
    return set(context._jsc.sc().getExecutorMemoryStatus().keySet().mkString(" ").split())


def _await_executors(context: Any, size: int) -> None:
    """Wait until so many tasks can run at the same time.

    Spark itself would try for ten minutes, without a word.
    """
    begun = time.monotonic()
    scheduler = context._jsc.sc()
    profile = scheduler.resourceProfileManager().defaultResourceProfile()
    said = False
    while (slots := scheduler.maxNumConcurrentTasks(profile)) < size:
        if time.monotonic() - begun > _EXECUTORS_COME:
            raise LaunchError(
                f"num_proc={size} is more than the {counted(slots, 'task')} that the executors can "
                f"run at the same time: pass at most num_proc={slots}, or give Spark more "
                "executors (spark.executor.instances) or cores (spark.executor.cores), of which a "
                "task takes spark.task.cpus"
            )
        if not said:
            said = True
            logger.info("waits for executors: %d of %d ranks have a slot", slots, size)
        time.sleep(1)


def _addresses(context: Any) -> tuple[str, ...]:
    """Addresses at which executors reach this host, the driver's own first."""
    driver = context.getConf().get("spark.driver.host")
    try:
        local = socket.gethostbyname(driver).startswith("127.")
    except OSError:  # a name of the cluster that this host does not know
        local = False
    return (driver,) if local else tuple(dict.fromkeys([driver, *addresses_for_others()]))


def wait_for_job(folder: Path) -> int:
    """Hand out the agents' variables, and wait for the end of Spark's job; returns its status."""
    variables = {name: os.environ[name] for name in (SUPERVISOR_VARIABLE, KEY_VARIABLE)}
    with written(folder / _AGENTS) as file:
        file.write(json.dumps(variables).encode())
    while not (folder / _JOB_ENDED).exists():
        time.sleep(_TICK)
    return int((folder / _JOB_ENDED).read_text())


if __name__ == "__main__":
    sys.exit(wait_for_job(Path(sys.argv[1])))
