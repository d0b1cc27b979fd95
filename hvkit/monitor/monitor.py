"""``Monitor``: records a training run from all ranks, and logs at its end where the time went."""

from __future__ import annotations

import atexit
import functools
import math
import socket
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hvkit import runtime
from hvkit.argument_checks import advise_on_extra_arguments, check_count, check_path
from hvkit.communication import collectives
from hvkit.errors import HvkitError
from hvkit.host.run_reports import report
from hvkit.log import in_short, logger
from hvkit.monitor.measurements import HostLoad, Means, Step, StepClock, detached, length_of
from hvkit.monitor.run_file import Hook, RunFile
from hvkit.registry import are_of_pytorch, framework_of
from hvkit.sync.port import skipped_steps
from hvkit.watch.calls import named
from hvkit.watch.preemption import PREEMPTION
from hvkit.watch.spans import DATA, mark

if TYPE_CHECKING:
    import keras

    from hvkit.mesh import MeshPosition

Batch = TypeVar("Batch")

# Seconds between two records without ``every``, about. The first, after one step, shows its length.
_SECONDS = 1.0


class Monitor:
    """Records loss, speed and the parts of a step's time, from all ranks, into one folder.

        with hvkit.Monitor("runs/mnist") as monitor:
            model, optimizer = hvkit.distribute(model, optimizer, monitor=monitor)
            for epoch in range(epochs):
                for images, labels in monitor.batches(loader):
                    ...
                    optimizer.step()
                    monitor.step(loss=loss)
                monitor.log(val_accuracy=accuracy)

    In Keras ``distribute(..., monitor=monitor)`` is enough: ``fit`` then records its steps and
    metrics. Without it, pass ``monitor.callback(model)`` to ``fit``.

    Rank 0 writes ``metrics.jsonl``, one JSON object a line, and event files for TensorBoard, if
    that is installed; ``hvkit report FOLDER`` shows both a run and its restarts. The page on
    monitoring lists what a record holds. A line at the end shows for what part of the time the
    ranks were busy, rather than waiting or exchanging gradients, which rank kept the others
    waiting, and why: ``ranks busy 73%; rank 3 on node2 was last in 71% of steps: data``.

    Every rank makes a monitor, for one call of ``distribute``, and calls the same methods; a record
    is a small collective. With ``ParameterServer``, where ranks take different numbers of steps,
    pass it to ``distribute``; records then hold the steps of rank 0 only.

    Pass a monitor to ``hvkit.Checkpoint`` as well, and a resumed run continues to count its steps,
    in the same file. A run that was saved without one can be resumed with a monitor.

    Args:
        folder: the run's folder, which rank 0 makes.
        every: record after this many steps. None: about once a second.
        tensorboard: whether to write event files; None: if TensorBoard is installed.
        hook: rank 0 calls it at each record with a dict of numbers and ``step=``:
            ``hook=mlflow.log_metrics``, ``hook=wandb.log``. If it raises, that is logged once.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``every`` is not positive.
        HvkitError: later, on every rank: rank 0 cannot write into the folder, or
            ``tensorboard=True`` and it is not installed.
    """

    @advise_on_extra_arguments(
        'hvkit.Monitor takes a folder, and options by name: Monitor("runs/a", every=5). Model and '
        "optimizer go to hvkit.distribute(model, optimizer, monitor=monitor)"
    )
    def __init__(
        self,
        folder: str | Path,
        *,
        every: int | None = None,
        tensorboard: bool | None = None,
        hook: Hook | None = None,
    ) -> None:
        if hook is not None and not callable(hook):
            raise TypeError(
                f"hook must be a function that takes a dict and step=, got {hook!r}: for "
                "instance hook=mlflow.log_metrics"
            )
        self.folder = check_path("folder", folder, 'Monitor("runs/a", every=5)')
        self._every = None if every is None else check_count("every", every)
        self._new_file = functools.partial(RunFile, self.folder, tensorboard, hook)
        self.closed = False
        # Steps of the current call: several with Keras's ``steps_per_execution``.
        self.stride = 1
        self.clock = StepClock()
        # The run's steps so far, and those before this start.
        self.steps = self._begun_after = 0
        self._begun = time.time()
        self._next = self._every or 1
        self._rows: list[Step] = []
        self._means = Means()
        # This rank's samples in the batches of this step.
        self._samples: list[float] = []
        self._epoch: int | None = None
        self._hosts: list[str] = []
        # The file that rank 0 writes; None until it is open, and on the other ranks.
        self._file: RunFile | None = None
        # Numbers that the script has logged before the file was opened.
        self._logs: list[tuple[int, float, dict[str, float]]] = []
        self._callbacks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._load: HostLoad | None = None
        # Measures the norm of gradients.
        self._norms: Any = None
        self._equal_steps = True
        # How many ranks compute on the same samples, and whether this rank's norm counts.
        self._ranks_of_a_batch, self._norm_counts = 1, True
        self._skipped = skipped_steps.number
        # The error of an earlier cell in a notebook.
        self._old_error = getattr(sys, "last_value", None)
        self._at_exit = functools.partial(_end_with_script, weakref.ref(self))

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``data``; the time to load each counts as data.

        A step begins when the last one has ended, or with the first batch. ``step`` takes the
        length of the batch's first array or tensor for its number of samples.
        """
        self.clock.begin()
        yield from self.timed(iter(data), self._samples)

    def timed(self, batches: Iterator[Batch], samples: list[float]) -> Iterator[Batch]:
        """The batches; adds this rank's samples in each to the list, and times its loading."""
        while True:
            begun = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            ended = time.monotonic()
            self.clock.loaded(ended - begun)
            mark(DATA, begun, ended)
            samples.append(self.samples_in(batch))
            yield batch

    def samples_in(self, batch: Any) -> float:
        """This rank's samples in a batch, also in one that belongs to all ranks."""
        return length_of(batch, runtime.size() // self._ranks_of_a_batch)

    @named("Monitor.step")
    def step(self, *, samples: float | None = None, **metrics: Any) -> None:
        """End a step, after the optimizer's.

        At a record, which comes after the same step on all ranks, this is a collective.

        Args:
            samples: how many are in this rank's batch; by default, as ``batches`` has counted.
            **metrics: numbers or tensors with one value, such as this rank's loss.

        Raises:
            TypeError: a metric is no number.
            ValueError: its name is one of hvkit's own, or the monitor is closed.
            RankLostError: another rank has ended, or waits in another call.
        """
        self._require_open()
        if skipped_steps.number > self._skipped:  # a loss without a step, and probably NaN
            self._skipped, metrics = skipped_steps.number, {}
        self.end_steps(1, sum(self._samples) if samples is None else float(samples), metrics)

    def end_steps(
        self, steps: int, samples: float, metrics: Mapping[str, Any], *, timed: bool = True
    ) -> None:
        """End the steps of one call; a collective at a record, which comes after all of them.

        ``samples`` are this rank's; ``timed``: whether they count in the mean time of steps.
        """
        self.stride = steps
        if self.record_pending:  # a GPU may still be at work: wait for it inside the step
            metrics = {name: float(detached(name, value)) for name, value in metrics.items()}
        step = self.clock.end(samples / self._ranks_of_a_batch, steps)
        self._samples.clear()
        self.steps += steps
        for name, value in metrics.items():
            self._means.add(name, value)
        if timed:
            self._rows += [step] * steps
        if self.steps >= self._next:
            begun = time.monotonic()
            if self._equal_steps and runtime.size() > 1:
                # Else the wait for a rank that is late after backward() would belong to no step.
                collectives.gather("Monitor.step", None)
                if timed:
                    self._rows[-1] = step.waiting(time.monotonic() - begun)
            self._record()
            self.clock.begin()
        self._expect_record(self.record_pending)

    @property
    def record_pending(self) -> bool:
        """Whether the current step ends with a record."""
        return not self.closed and self.steps + self.stride >= self._next

    def log(self, **values: float) -> None:
        """Record numbers that the script has from elsewhere, such as a validation accuracy.

        Only rank 0's are recorded, so average them first (``hvkit.average``). Not a collective.

        Raises:
            TypeError: one is no number.
            ValueError: the monitor is closed.
        """
        self._require_open()
        numbers = {name: float(detached(name, value)) for name, value in values.items()}
        if runtime.rank() == 0:
            self._logs.append((self.steps, time.time(), numbers))
            self._write_logs()

    def begin_epoch(self, epoch: int) -> None:
        """Begin a pass over the data; the time since the last step belongs to no step."""
        self._epoch = epoch
        self.clock.begin()

    def callback(self, model: keras.Model) -> keras.callbacks.Callback:
        """The callback for ``fit`` of this model, which records every step."""
        if model not in self._callbacks:
            from hvkit.monitor.keras import FitRecorder

            self._callbacks[model] = FitRecorder(self, model)
        return self._callbacks[model]

    def attach(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        *,
        equal_steps: bool,
        position: MeshPosition | None = None,
    ) -> None:
        """Record the learning rate and the norm of the gradients; ``distribute`` calls this.

        A collective. With JAX both are inside the compiled step: what it returns can be logged.
        ``position`` is this rank's position in the mesh that divides the models, if any.
        """
        self._require_open()
        if self._norms is not None:
            raise ValueError(
                "this monitor was passed to hvkit.distribute before: pass it with one model, or a "
                "list of models that train together, and make another one, with a folder of its "
                "own, for each further call"
            )
        self._equal_steps = equal_steps
        in_keras = getattr(framework_of(models[0]), "package", None) == "keras"
        if position is not None:
            self._ranks_of_a_batch = len(position.members("pipeline", "tensor"))
            self._norm_counts = position.along("data") == 0
        elif in_keras:
            self._norm_counts = runtime.rank() == 0
        self._open()
        if in_keras:
            from hvkit.monitor import keras

            for model in models:
                keras.record_fit(self.callback(model), model)
            self._norms = keras.norms_of(optimizers)
        if are_of_pytorch(optimizers):
            from hvkit.monitor.pytorch import GradientNorms

            self._norms = GradientNorms(optimizers)
        self._expect_record(self.record_pending)

    @named("Monitor.flush")
    def flush(self, **metrics: Any) -> None:
        """Record the steps since the last record; a collective.

        Args:
            **metrics: as for ``step``, instead of what the steps had.
        """
        self._require_open()
        if metrics:
            self._means.clear()
        for name, value in metrics.items():
            self._means.add(name, value)
        self._expect_record(False)  # these steps have measured no norm
        self._record()
        self._expect_record(self.record_pending)
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Record the last steps, log a line about the run, and close the files; a collective.

        The end of ``with hvkit.Monitor(...)`` calls it. After an error, which other ranks may not
        have, the ``with`` block only closes the files; but if all ranks leave after SIGTERM, it
        records.
        """
        if self.closed:
            return
        try:
            self.flush()
        except BaseException as error:
            self._finish(error)
            raise
        self._finish()
        if self._file is not None and (line := self._file.line()):
            logger.info("%s: %s", self.folder, line)

    def _expect_record(self, pending: bool) -> None:
        """Have the next step measure the norm of its gradients, or not."""
        if self._norms is not None:
            self._norms.expect(pending)

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(
                f"this monitor of {self.folder} is closed: use it inside its with block"
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        all_leave = PREEMPTION.left and self._equal_steps  # after SIGTERM
        if error is None or all_leave:
            self.close()
        elif not self.closed:
            self._finish(error)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint saves: how many steps the run has taken."""
        return {"step": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count steps from a state of ``state_dict``."""
        self.steps = self._begun_after = check_count("step", state["step"], 0)
        self._rows.clear()
        self._next = self.steps + (self._every or 1)

    def _finish(self, error: BaseException | None = None) -> None:
        self.closed = True
        atexit.unregister(self._at_exit)
        self.clock.close()
        self._expect_record(False)
        self._norms = None  # a monitor that is kept holds no optimizer
        if self._file is not None:
            self._write_logs()
            self._file.rest(self.steps, self._newest_metrics)
            no_error = PREEMPTION.left or (isinstance(error, SystemExit) and not error.code)
            text = "" if error is None or no_error else in_short(error)
            self._file.end(self.steps, text, left=PREEMPTION.left)
        self._callbacks.clear()

    def _newest_metrics(self) -> dict[str, float]:
        """This rank's metrics of the steps since the last record, or Keras's running means."""
        for callback in self._callbacks.values():
            if callback.newest_step == self.steps:
                return dict(callback.newest_metrics())
        return self._means.read()

    def _record(self) -> None:
        self._open()
        measured: dict[str, Any] = {
            "rows": [list(step) for step in self._rows],
            "metrics": self._means.read(),
            "load": self._load.read() if self._load else None,
            "optimizer": self._norms.read() if self._norms and self._norm_counts else {},
        }
        if seconds := sum(step.duration for step in self._rows):
            report(speed=round(sum(step.samples for step in self._rows) / seconds, 3))
        ranks = collectives.gather("Monitor.step", measured) if self._equal_steps else [measured]
        if (steps := self._every) is None:  # the same on all ranks, computed from the same values
            durations = [row[0] for each in ranks for row in each["rows"]]
            mean = sum(durations) / len(durations) if durations else _SECONDS
            steps = max(1, math.ceil(_SECONDS / max(mean, 1e-6)))
        self._next = self.steps + steps
        self._rows.clear()
        self._means.clear()
        if self._file is not None:
            self._write_logs()
            self._file.record(self.steps, self._epoch, ranks)

    def _open(self) -> None:
        """Gather the names of all hosts, and create the files; a collective, the first time."""
        if self._hosts:
            return
        self._hosts = [socket.gethostname()]
        runtime.init()
        atexit.register(self._at_exit)  # runs before what ``init`` has registered
        problem: HvkitError | None = None
        if runtime.rank() == 0:
            try:
                self._file = self._new_file()
            except HvkitError as error:
                problem = error
        # With a parameter server, ranks wait for each other only where the script does.
        if self._equal_steps:
            self._hosts = collectives.gather_or_raise("Monitor.step", problem, self._hosts[0])
        elif problem is not None:
            raise problem
        if runtime.local_rank() == 0:
            self._load = HostLoad()

    def _write_logs(self) -> None:
        """Write the start of the run, and what the script has logged since the last call."""
        if self._file is None:
            return
        self._file.begin(self._begun, self._begun_after, self._hosts)
        for each in self._logs:
            self._file.log(*each)
        self._logs.clear()


def _end_with_script(reference: weakref.ref[Monitor]) -> None:
    """Write the end of a monitor without a ``with`` block whose script ends with an error."""
    monitor, error = reference(), getattr(sys, "last_value", None)
    if monitor is not None and error not in (None, monitor._old_error):
        monitor._finish(error)
