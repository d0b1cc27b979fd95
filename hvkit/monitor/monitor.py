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
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from hvkit import runtime
from hvkit.argument_checks import advise_on_extra_arguments, check_count, check_path
from hvkit.communication import collectives
from hvkit.errors import HvkitError
from hvkit.host.run_reports import report
from hvkit.log import logger
from hvkit.monitor.host_load import HostLoad
from hvkit.monitor.records import Means, detached, length_of, of_whole_model
from hvkit.monitor.run_file import RunFile
from hvkit.monitor.step_times import Step, StepClock
from hvkit.monitor.writers import Hook, Writers
from hvkit.registry import (
    JAX,
    KERAS_ON_JAX,
    KERAS_ON_TENSORFLOW,
    are_of_pytorch,
    framework_of,
    keras_here,
)
from hvkit.sync.nonfinite import skipped_steps
from hvkit.watch.calls import named
from hvkit.watch.preemption import PREEMPTION
from hvkit.watch.spans import DATA, mark
from hvkit.wording import in_short

if TYPE_CHECKING:
    import keras

    from hvkit.mesh import MeshPosition

Batch = TypeVar("Batch")

# Without ``every``, seconds between two records, about.
_SECONDS = 1.0
# Steps before the first record, which shows how long steps take.
_FIRST = 1


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
        folder: of this run; made by rank 0.
        every: record after so many steps. None: about once a second.
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
        self.folder = check_path(
            "folder",
            folder,
            'Monitor("runs/a", every=5) makes a record every 5 steps',
        )
        self._every = None if every is None else check_count("every", every)
        self._tensorboard = tensorboard
        self._hook = hook
        self.stride = 1
        self._clock = StepClock()
        self._step = self._begun_after = 0
        self._begun = time.time()
        self._next = self._every or _FIRST
        self._rows: list[Step] = []
        self._means = Means()
        self._samples = 0.0
        self._epoch: int | None = None
        self._opened = False
        # Of rank 0.
        self._file: RunFile | None = None
        # Numbers that the script has logged before the file was opened.
        self._logs: list[tuple[int, float, dict[str, float]]] = []
        self._callbacks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._load: HostLoad | None = None
        self._gradients: Any = None
        self._equal_steps = True
        # How many ranks compute on the same samples; whether this rank's gradients are no copies.
        self._together, self._counts = 1, True
        self._skipped = skipped_steps.number
        self.closed = False
        # In a notebook, the error of an earlier cell.
        self._old_error = getattr(sys, "last_value", None)
        self._at_exit = functools.partial(_end_with_script, weakref.ref(self))

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``data``; the time to load each counts as data.

        A step begins when the last one has ended, or with the first batch. ``step`` takes the
        length of the batch's first array or tensor for its number of samples.
        """
        self._clock.begin()
        iterator = iter(data)
        while True:
            begun = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            ended = time.monotonic()
            self._clock.loaded(ended - begun)
            mark(DATA, begun, ended)
            self._samples += self.samples_in(batch)
            yield batch

    def samples_in(self, batch: Any) -> float:
        """This rank's samples in a batch, also in one that belongs to all ranks."""
        return length_of(batch, runtime.size() // self._together)

    def loaded(self) -> None:
        """Count what has passed since the last step as loading a batch."""
        self._clock.loaded_until_now()

    @named("Monitor.step")
    def step(self, *, samples: float | None = None, **metrics: Any) -> None:
        """End a step, after the optimizer's.

        At a record, which comes after the same step on all ranks, this is a collective.

        Args:
            samples: in this rank's batch; by default, those that ``batches`` has counted.
            **metrics: numbers or tensors with one value, such as this rank's loss.

        Raises:
            TypeError: a metric is no number.
            ValueError: its name is one of hvkit's own, or the monitor is closed.
            RankLostError: another rank has ended, or waits in another call.
        """
        self._require_open()
        if self._gradients is not None:
            self._clock.blocked(self._gradients.blocked())
        counted = self._samples if samples is None else float(samples)
        if skipped_steps.number > self._skipped:  # a loss without a step, and probably NaN
            self._skipped, metrics = skipped_steps.number, {}
        if self.record_pending:  # a GPU may still be at work: wait for it inside the step
            metrics = {name: float(detached(name, value)) for name, value in metrics.items()}
        self.add_step(self._clock.end(counted), metrics)

    def add_step(self, step: Step | None, metrics: Mapping[str, Any]) -> bool:
        """Count a step that another clock has timed; return whether it ended with a record.

        A collective at a record.

        Args:
            step: None if its time is not meaningful.
            metrics: as for ``step``.
        """
        self._samples = 0.0
        self._step += 1
        for name, value in metrics.items():
            self._means.add(name, value)
        recorded = self._step >= self._next
        if recorded:
            # Else the wait for a rank that is late after backward() would belong to no step.
            waited = self._wait_for_all()
            step = step and step.waiting(waited)
        if step is not None:
            self._rows.append(step._replace(samples=step.samples / self._together))
        if recorded:
            self._record()
            self._clock.begin()
        if self._gradients is not None:
            self._gradients.expect(self.record_pending)
        return recorded

    @property
    def steps(self) -> int:
        """How many steps the run has taken."""
        return self._step

    @property
    def record_pending(self) -> bool:
        """Whether the current step ends with a record."""
        return not self.closed and self._step + self.stride >= self._next

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
            self._logs.append((self._step, time.time(), numbers))
            self._write_logs()

    def begin_epoch(self, epoch: int) -> None:
        """Begin a pass over the data; the time since the last step belongs to no step."""
        self._epoch = epoch
        self._clock.begin()

    def callback(self, model: keras.Model) -> keras.callbacks.Callback:
        """The callback for ``fit`` of this model, which records every step."""
        if model not in self._callbacks:
            fit_callback, _ = _classes_for_keras()
            self._callbacks[model] = fit_callback(self, model)
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

        Args:
            models: the models that are trained together.
            optimizers: the optimizers that update them.
            equal_steps: whether all ranks take equally many steps.
            position: of this rank in the mesh that divides the models, if any.

        Raises:
            ValueError: other models were attached before, or the monitor is closed.
            HvkitError: rank 0 cannot write into the folder; on every rank.
        """
        self._require_open()
        if self._gradients is not None:
            raise ValueError(
                "this monitor was passed to hvkit.distribute before: pass it with one model, or a "
                "list of models that train together, and make another one, with a folder of its "
                "own, for each further call"
            )
        self._equal_steps = equal_steps
        if position is not None:
            self._together = len(position.members("pipeline", "tensor"))
            self._counts = position.along("data") == 0
        self._open()
        gradients: Any = None
        framework = framework_of(models[0])
        if framework is JAX:
            return  # whose compiled steps show neither
        if framework and framework.package == "keras":
            if position is None:
                self._counts = runtime.rank() == 0
            from hvkit.monitor.keras import record_fit

            _, gradients = _classes_for_keras()
            for model in models:
                record_fit(self, model)
        if are_of_pytorch(optimizers):
            from hvkit.monitor.pytorch import Gradients as gradients
        if gradients is not None:
            self._gradients = gradients(self, optimizers)

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
        if self._gradients is not None:
            self._gradients.expect(False)  # these steps have measured no norm
        self._record()
        if self._gradients is not None:
            self._gradients.expect(self.record_pending)
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

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(
                f"this monitor of {self.folder} is closed: use it inside its with block"
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        together = PREEMPTION.left and self._equal_steps  # all ranks leave after SIGTERM
        if error is None or together:
            self.close()
        elif not self.closed:
            self._finish(error)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint saves: how many steps the run has taken."""
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count steps from a state of ``state_dict``."""
        self._step = self._begun_after = check_count("step", state["step"], 0)
        self._rows.clear()
        self._next = self._step + (self._every or _FIRST)

    def _finish(self, error: BaseException | None = None) -> None:
        self.closed = True
        atexit.unregister(self._at_exit)
        self._clock.close()
        if self._gradients is not None:
            self._gradients.expect(False)
            self._gradients = None  # a monitor that is kept holds no optimizer
        if self._file is not None:
            self._write_logs()
            self._file.rest(self._step, self._newest_metrics)
            well = PREEMPTION.left or (isinstance(error, SystemExit) and not error.code)
            text = "" if error is None or well else in_short(error)
            self._file.end(self._step, text, left=PREEMPTION.left)
        self._callbacks.clear()

    def _newest_metrics(self) -> dict[str, float]:
        """This rank's metrics of the steps since the last record, or Keras's running means."""
        for callback in self._callbacks.values():
            if callback.newest_step == self._step:
                return dict(callback.newest_metrics())
        return self._means.read()

    def _wait_for_all(self) -> float:
        """Wait for all ranks; return for how many seconds."""
        if not self._equal_steps or runtime.size() == 1:
            return 0.0
        begun = time.monotonic()
        collectives.gather("Monitor.step", None)
        return time.monotonic() - begun

    def _record(self) -> None:
        self._open()
        mine: dict[str, Any] = {
            "rows": [list(step) for step in self._rows],
            "metrics": self._means.read(),
            "load": self._load.read() if self._load else None,
            "optimizer": self._gradients.read() if self._gradients and self._counts else {},
        }
        if took := sum(step.duration for step in self._rows):
            report(speed=round(sum(step.samples for step in self._rows) / took, 3))
        everyone = collectives.gather("Monitor.step", mine) if self._equal_steps else [mine]
        self._pace(everyone)
        self._rows.clear()
        self._means.clear()
        if self._file is not None:
            self._write_logs()
            optimizer = of_whole_model([each["optimizer"] for each in everyone])
            self._file.record(self._step, self._epoch, everyone, optimizer)

    def _open(self) -> None:
        """Gather the names of all hosts, and create the files; a collective, the first time."""
        if self._opened:
            return
        self._opened = True
        runtime.init()
        atexit.register(self._at_exit)  # runs before what ``init`` has registered
        problem: Exception | None = None
        writers = None
        if runtime.rank() == 0:
            try:
                writers = Writers(self.folder, self._tensorboard, self._hook)
            except OSError as error:
                problem = HvkitError(
                    f"the monitor cannot write into {self.folder} ({error.strerror}): name a "
                    "folder that rank 0 can make"
                )
            except ModuleNotFoundError as error:
                problem = HvkitError(str(error))
        hosts = [socket.gethostname()]
        # With a parameter server, ranks wait for each other only where the script does.
        if self._equal_steps:
            hosts = collectives.share("Monitor.step", problem, hosts[0])
        elif problem is not None:
            raise problem
        if writers is not None:
            self._file = RunFile(hosts, writers)
        if runtime.local_rank() == 0:
            self._load = HostLoad()

    def _write_logs(self) -> None:
        """Write the start of the run, and what the script has logged since the last call."""
        if self._file is None:
            return
        self._file.begin(self._begun, self._begun_after)
        for each in self._logs:
            self._file.log(*each)
        self._logs.clear()

    def _pace(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Choose the step of the next record; all ranks compute it from the same values."""
        every = self._every
        if every is None:
            took = [row[0] for each in everyone for row in each["rows"]]
            mean = sum(took) / len(took) if took else 1.0
            every = max(1, math.ceil(_SECONDS / max(mean, 1e-6)))
        self._next = self._step + every


def _end_with_script(reference: weakref.ref[Monitor]) -> None:
    """Write the end of a monitor without a ``with`` block whose script ends with an error."""
    monitor, error = reference(), getattr(sys, "last_value", None)
    if monitor is not None and error not in (None, monitor._old_error):
        monitor._finish(error)


def _classes_for_keras() -> tuple[Any, Any]:
    """The callback for ``fit``, and the class that measures gradients, for the backend of Keras.

    On JAX there is none of the latter, since compiled steps do not show them.
    """
    if keras_here() is KERAS_ON_JAX:
        from hvkit.monitor.keras_on_jax import JitStepRecorder

        return JitStepRecorder, None
    if keras_here() is KERAS_ON_TENSORFLOW:
        from hvkit.monitor.keras_graphs import FitCallback, Gradients

        return FitCallback, Gradients
    from hvkit.monitor.keras_on_pytorch import TrainStepRecorder, UpdateNorms

    return TrainStepRecorder, UpdateNorms
