"""Rank 0's record of a run: its start, steps of all ranks, the script's numbers, its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hvkit import runtime
from hvkit.host.run_reports import restart_of_this_run
from hvkit.monitor.records import described
from hvkit.monitor.step_times import Step, Totals, shares
from hvkit.monitor.writers import Writers, flattened
from hvkit.sync.nonfinite import skipped_steps
from hvkit.transport.traffic import traffic


class RunFile:
    """Writes one try of a run.

    Args:
        hosts: by rank, the name of its host.
        writers: write it to files and the hook.
    """

    def __init__(self, hosts: Sequence[str], writers: Writers) -> None:
        self._hosts = hosts
        self._writers = writers
        self._totals = Totals(hosts)
        self._begun_after: int | None = None
        self._sent: Mapping[str, int] = {}
        self._skipped = skipped_steps.number
        self._recorded = 0

    def begin(self, at: float, after: int) -> None:
        """Write the start, which comes before anything else; a second call does nothing.

        Args:
            at: when it was; seconds since 1970.
            after: the step from which the run has resumed; 0 for a new run.
        """
        if self._begun_after is None:
            self._begun_after = self._recorded = after
            start: dict[str, Any] = {"time": at, "step": after, "hosts": self._hosts}
            if runtime.size() > len(self._hosts):  # with a parameter server, only rank 0 records
                start["size"] = runtime.size()
            self._writers.write({"start": start | restart_of_this_run()})
            self._writers.begin(after)

    def record(
        self,
        step: int,
        epoch: int | None,
        everyone: Sequence[Mapping[str, Any]],
        optimizer: Mapping[str, float],
    ) -> None:
        """Write what ranks have measured since the last record.

        Args:
            step: the last one.
            epoch: that it belongs to, if the script has said so.
            everyone: by rank, its ``rows`` (of ``Step``), ``metrics`` and ``load``.
            optimizer: learning rate and gradient norm.
        """
        if not any(each["rows"] for each in everyone):
            return
        found = shares([[Step(*row) for row in each["rows"]] for each in everyone])
        if len(everyone) == len(self._hosts):
            self._totals.add(found)
        sent = {name: each.bytes for name, each in traffic().items() if name != "start"}
        about: dict[str, Any] = {"step": step, "time": time.time(), "epoch": epoch}
        if skipped := skipped_steps.number - self._skipped:
            about["skipped"] = skipped
        hosts = zip(self._hosts, everyone, strict=False)
        record = described(
            about,
            found,
            [each["metrics"] for each in everyone],
            optimizer,
            {name: total - self._sent.get(name, 0) for name, total in sent.items()},
            {host: each["load"] for host, each in hosts if each["load"]},
        )
        self._sent, self._skipped, self._recorded = sent, skipped_steps.number, step
        self._writers.write(record)
        numbers = flattened(record).items()
        shown = {name: value for name, value in numbers if name not in ("step", "time")}
        self._writers.scalars(step, shown)

    def log(self, step: int, at: float, numbers: Mapping[str, float]) -> None:
        """Write numbers of the script.

        Args:
            step: the last one before.
            at: seconds since 1970.
            numbers: by name.
        """
        self._writers.write({"step": step, "time": at, "logged": numbers})
        self._writers.scalars(step, numbers)

    def rest(self, step: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Write rank 0's metrics of the steps since the last record: an error has ended the run.

        Args:
            step: the last one.
            metrics: reads them.
        """
        if step > self._recorded:
            with suppress(Exception):  # the error may be the device's, which then computes nothing
                if numbers := metrics():
                    self.log(step, time.time(), numbers)

    def flush(self) -> None:
        """Write what is left in memory."""
        self._writers.flush()

    def end(self, step: int, error: str, *, left: bool) -> None:
        """Write the end, and close the files.

        Args:
            step: the last one.
            error: that has ended the run; empty for none.
            left: whether the ranks have left after SIGTERM, with a checkpoint.
        """
        if self._begun_after is not None:
            how = ({"error": error} if error else {}) | ({"left": True} if left else {})
            self._writers.write(
                {"end": {"time": time.time(), "step": step, **self._totals.summary(), **how}}
            )
        self._writers.close()

    def line(self) -> str:
        """The run in one line, or of a resumed one the steps since; empty if there are none."""
        if not self._totals.steps:
            return ""
        since = f"since step {self._begun_after:,}: " if self._begun_after else ""
        return since + self._totals.line()
