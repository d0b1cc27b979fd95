"""The steps of ``distribute`` for Keras models and their optimizers that backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from keras.src.backend import in_stateless_scope

from hvkit.communication import collectives
from hvkit.frameworks.keras.buffers import compared_of
from hvkit.frameworks.keras.checks import require_same_weights
from hvkit.frameworks.keras.divided_state import (
    OptimizerShards,
    VariableSender,
    gathered,
    refuse_joint_updates,
)
from hvkit.frameworks.keras.initial_state import JoinedModels, has_weights
from hvkit.frameworks.keras.optimizers import (
    inner_optimizer,
    more_than_sgd,
    parts_of,
    scale_rates,
    settings_of,
    updating,
)
from hvkit.frameworks.keras.refusals import refuse_optimizers, refuse_other_optimizers
from hvkit.learning_rate import Multiplier
from hvkit.strategies import ShardedOptimizer
from hvkit.sync.fingerprints import warn_of_unlike
from hvkit.sync.port import Options, Record


class KerasPort:
    """The steps of ``distribute``. ``model`` joins all models; ``inner`` scale no loss."""

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self.options, self.group = options, options.group
        refuse_optimizers(self.models, self.optimizers, options)
        self._divides_state = isinstance(options.strategy, ShardedOptimizer)
        if isinstance(options.strategy, ShardedOptimizer):
            for each in updating(self.optimizers):
                refuse_joint_updates(options.strategy, each)
        self.model = models[0] if len(models) == 1 else JoinedModels(models)
        self.inner = [inner_optimizer(each) for each in self.optimizers]

    def facts(self) -> list[str]:
        return [settings_of(each) for each in self.optimizers]

    def more_than_sgd(self) -> list[str]:
        return more_than_sgd(self.optimizers)

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        return scale_rates(updating(self.optimizers), multiplier)

    def _let_update(self, model: Any) -> None:
        """Let only these optimizers update a model, in steps that no compiler has made."""
        allowed = [o for each in self.inner for o in (each, *parts_of(each))]
        refuse_other_optimizers(model, allowed)
        # Keras makes its functions again, with present vocabularies, and without a compiler.
        model.supports_jit = False
        if getattr(model, "compiled", False):
            model.jit_compile = False
        model.train_function = model.test_function = model.predict_function = None

    def _have_weights(self) -> list[bool]:
        """Whether each model has weights on all ranks; a collective."""
        local = list(map(has_weights, self.models))
        by_rank = collectives.gather("distribute", local, self.group)
        return list(map(all, zip(*by_rank, strict=True)))

    def _in_first_call(self, model: Any, act: Callable[[Any], None]) -> None:
        """Do something in a model's first call, after it has built itself, before it computes."""
        call = model.call

        def act_and_call(*args: Any, **kwargs: Any) -> Any:
            if not in_stateless_scope() and has_weights(model):
                del model.call
                act(model)
            return call(*args, **kwargs)

        model.call = act_and_call

    def _divide_state(self, sender: Callable[[], VariableSender]) -> None:
        strategy = self.options.strategy
        if isinstance(strategy, ShardedOptimizer):
            owned_bytes = [0] * self.group.size
            for each in updating(self.optimizers):
                OptimizerShards(strategy, each, owned_bytes, sender(), self.group)

    def _records(self) -> list[tuple[Any, Record]]:
        return [(each, self._record(each)) for each in self.optimizers]

    def _record(self, optimizer: Any) -> Record:
        if not self._divides_state:
            return Record()
        weak = ref(optimizer)  # the record lives as long as the optimizer
        return Record(gathered=lambda: gathered(weak()))

    def _compare(self) -> None:
        require_same_weights("fit", self.model, self.optimizers, self.group)
        warn_of_unlike("fit", *compared_of(self.model), self.group)
