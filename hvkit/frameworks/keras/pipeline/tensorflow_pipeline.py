"""A Keras model on TensorFlow in a pipeline; averages in updates.

Tapes record what stages compute, and gradients are what ``tape.gradient`` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.gradients.averaged_updates import average_in_apply, finite_in
from hvkit.frameworks.keras.initial_state import JoinedModels
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.loss_scale import Agree, skip_together
from hvkit.frameworks.keras.on_tensorflow import KerasOnTensorFlowPort, timeline_callbacks
from hvkit.frameworks.keras.optimizers import updating
from hvkit.frameworks.keras.pipeline.divided_model import DividedModel, refuse_in_pipeline
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.tensors import MailboxChannel, Tensors
from hvkit.mesh import MeshOptions
from hvkit.pipeline.channel import Channel
from hvkit.strategies.strategy import Averaging
from hvkit.sync.port import Keeper, Options, Record


class TensorFlowTensors(Tensors):
    """TensorFlow, as the backend of Keras."""

    def channel(self, mesh: MeshOptions, name: str) -> Channel:
        return MailboxChannel(mesh.position.members("pipeline"), name)

    def tracer(self) -> str:
        return "" if tf.executing_eagerly() else "tf.function"

    def is_recording(self) -> bool:
        return bool(record.could_possibly_record())

    def is_dense(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor)

    def compiled(self, run: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
        made = tf.function(run, autograph=False, reduce_retracing=True)

        def run_unwatched(*args: Any) -> Any:
            with _unwatched(variables):
                return made(*args)

        return run_unwatched

    def recorded(
        self, run: Callable[[], Any], watched: Sequence[Any]
    ) -> tuple[Any, Callable[[Sequence[Any], Sequence[Any]], list[Any]]]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            results = run()

        def gradients(targets: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            return list(tape.gradient(list(targets), list(watched), output_gradients=list(given)))

        return results, gradients

    def connected(
        self,
        results: Sequence[Any],
        variables: Sequence[Any],
        backward: Callable[[Sequence[Any]], list[Any]],
    ) -> list[Any]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def operation(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            return [tf.identity(t) for t in results], lambda *given: backward(given)

        return list(operation(*(tf.convert_to_tensor(v._value) for v in variables)))

    def sum_of(self, a: Any, b: Any) -> Any:
        if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
            values = tf.concat([a.values, b.values], 0)
            indices = tf.concat([a.indices, b.indices], 0)
            return tf.IndexedSlices(values, indices, a.dense_shape)
        return tf.add_n([tf.convert_to_tensor(g) for g in (a, b)])

    def norm_of(self, gradient: Any) -> float:
        # As TensorFlow's and Keras's clipping computes it: without adding equal rows up.
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        return float(tf.norm(tf.cast(values, tf.float64)))

    def add_gradients(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        begin: Callable[[], Callable[[], None]],
    ) -> list[Any]:
        return list(gradients)  # a variable of TensorFlow holds none, and updates average them

    def remainder(self, variable: Any, total: Any) -> Any:
        return total

    def placeholder_of(self, variable: Any) -> Any:
        return tf.Variable(tf.zeros((0,), variable._dtype), trainable=variable.trainable)

    def set_value(self, variable: Any, values: Any) -> None:
        if not isinstance(values, tf.Variable):
            values = tf.Variable(values, trainable=variable.trainable)
        variable._value = values


@contextmanager
def _unwatched(variables: Sequence[Any]) -> Iterator[None]:
    """Keep tapes of the script from recording a stage, which has one of its own.

    A tape watches all variables that TensorFlow calls trainable. Under two tapes TensorFlow would
    prepare for second derivatives.
    """
    own = [v._value for v in variables]
    before = [v._trainable for v in own]
    for v in own:
        v._trainable = False
    try:
        yield
    finally:
        for v, trainable in zip(own, before, strict=True):
            v._trainable = trainable


class KerasMeshPort(KerasOnTensorFlowPort):
    """A Sequential or Functional model in a pipeline, and the optimizers that update it.

    The ranks of ``options.group`` hold the same layers, and average their gradients.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        refuse_in_pipeline(models, optimizers, options)
        super().__init__(models, optimizers, options)
        # Averages and comparisons cover this rank's part only, once it is known.
        self.model = JoinedModels([])
        self._divided = DividedModel(
            models[0], self.optimizers, options, TensorFlowTensors(), self._take_part
        )

    def synchronise(self) -> None:
        self._divided.synchronise()
        self._pending, self._optimizers_pending = [], False

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        group = self.options.group
        if group.size > 1:
            self._samples = self._counts()
        for each in updating(self.optimizers):
            self._average_in(each)
            skip_together(each, self._finite_on_all())
        wait = None
        if self.options.batch_norm == "average" and group.size > 1:
            wait = self._wait(self._name())
        end_epoch = functools.partial(self._end_epoch, wait)
        records = self._divided.attach(self.averagers, end_epoch, timeline_callbacks)
        if self._samples:
            use_counts_of_all_ranks(self.models[0], self._samples)
        return records, None

    def _take_part(self, pipelined: PipelinedModel) -> None:
        """Average and compare what this rank holds."""
        self.model.models = pipelined.stage.layers
        weights = self.models[0].weights
        self._synchronised.update((id(backend_variable(w)), w) for w in weights)

    def _average_in(self, optimizer: Any) -> None:
        if self.options.group.size == 1:
            return
        assert isinstance(self.options.strategy, Averaging)
        average_in_apply(optimizer, self._average(self.options.strategy), self._before_update)

    def _finite_on_all(self) -> Agree:
        """Whether gradients are finite on all ranks; those of other stages are norms here."""
        if self.options.group.size == 1:
            return lambda finite, _: finite
        return finite_in(self.options.group)
