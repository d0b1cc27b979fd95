"""Keras: what is recorded of ``fit``, its metrics, and the norms of gradients, on every backend."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvkit.frameworks.keras.backends import ON_TENSORFLOW, not_converted, number_of
from hvkit.frameworks.keras.fit import with_callbacks, with_names
from hvkit.frameworks.keras.optimizers import inner_optimizer, is_overwritten, parts_of
from hvkit.monitor.measurements import length_of

if TYPE_CHECKING:
    from hvkit.monitor.keras_on_tensorflow import NormsInGraphs
    from hvkit.monitor.monitor import Monitor


class FitRecorder(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the steps and epochs of ``fit``.

    A step is counted after each call of the function that ``fit`` makes of the model's step. With a
    callback for each batch, Keras would fetch all metrics in each step.
    """

    def __init__(self, monitor: Monitor, model: keras.Model) -> None:
        super().__init__()
        self.newest_step = -1  # the newest step in the means, by the monitor's count
        self._monitor = monitor
        self._logs: Any = None
        self._means = MeansOfSteps(model)
        # When ``fit`` began an epoch of which there is no batch yet.
        self._epoch_begun: float | None = None
        # Whether the function has been called: the first call compiles it.
        self._compiled = False
        measured = _measured_calls(monitor, model)
        make = model.make_train_function

        @functools.wraps(make)
        def make_counted(force: bool = False) -> None:
            before = model.train_function
            make(force=force)
            if (run := model.train_function) is before:
                return
            self._compiled = False

            @functools.wraps(run)
            def counted(*arguments: Any) -> Any:
                if monitor.closed:
                    return run(*arguments)
                asked = self._epoch_begun or time.time()
                result, steps, samples = measured(run, *arguments, asked=asked)
                if steps:
                    self._end(model, steps, samples, result)
                return result

            model.train_function = counted

        model.make_train_function = make_counted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._monitor.closed:
            self._monitor.begin_epoch(epoch)
            self._means.begin_epoch()
            # Next TensorFlow frees the last epoch's pipeline, which may take seconds, and makes
            # another.
            self._epoch_begun = time.time()

    def _end(self, model: keras.Model, steps: int, samples: float, result: Any) -> None:
        """Count the steps of a call, with this many samples in all; a collective at a record."""
        self._monitor.stride = steps
        self._logs = result
        values: Sequence[Any] = ()
        metrics: dict[str, float] = {}
        if keras.backend.backend() == "jax":
            # The metrics' variables get their values from the state only at the epoch's end.
            self._logs, (*_, values) = result
        if self._monitor.record_pending:
            state = zip(model.metrics_variables, values, strict=False)
            with keras.StatelessScope(state_mapping=list(state)):
                metrics = self.newest_metrics()
                self._means.begin_now()
        self._monitor.end_steps(steps, samples, metrics, timed=self._compiled)
        self.newest_step = self._monitor.steps
        self._compiled, self._epoch_begun = True, None

    def newest_metrics(self) -> dict[str, float]:
        """The metrics' means over the steps since the last record, or since the epoch began."""
        return self._means.read(self._logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record the metrics of all ranks that Keras reports, of training and validation."""
        if not self._monitor.closed:
            numbers = numbers_in(logs).items()
            self._monitor.log(**{f"epoch_{name}": value for name, value in numbers})

    def on_train_end(self, logs: Any = None) -> None:
        if not self._monitor.closed:
            self._monitor.flush(**self.newest_metrics())


def _measured_calls(monitor: Monitor, model: keras.Model) -> Callable[..., tuple[Any, int, float]]:
    """A function that calls what ``fit`` makes of a step, and measures it, on Keras's backend.

    It takes the function, its arguments, and when its first batch was asked for. It returns what
    the function returned, how many steps that took, and this rank's samples in them.
    """
    if ON_TENSORFLOW:
        from hvkit.monitor.keras_on_tensorflow import CallsOfGraphs

        return CallsOfGraphs(monitor.clock, model)

    def call_on_pytorch(run: Any, data: list[Any], asked: float) -> tuple[Any, int, float]:
        monitor.clock.loaded_until_now()
        return run(data), 1, length_of(data[0])

    def call_on_jax(
        run: Any, state: Any, batches: Iterator[Any], asked: float
    ) -> tuple[Any, int, float]:
        samples: list[float] = []
        return run(state, monitor.timed(batches, samples)), len(samples), sum(samples)

    return call_on_pytorch if keras.backend.backend() == "torch" else call_on_jax


class MeansOfSteps:
    """Means of Keras's metrics over some steps; Keras itself has the means of the epoch so far.

    A ``keras.metrics.Mean``, such as losses and accuracies, keeps a sum and a count. Subtracting an
    earlier state gives the sum and count since. Other metrics, such as an AUC, and the results of
    a ``train_step`` of the script's own stay as Keras has them.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        # Each mean's sum and count at the beginning, by the mean's id.
        self._before: dict[int, Any] = {}

    def begin_now(self) -> None:
        """Begin after the newest step."""
        means = _means_of(self._model())
        self._before = {id(mean): tuple(map(number_of, mean.variables)) for mean in means}

    def begin_epoch(self) -> None:
        """Begin with an epoch, for which Keras has reset its metrics."""
        self._before = {}

    def read(self, logs: Any) -> dict[str, float]:
        """The means since the beginning, by the names in ``logs``, which the newest step returned.

        Without steps in between, the means of the epoch so far.
        """
        model = self._model()
        if model is None or not isinstance(logs, dict):
            return numbers_in(logs)
        values = {id(each): (each, number_of(each)) for each in model.metrics_variables}
        for mean in _means_of(model):
            total, count = map(number_of, mean.variables)
            old_total, old_count = self._before.get(id(mean), (0.0, 0.0))
            if count > old_count:  # else it was reset
                since = (total - old_total, count - old_count)
                values |= {id(v): (v, n) for v, n in zip(mean.variables, since, strict=True)}
        convert = keras.ops.convert_to_tensor
        current = [(v, convert(value, v.dtype)) for v, value in values.values()]
        with keras.StatelessScope(state_mapping=current):
            results = model.get_metrics_result()
        return numbers_in(results if results.keys() == logs.keys() else logs)


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


def record_fit(callback: FitRecorder, model: keras.Model) -> None:
    """Have each ``fit`` of the model run this callback, before the script's callbacks."""
    fit = model.fit

    @functools.wraps(fit)
    def monitored_fit(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(fit, args, kwargs)
        given: Any = kwargs.get("callbacks")
        listed = isinstance(given, keras.callbacks.CallbackList)
        several = (given.callbacks if listed else given) or []
        several = several if isinstance(several, list | tuple) else [several]
        if callback not in several:
            several = [callback, *several]  # a checkpoint comes last, and holds the epoch
            kwargs["callbacks"] = with_callbacks(given, several, model) if listed else several
        return fit(*args, **kwargs)

    model.fit = monitored_fit


class UpdateNorms:
    """Measures the norm of the gradients in updates that end with a record."""

    def __init__(self, optimizers: Sequence[Any], norms: NormsOnPyTorch | NormsInGraphs) -> None:
        self._optimizers = [inner_optimizer(each) for each in optimizers]
        self._norms = norms
        self.expect = norms.expect
        for number, each in enumerate(self._optimizers):
            self._measure_in_apply(number, each)

    def read(self) -> dict[str, float]:
        """``learning_rate``, of the first optimizer, and ``gradient_norm`` of all updated here."""
        rate = parts_of(self._optimizers[0])[0].learning_rate
        values = {"learning_rate": float(keras.ops.convert_to_numpy(rate))}
        if norms := self._norms.read():
            values["gradient_norm"] = float(np.linalg.norm(norms))
        return values

    def _measure_in_apply(self, number: int, optimizer: Any) -> None:
        apply = optimizer.apply

        def measured(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            variables = trainable_variables or getattr(optimizer, "_trainable_variables", ())
            pairs = zip(grads, variables, strict=False)  # Keras itself says if there are too few
            # The gradient of an overwritten variable is its new value.
            found = [g for g, v in pairs if g is not None and not is_overwritten(v)]
            if found:
                self._norms.measure(number, found)
            apply(grads, trainable_variables)

        optimizer.apply = not_converted(measured)


class NormsOnPyTorch:
    """The norms of the gradients of optimizers in one step, by the optimizer's number."""

    def __init__(self) -> None:
        self._norms: dict[int, Any] = {}
        self._pending = False

    def expect(self, pending: bool) -> None:
        """Prepare for the next step; ``pending``: it ends with a record."""
        self._pending = pending
        self._norms.clear()

    def measure(self, number: int, gradients: list[Any]) -> None:
        if self._pending:
            import torch

            self._norms[number] = torch.nn.utils.get_total_norm(gradients)

    def read(self) -> list[float]:
        """Those of this step; none if it does not end with a record."""
        return [float(each) for each in self._norms.values()]


def norms_of(optimizers: Sequence[Any]) -> UpdateNorms | None:
    """Measures their gradients; None on JAX, whose compiled steps do not show them."""
    if ON_TENSORFLOW:
        from hvkit.monitor.keras_on_tensorflow import NormsInGraphs

        return UpdateNorms(optimizers, NormsInGraphs(len(optimizers)))
    if keras.backend.backend() == "torch":
        return UpdateNorms(optimizers, NormsOnPyTorch())
    return None


def numbers_in(logs: Any) -> dict[str, float]:
    """The numbers among the logs that Keras hands to callbacks."""
    found = {}
    for name, value in (logs or {}).items():
        is_tensor = keras.ops.is_tensor(value)
        array = keras.ops.convert_to_numpy(value) if is_tensor else np.asarray(value)
        if array.size == 1 and array.dtype.kind in "fiub":
            found[name] = float(array.reshape(()))
    return found
