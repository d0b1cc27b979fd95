"""Horovod's ``DistributedOptimizer`` for optimizers of Keras 3.

Horovod averages in methods that optimizers of Keras 2 call between the gradients and the update.
Optimizers of Keras 3 have only ``apply``, so the gradients become means there, as under
``hvkit.distribute``: in ``fit``, in ``apply_gradients`` and in custom loops.

The optimizer stays the object it was, so a file that Keras saves of it loads without Horovod.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.optimizers import inner_optimizer, share_scale
from hvkit.frameworks.keras.refusals import is_averaged_by_horovod, note_averaged_by_horovod
from hvkit.frameworks.keras.tensorflow.averaged_updates import average_in_apply
from hvkit.frameworks.keras.tensorflow.wire import of_values, refuse_xla


def average_in_updates(
    optimizer: Any,
    allreduce_gradients: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    scale_local_gradients: bool,
    ranks: Callable[[], Any],
    lowest: Callable[[tf.Tensor], tf.Tensor],
) -> Any:
    """Make an optimizer reduce gradients over ranks before it uses them, and return it.

    ``apply`` updates once in ``backward_passes_per_step`` calls, with the sum of the gradients of
    all of them, or their mean (``average_aggregated_gradients``). Gradients of local variables stay
    on their rank, divided by the number of ranks with ``scale_local_gradients``. ``ranks`` returns
    that number, ``lowest`` the minimum over ranks.
    """
    # By id: Keras compares variables by their values.
    of_rank: dict[int, Any] = {}

    def register_local_var(variable: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        local_variable = backend_variable(variable)
        of_rank[id(local_variable)] = local_variable

    def average(
        gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any] | None = None
    ) -> list[Any]:
        plain = [backend_variable(v) for v in variables]
        shared = [i for i, v in enumerate(plain) if id(v) not in of_rank]
        found = allreduce_gradients([gradients[i] for i in shared], [plain[i] for i in shared])
        means = list(gradients)
        for i, mean in zip(shared, found, strict=True):
            means[i] = mean
        if scale_local_gradients:
            for i, v in enumerate(plain):
                if id(v) in of_rank:
                    means[i] = of_values(lambda g: g / tf.cast(ranks(), g.dtype), means[i])
        return means

    def finite_on_all(finite: tf.Tensor, _: Any) -> tf.Tensor:
        refuse_xla("the check for overflows in the optimizer")
        return tf.cast(lowest(tf.cast(finite, tf.int32)), tf.bool)

    def average_in(optimizer: Any) -> Any:
        inner = inner_optimizer(optimizer)
        if backward_passes_per_step > 1 and inner.gradient_accumulation_steps:
            raise ValueError(
                f"backward_passes_per_step={backward_passes_per_step}, but the optimizer has "
                f"gradient_accumulation_steps={inner.gradient_accumulation_steps}: leave one of "
                "the two out"
            )
        note_averaged_by_horovod(inner)
        average_in_apply(inner, average, lambda _: None)
        if backward_passes_per_step > 1:
            _accumulate(inner, backward_passes_per_step, average_aggregated_gradients)
        share_scale(inner, finite_on_all)
        inner.register_local_var = optimizer.register_local_var = register_local_var
        for each in (inner,) if optimizer is inner else (inner, optimizer):
            _average_in_copies(each, lambda other: other if averages(other) else average_in(other))
        return optimizer

    return average_in(optimizer)


class AveragingConfig(dict[str, Any]):
    """The config of an optimizer that averages, and so do those made from it or its copies.

    One that is pickled, or that ``{**config}`` makes, is a plain dict.
    """

    def __init__(self, config: Mapping[str, Any], average: Callable[[Any], Any]) -> None:
        super().__init__(config)
        self.average = average

    def copy(self) -> AveragingConfig:
        return AveragingConfig(self, self.average)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> AveragingConfig:
        return AveragingConfig(copy.deepcopy(dict(self), memo), self.average)

    def __or__(self, other: Any) -> Any:
        return AveragingConfig({**self, **other}, self.average)

    def __ror__(self, other: Any) -> Any:
        return AveragingConfig({**other, **self}, self.average)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Averaging:
    """Averages in copies, but not in pickles, which another program may read."""

    def __init__(self, average: Callable[[Any], Any]) -> None:
        self._average = average

    def __call__(self, rebuild: Callable[..., Any], *args: Any) -> Any:
        return self._average(rebuild(*args))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Averaging:
        return self

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "an optimizer of hvd.DistributedOptimizer cannot be pickled, since it would not "
            "average any more: pickle it before it is wrapped, and wrap it where it is loaded"
        )


# By an optimizer, the function that makes a copy of it average.
_averaging: WeakKeyDictionary[Any, _Averaging] = WeakKeyDictionary()


def _average_in_copies(optimizer: Any, average: Callable[[Any], Any]) -> None:
    """Make the copies of an optimizer average: by ``copy``, or from its config."""
    kind: Any = type(optimizer)
    if not hasattr(kind.from_config, "averages"):
        kind.from_config = classmethod(_averaging_if_asked(kind.from_config.__func__))

    def from_config(*args: Any, **kwargs: Any) -> Any:
        return average(kind.from_config(*args, **kwargs))

    optimizer.get_config = lambda: AveragingConfig(kind.get_config(optimizer), average)
    optimizer.from_config = from_config
    _averaging[optimizer] = _Averaging(average)
    copyreg.pickle(kind, _reduced)


def _averaging_if_asked(from_config: Callable[..., Any]) -> Callable[..., Any]:
    """A class's ``from_config``, which wraps what it makes of an ``AveragingConfig``."""

    @functools.wraps(from_config)
    def made_from(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        made = from_config(cls, config, *args, **kwargs)
        return config.average(made) if isinstance(config, AveragingConfig) else made

    made_from.averages = True  # type: ignore[attr-defined]
    return made_from


def _reduced(optimizer: Any) -> Any:
    rebuild, args, *rest = optimizer.__reduce_ex__(2)
    averaging = _averaging.get(optimizer)
    return (averaging, (rebuild, *args), *rest) if averaging else (rebuild, args, *rest)


def averages(optimizer: Any) -> bool:
    """Whether an optimizer of Keras 3, or the one inside it, reduces its gradients already."""
    return is_averaged_by_horovod(inner_optimizer(optimizer))


def _accumulate(optimizer: Any, passes: int, mean: bool) -> None:
    """Make ``optimizer.apply`` update once in some calls, with the gradients of all of them.

    Not by Keras's own accumulation: its sums, which differ between ranks, would be variables of the
    optimizer, which scripts broadcast, and saved files would say how many calls there are.
    """
    apply = optimizer.apply
    with tf.init_scope(), tf.device("CPU:0"):
        calls = tf.Variable(0, dtype=tf.int64, trainable=False)
    # By a variable's id, with the variable, so that no other one gets its id.
    sums: dict[int, tuple[tf.Variable, tf.Variable]] = {}

    def sum_of(variable: Any) -> tf.Variable:
        if id(variable) not in sums:
            with tf.init_scope():
                zeros = tf.Variable(tf.zeros_like(variable), trainable=False)
                sums[id(variable)] = variable, zeros
        return sums[id(variable)][1]

    # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def accumulated_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        known = trainable_variables is None and optimizer.built
        variables = optimizer._trainable_variables if known else trainable_variables
        if not grads or variables is None:
            apply(grads, trainable_variables)
            return
        variables = list(variables)
        if not optimizer.built:  # what it makes cannot be made in a branch of a graph
            optimizer.build(variables)
        plain = [backend_variable(v) for v in variables]
        added = [
            sum_of(v).assign_add(g)
            for v, g in zip(plain, map(_dense, grads), strict=True)
            if g is not None
        ]

        def update() -> tf.Tensor:
            added_up = [sums[id(v)][1] if id(v) in sums else None for v in plain]
            totals = [None if each is None else each.read_value() for each in added_up]
            apply([of_values(lambda g: g / passes if mean else g, t) for t in totals], variables)
            with tf.control_dependencies([t for t in totals if t is not None]):
                for each in added_up:
                    if each is not None:
                        each.assign(tf.zeros_like(each))
            return tf.constant(True)

        with tf.control_dependencies(added):
            count = calls.assign_add(1)
        tf.cond(tf.equal(count % passes, 0), update, lambda: tf.constant(False))

    optimizer.apply = accumulated_apply


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)
