"""``hvkit run``: from the parsed request to the run's outcome, over all restarts."""

import contextlib
import json
import math
import secrets
import shlex
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvkit.errors import LaunchError
from hvkit.host.rank_variables import rank_settings
from hvkit.host.run_reports import RESTART, RUN_NAME, TIMELINE, memory_folder
from hvkit.launching.allocation import SAGEMAKER, wait_for_hosts
from hvkit.launching.prepare import CONNECT_AGAIN, Request, prepared, shown
from hvkit.launching.ssh import last_line, remote_shell, run_on_hosts
from hvkit.launching.supervision import run_status
from hvkit.launching.supervision.processes import EndedBySignal, end_on_signals, undisturbed
from hvkit.launching.supervision.rank_output import make_room
from hvkit.launching.supervision.run_status import RunStatus
from hvkit.launching.supervision.supervised_run import Outcome, SupervisedRun, supervise
from hvkit.launching.supervision.timeline import Timeline
from hvkit.launching.supervision.tracebacks import Raised
from hvkit.log import logger

# Seconds that a restart waits for hosts, and between two checks of them.
_HOSTS_RETURN = 600.0
_BETWEEN_LOOKS = 20.0
# Seconds for each host to delete checkpoints in its memory.
_FREED = 20.0
# Seconds before a restart: of the first after progress, and of the longest.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


@dataclass
class Restarts:
    """Decides after each end of the ranks whether to start them again.

    Restarts are limited only while there is no progress: a newer checkpoint restores the budget. So
    a run goes on as long as it makes progress, and a script that always fails stops soon. A try
    that has to resume an older checkpoint, because the host with the newest one was lost, reduces
    the budget by one until the run is further than before. Each restart without progress doubles
    the pause before the next. Leaving after SIGTERM is no failure. If the code of the script is
    wrong, it raises the same exception at the same line in two tries in a row, before its first
    step; it would do so again, so there is no further restart. Errors of files, networks or memory
    may not occur again.
    """

    most: int
    made: int = 0
    repeated: Raised | None = None
    _raised: Raised | None = field(default=None, repr=False)
    _without_progress: int = field(default=0, repr=False)
    _newest: int = field(default=-1, repr=False)
    _best: int = field(default=-1, repr=False)
    _went_back: int = field(default=0, repr=False)

    def again(self, outcome: Outcome) -> bool:
        """Whether to start the ranks again."""
        if outcome.status == 0 or not outcome.restartable:
            return False
        before, self._raised = self._raised, outcome.raised
        if before is not None and before.lasts and before == outcome.raised:
            self.repeated = before
            return False
        progress = outcome.saved is not None and outcome.saved > self._newest
        if outcome.saved is not None:
            if outcome.saved < self._newest:
                self._went_back += 1
            self._newest = outcome.saved
            if self._newest > self._best:
                self._best, self._went_back = self._newest, 0
        if progress:
            self._without_progress = self._went_back
        if self._without_progress >= self.most:
            return False
        self._without_progress += not (outcome.preempted and progress)
        self.made += 1
        return True

    @property
    def end(self) -> str:
        """For messages: why a run that has failed is not started again."""
        if self.repeated is None:
            return f"gives up after {self.budget}"
        return f"gives up: {self.repeated} again, before any step: another restart would not help"

    @property
    def pause(self) -> float:
        """Seconds to wait before the restart."""
        doublings = min(max(self._without_progress - 1, 0), 10)
        return float(min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE))

    @property
    def budget(self) -> str:
        """For messages: ``restart 5 (2 of at most 3 without a newer checkpoint)``."""
        used = f"{self._without_progress} of at most {self.most} without a newer checkpoint"
        return f"restart {self.made} ({used if self._without_progress else 'not counted'})"


def start(request: Request) -> Outcome:
    """Start the ranks, supervise them to their end, and return how the last try has ended.

    If the request allows restarts, the ranks are started again after a failure, without hosts that
    are not ready then; a later restart uses them again. SIGINT, SIGTERM and SIGHUP end the run at
    any time, with the status 128 plus the signal's number. ``hvkit top`` shows the run until it
    ends.
    """
    added = {}
    if request.timeline is not None:
        added[TIMELINE] = "1"
    if request.max_restarts:
        added[RUN_NAME] = secrets.token_hex(8)
    request = replace(request, variables={**request.variables, **added})
    status = RunStatus()
    program, script, *words = *request.command, "", ""
    script = script if script.startswith("-") else Path(script).name
    short = [Path(program).name, script, *words]
    status.update(command=shlex.join(filter(None, short)))
    try:
        with end_on_signals(lambda: status.now.saved), run_status.serve(status.read):
            return _start(request, status)
    except EndedBySignal as end:
        return Outcome(end.code)


def _start(request: Request, status: RunStatus) -> Outcome:
    if request.system == SAGEMAKER:
        wait_for_hosts(request.hosts)
    run = replace(prepared(request), status=status)
    if request.timeline is None:
        return _with_restarts(request, run)
    with contextlib.closing(Timeline(request.timeline)) as status.timeline:
        return _with_restarts(request, run)


