"""A Keras model on TensorFlow in a pipeline; averages in updates.

Tapes record what stages compute, and gradients are what ``tape.gradient`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.fit import FitState
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.on_tensorflow import KerasOnTensorFlowPort, timeline_callbacks
from hvkit.frameworks.keras.optimizers import share_scale, updating
from hvkit.frameworks.keras.pipeline.divided_model import PipelinePort
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.tensors import Gradients, MailboxChannel, Tensors
from hvkit.frameworks.keras.tensorflow.averaged_updates import average_in_apply, finite_on_all
from hvkit.frameworks.keras.tensorflow.wire import values_of
from hvkit.mesh import MeshOptions
from hvkit.pipeline.messages import Channel
from hvkit.runtime import all_ranks
from hvkit.strategies.strategy import Averaging
from hvkit.sync.port import Record, Sync


class TensorFlowTensors(Tensors):
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

    def recorded(self, run: Callable[[], Any], watched: Sequence[Any]) -> tuple[Any, Gradients]:
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
        return float(tf.norm(tf.cast(values_of(gradient), tf.float64)))

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


class KerasMeshPort(PipelinePort, KerasOnTensorFlowPort):
    tensors = TensorFlowTensors()

    def synchronise(self) -> None:
        super().synchronise()
        self._pending, self._optimizers_pending = [], False

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        strategy = self.options.strategy
        assert isinstance(strategy, Averaging)
        averages = self.group.size > 1
        if averages:
            self._samples = self._counts()
        for each in updating(self.optimizers):
            if averages:
                average_in_apply(each, self._average(strategy), self._before_update)
            # Whether gradients are finite on all ranks; those of other stages are norms here.
            agree = finite_on_all(self._name(), self.group)
            share_scale(each, agree if averages else lambda finite, _: finite)
        if averages:
            self._average_at_end = self._statistics_average(self._name())
        state = FitState(
            all_ranks(), self._end_epoch, averagers=self.averagers, watching=timeline_callbacks
        )
        records = self._attach(state)
        if self._samples:
            use_counts_of_all_ranks(self._whole, self._samples)
        return records, None

    def _take_part(self, pipelined: PipelinedModel) -> None:
        super()._take_part(pipelined)
        self._synchronised.update((id(backend_variable(w)), w) for w in self._whole.weights)
