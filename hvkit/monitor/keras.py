"""Keras: what is recorded of ``fit`` on every backend: metrics, epochs, means over steps."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvkit.frameworks.keras.backends import number_of
from hvkit.frameworks.keras.callbacks import with_callbacks
from hvkit.frameworks.keras.fit import with_names
from hvkit.monitor.step_times import Step

if TYPE_CHECKING:
    from hvkit.monitor.monitor import Monitor


class FitRecorder(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the epochs of ``fit``; a subclass counts its steps.

    Args:
        monitor: gets the steps.
        model: whose ``fit`` this is for.
    """

    def __init__(self, monitor: Monitor, model: keras.Model) -> None:
        super().__init__()
        self._monitor = monitor
        self._logs: Any = None
        self._means = MeansOfSteps(model)
        # The last step that is in the means, by the monitor's count.
        self.newest_step = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a pass over the training data."""
        if not self._monitor.closed:
            self._monitor.begin_epoch(epoch)
            self._means.begin_epoch()

    def add_steps(self, steps: int, step: Step | None, logs: Any) -> bool:
        """Count the steps of one call by ``fit``; a collective at a record.

        Args:
            steps: how many, more than one with ``steps_per_execution``.
            step: the mean of them; None if its time is not meaningful.
            logs: what the last one returned.

        Returns:
            Whether one of them ended with a record.
        """
        recorded = False
        with self.metrics_of(logs, steps) as metrics:
            for _ in range(steps):
                at_record = self._monitor.record_pending
                recorded |= self._monitor.add_step(step, metrics if at_record else {})
        return recorded

    @contextlib.contextmanager
    def metrics_of(self, logs: Any, steps: int = 1) -> Iterator[dict[str, float]]:
        """Around the monitor's count of these steps: its metrics, if one ends with a record.

        Args:
            logs: what the last step returned.
            steps: how many, more than one with ``steps_per_execution``.
        """
        self._monitor.stride, self._logs = steps, logs
        pending = self._monitor.record_pending
        yield self.newest_metrics() if pending else {}
        if pending:
            self._means.begin_now()
        self.newest_step = self._monitor.steps

    def newest_metrics(self) -> dict[str, float]:
        """The metrics' means over the steps since the last record, or since the epoch began."""
        return self._means.read(self._logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record what Keras reports of all ranks: its metrics, and those of the validation."""
        if self._monitor.closed:
            return
        self._monitor.log(**{f"epoch_{name}": value for name, value in numbers_in(logs).items()})

    def on_train_end(self, logs: Any = None) -> None:
        """Record the rest; a collective."""
        if not self._monitor.closed:
            self._monitor.flush(**self.newest_metrics())


class MeansOfSteps:
    """Means of Keras's metrics over some steps; Keras itself has those of the epoch so far.

    A ``keras.metrics.Mean``, such as losses and accuracies, keeps a sum and a count. Subtracting an
    earlier state gives those of the steps since. Other metrics, such as an AUC, and the results of
    a ``train_step`` of the script's own stay as Keras has them.

    Args:
        model: whose metrics these are.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        # By the id of a mean: its sum and count at the beginning.
        self._before: dict[int, Any] = {}
        # By the id of a variable: its value while ``fit`` holds that elsewhere.
        self.values: Mapping[int, Any] = {}

    def begin_now(self) -> None:
        """Begin after the newest step."""
        self._before = {
            id(mean): tuple(map(self._number_of, mean.variables))
            for mean in _means_of(self._model())
        }

    def begin_epoch(self) -> None:
        """Begin with an epoch, for which Keras has reset its metrics."""
        self._before = {}

    def read(self, logs: Any) -> dict[str, float]:
        """The means since the beginning, by the names in ``logs``, which the newest step returned.

        Without steps in between, those of the epoch so far.
        """
        model = self._model()
        if model is None or not isinstance(logs, dict):
            return numbers_in(logs)
        since = [
            (variable, _as_numpy(self.values[id(variable)]))
            for variable in model.metrics_variables
            if id(variable) in self.values
        ]
        for mean in _means_of(model):
            total, count = map(self._number_of, mean.variables)
            old_total, old_count = self._before.get(id(mean), (0.0, 0.0))
            if count > old_count:  # else it was reset
                total, count = total - old_total, count - old_count
            since += zip(mean.variables, (total, count), strict=True)
        convert = keras.ops.convert_to_tensor
        with keras.StatelessScope(state_mapping=[(v, convert(n, v.dtype)) for v, n in since]):
            results = model.get_metrics_result()
        return numbers_in(results if results.keys() == logs.keys() else logs)

    def _number_of(self, variable: Any) -> Any:
        value = self.values.get(id(variable))
        return number_of(variable) if value is None else _as_numpy(value)


def _means_of(model: Any) -> list[Any]:
    """The metrics of a model that are means, those inside others too."""
    found, left = [], list(model.metrics)
    while left:
        metric = left.pop()
        if isinstance(metric, keras.metrics.Mean) and len(metric.variables) == 2:
            found.append(metric)
        else:
            left += getattr(metric, "metrics", None) or []
    return found


def record_fit(monitor: Monitor, model: keras.Model) -> None:
    callback = monitor.callback(model)
    fit = model.fit

    @functools.wraps(fit)
    def monitored_fit(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(fit, args, kwargs)
        given = kwargs.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            if callback not in given.callbacks:
                kwargs["callbacks"] = with_callbacks(given, [callback, *given.callbacks], model)
        else:
            several = given if isinstance(given, list | tuple) else [given] if given else []
            own = [] if callback in several else [callback]
            kwargs["callbacks"] = [*own, *several]  # a checkpoint comes last, and holds the epoch
        return fit(*args, **kwargs)

    model.fit = monitored_fit


def numbers_in(logs: Any) -> dict[str, float]:
    """What Keras hands to callbacks, as far as it is numbers."""
    found = {}
    for name, value in (logs or {}).items():
        array = _as_numpy(value)
        if array.size == 1 and array.dtype.kind in "fiub":
            found[name] = float(array.reshape(()))
    return found


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any]
    array = keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else np.asarray(value)
    return array