def _with_restarts(request: Request, run: SupervisedRun) -> Outcome:
    restarts = Restarts(request.max_restarts)
    least = request.min_np or run.size
    replicas, failed = False, True
    try:
        while True:
            outcome = _supervised(request, run)
            reached = max((each.get("step", 0) for each in run.status.now.ranks), default=0)
            run.status.update(phase="ends", reason=outcome.reason, ranks=())
            replicas |= outcome.replicas
            failed = outcome.status != 0
            if not restarts.again(outcome):
                if request.max_restarts and outcome.restartable:
                    logger.error("%s", restarts.end)
                return outcome
            _report_restart(run, restarts, outcome)
            said = {"restart": restarts.made, "reason": outcome.reason, "reached": reached}
            variables = {**request.variables, RESTART: json.dumps(said)}
            request = replace(request, variables=variables)
            try:
                preempted = _preempted(run, outcome.terminated, replicas=replicas)
                run = _prepared_again(request, run, least, restarts, preempted)
            except LaunchError as error:
                logger.error("gives up: %s", error)
                return outcome
    finally:
        if replicas:
            run.status.update(phase="deletes checkpoints from the memory of the hosts")
            with undisturbed():
                _free_memory(request, failed=failed)


def _report_restart(run: SupervisedRun, restarts: Restarts, outcome: Outcome) -> None:
    # A try that ended before it resumed has saved nothing itself, but earlier ones may have.
    saved = run.status.last_saved if outcome.saved is None else outcome.saved
    from_step = f"from step {saved}"
    if saved is None:
        from_step = "from the beginning, as hvkit.Checkpoint has saved nothing"
    logger.warning("%s, %s: %s", restarts.budget, from_step, outcome.reason)
    if run.status.timeline is not None:
        run.status.timeline.note(f"restart {restarts.made}: {outcome.reason}")


def _free_memory(request: Request, *, failed: bool) -> None:
    """Delete the checkpoints of a run that has ended from the memory of its hosts.

    After a failure they stay if a host does not answer: the checkpoints on disk may be on that one.
    """
    folder = memory_folder(request.variables[RUN_NAME])
    shell = remote_shell(request.system, CONNECT_AGAIN)
    if failed:
        answers = run_on_hosts(request.hosts, ["ls", "-d", str(folder)], _FREED, shell)
        lost = ", ".join(answer.host.name for answer in answers if answer.problem)
        holders = ", ".join(answer.host.name for answer in answers if answer.status == 0)
        if lost and holders:
            logger.warning(
                "%s does not answer, and the newest checkpoint may be only in the memory of %s: "
                "copy the step-... folder below %s there into the directory of checkpoints to go "
                "on from it, then delete %s",
                *(lost, holders, folder, folder),
            )
            return
    for answer in run_on_hosts(request.hosts, ["rm", "-rf", "--", str(folder)], _FREED, shell):
        if answer.problem or answer.status:
            why = answer.problem or last_line(answer.stderr)
            logger.warning("%s may still hold checkpoints in %s: %s", answer.host.name, folder, why)


def _preempted(run: SupervisedRun, terminated: Collection[int], *, replicas: bool) -> set[str]:
    """The hosts of ranks that got SIGTERM, which will probably be taken away.

    Without copies in memory, not rank 0's host, whose disk may be the only one with the
    checkpoints.
    """
    preempted = {run.hosts[rank] for rank in terminated}
    return preempted if replicas else preempted.difference(run.hosts[:1])


def _prepared_again(
    request: Request,
    before: SupervisedRun,
    least: int,
    restarts: Restarts,
    preempted: Collection[str],
) -> SupervisedRun:
    """Pause, and prepare a restart as soon as hosts for ``least`` ranks are ready.

    Hosts that were preempted are left out if the others suffice.
    """
    deadline = time.monotonic() + _HOSTS_RETURN
    pause, status = restarts.pause, before.status
    status.update(phase=f"begins restart {restarts.made} after a pause of {pause:g} s")
    said = ""
    while True:
        _wait(pause)
        try:
            run = prepared(request, least=least, preempted=preempted)
        except LaunchError as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != said:
                said = str(error)
                logger.warning("waits for hosts: %s", said)
                status.update(phase=f"waits for hosts before restart {restarts.made}: {said}")
            pause = min(2 * pause, _BETWEEN_LOOKS)
            continue
        if run.size != before.size:
            logger.warning("%d ranks now, %d before", run.size, before.size)
        status.update(restarts=restarts.made)
        return replace(run, status=status)


def _wait(seconds: float) -> None:
    """Sleep a second at a time.

    ``time.sleep`` goes on after a signal that comes while the handler of another one runs, and
    Python handles that signal only then.
    """
    naps = math.ceil(seconds)
    for _ in range(naps):
        time.sleep(seconds / naps)


def _supervised(request: Request, run: SupervisedRun) -> Outcome:
    if run.style.log_dir is not None:
        try:
            make_room(run.style.log_dir)
        except OSError as error:
            raise LaunchError(
                f"--log-dir {run.style.log_dir} cannot be made ({error.strerror}): name a folder "
                "that you can write to"
            ) from error
    if request.verbose:
        logger.info("starts %s", shown(run))
        for each in rank_settings(run.environ):
            logger.info("ranks set %s=%s: %s", each.variable, each.value, each.reason)
    return supervise(run)
