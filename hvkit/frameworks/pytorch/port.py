"""The steps of ``distribute`` for PyTorch modules and their optimizers."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.frameworks.pytorch import buffers, refusals
from hvkit.frameworks.pytorch.buffers import RunningStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.divided_state.sharded import (
    OwnedParameters,
    OwnedState,
    gathered,
    refuse_joint_updates,
)
from hvkit.frameworks.pytorch.gradients.backward_passes import trace_steps
from hvkit.frameworks.pytorch.gradients.nonfinite import NonFinite
from hvkit.frameworks.pytorch.gradients.reducer import (
    GradientReducer,
    is_averaged,
    reducers_of,
    watch_passes,
)
from hvkit.frameworks.pytorch.gradients.reduction import Reduction
from hvkit.frameworks.pytorch.initial_state import broadcast_optimizer, broadcast_tensors, move_to
from hvkit.frameworks.pytorch.learning_rate import RateInStep
from hvkit.frameworks.pytorch.local_weights import (
    ParameterVectors,
    SteppedOptimizer,
    has_local_weights,
    round_sync,
)
from hvkit.frameworks.pytorch.optimizers import (
    has_step_length,
    named_in,
    named_parameters,
    stepping_in,
)
from hvkit.frameworks.pytorch.step_hooks import UpdateHooks, attach, follow_groups
from hvkit.host.run_reports import timeline_wanted
from hvkit.learning_rate import Multiplier
from hvkit.strategies import FullyShard, ParameterServer, ShardedOptimizer
from hvkit.strategies.strategy import Averaging, Rounds
from hvkit.sync.parameter_server_client import ServerSync
from hvkit.sync.port import Options, Record, Sync, warn_of_own_batches
from hvkit.sync.rounds import RoundSync

# Bytes of parameters after which it is worth looking for models that the script has dropped.
_MUCH = 1 << 25


class PyTorchPort:
    """Some modules and the optimizers that update them."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], options: Options
    ) -> None:
        for model in models:
            refusals.refuse_other_wrappers(model)
            refusals.refuse_changes_in_forward(model)
        self._make_deferred(models)
        self.models = list(models)
        self.model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.optimizers: list[Optimizer] = list(map(refusals.checked_optimizer, optimizers))
        self.options = options
        self._refuse_optimizers_of_others()
        self.parameters = named_parameters(self.models, self.optimizers)
        _refuse_distributed(self.parameters, several=len(models) > 1)
        self.multiplier = Multiplier()
        self.reducer: GradientReducer | None = None
        if options.batch_norm == "sync":
            buffers.batch_norm_of(self.model)
        strategy = options.strategy
        for each in self.optimizers:
            if options.on_nonfinite == "skip" and has_step_length(each):
                raise ValueError(
                    f'on_nonfinite="skip" cannot leave out a step of {type(each).__name__}, which '
                    'computes gradients itself: use on_nonfinite="stop"'
                )
            if isinstance(strategy, FullyShard | ShardedOptimizer):
                refuse_joint_updates(strategy, each)
        if isinstance(strategy, FullyShard):
            refusals.refuse_what_cannot_be_divided(strategy, self.models, self.optimizers)
            if options.group.size > 1:  # before weights are sent: an old PyTorch is refused there
                from hvkit.frameworks.pytorch.divided_state import fully_shard  # noqa: F401
        for name, tensor in (self.parameters | self._named_buffers()).items():
            if not self._is_deferred(tensor):
                refusals.refuse_uninitialised(name, tensor)

    def _refuse_optimizers_of_others(self) -> None:
        refusals.refuse_optimizers_of_others(self.models, self.optimizers)

    def _make_deferred(self, models: Sequence[nn.Module]) -> None:
        """Make the weights of models that were built under ``hvkit.deferred_init``."""
        if any(t.is_meta for model in models for t in (*model.parameters(), *model.buffers())):
            from hvkit.frameworks.pytorch.model_parallel.init_recording import recording_of

            for recording in filter(None, map(recording_of, models)):
                recording.make_all()

    def _is_deferred(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor will be made when the model is divided."""
        return False

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return named_in(self.models, methodcaller("named_buffers"))

    def facts(self) -> list[str]:
        facts = []
        for kind, named in (("parameter", self.parameters), ("buffer", self._named_buffers())):
            for name, t in named.items():
                on = "" if t.device.type == "cpu" else f" on {t.device.type}"
                facts.append(f"{kind} {name}: shape {tuple(t.shape)}, {t.dtype}{on}")
        for each in self.optimizers:
            lengths = [len(group["params"]) for group in each.param_groups]
            facts.append(f"{type(each).__name__} with parameter groups of {lengths}")
        return facts

    def more_than_sgd(self) -> list[str]:
        return [
            type(each).__name__
            for each in self.optimizers
            if not isinstance(each, torch.optim.SGD)
            or any(group["momentum"] for group in each.param_groups)
        ]

    def synchronise(self) -> None:
        _free_dropped_models(sum(p.nbytes for p in self.parameters.values()))
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            move_to(device, self.model, self.optimizers, self.parameters.values())
        group = self.options.group
        broadcast_tensors([*self.parameters.values(), *self.model.buffers()], group)
        for optimizer in self.optimizers:
            broadcast_optimizer(optimizer, group)

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        self.multiplier = multiplier
        return [
            (
                float(lr.detach() if isinstance(lr, torch.Tensor) else lr),
                None if has_step_length(each) else multiplier,
            )
            for each in self.optimizers
            for group in each.param_groups
            # A scheduler that warms up has set the rate to 0, and remembers the user's.
            if (lr := group.get("initial_lr", group.get("lr"))) is not None
        ]

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        self._synchronise_batch_norm()
        name = self.options.group.numbered("hvkit")
        statistics = self._averaged_statistics(self.model)
        hooks = {each: UpdateHooks() for each in self.optimizers}
        records: list[tuple[Any, Record]] = []
        sync: Sync | None = None
        if isinstance(strategy := self.options.strategy, FullyShard):
            from hvkit.frameworks.pytorch.divided_state.fully_shard import DividedModels

            # A proxy: records must not lead to the models, whose hooks keep the object.
            divided: Any = weakref.proxy(
                DividedModels(strategy, self.models, hooks, name, statistics)
            )
            for number, model in enumerate(self.models):
                gather = functools.partial(DividedModels.gathered, divided, f"{number}.")
                records.append((model, Record(gathered=gather)))
        else:
            sync = self._keep_weights_in_step(hooks, name, statistics)
        if isinstance(strategy, ShardedOptimizer):
            owned = OwnedParameters(strategy, name, self.options.group)
            for optimizer, around in hooks.items():
                OwnedState(owned, optimizer, around)
        in_parts = isinstance(strategy, FullyShard | ShardedOptimizer)
        return records + self._attach(hooks, divided=in_parts), sync

    def average_in_passes(self) -> tuple[GradientReducer, Sync | None]:
        """Keep in step by the reducer's ``begin_pass`` and ``end_pass``, which the caller calls."""
        hooks = {each: UpdateHooks() for each in self.optimizers}
        statistics = self._averaged_statistics(self.model)
        name = self.options.group.numbered("hvkit")
        sync = self._keep_weights_in_step(hooks, name, statistics, follows_passes=False)
        self._attach(hooks)
        assert self.reducer is not None
        return self.reducer, sync

    def _attach(
        self, hooks: Mapping[Optimizer, UpdateHooks], *, divided: bool = False
    ) -> list[tuple[Any, Record]]:
        """Call hooks, which have all features but those inside updates, around the steps."""
        records: list[tuple[Any, Record]] = []
        for optimizer, around in hooks.items():
            rate = None
            if not (self.multiplier.changes_nothing or has_step_length(optimizer)):
                rate = RateInStep(self.multiplier, around)
            if timeline_wanted():
                watch_passes()
                trace_steps(around)
            stepping = stepping_in(optimizer)
            refusals.refuse_other_optimizers(stepping, is_distributed_parameter)
            for each in stepping:
                attach(each, around)
            gather = functools.partial(gathered, weakref.proxy(optimizer)) if divided else None
            records.append((optimizer, Record(warmup=rate, gathered=gather)))
        return records

    def _keep_weights_in_step(
        self,
        hooks: Mapping[Optimizer, UpdateHooks],
        name: str,
        statistics: RunningStatistics | None,
        *,
        follows_passes: bool = True,
    ) -> Sync | None:
        """Keep the parameters in step, by hooks or by the caller's calls of the reducer."""
        options, group = self.options, self.options.group
        learnt = functools.partial(buffers.compared_of, self.models)
        checks = Checks(self.parameters, self.optimizers, options, name, learnt)
        worker: GradientReducer | RoundSync | ServerSync
        if isinstance(strategy := options.strategy, Rounds | ParameterServer):
            weights = ParameterVectors(self.parameters.values(), checks, statistics)
            if isinstance(strategy, Rounds):
                worker = round_sync(strategy, weights, name, options.compression)
            else:
                worker = ServerSync(strategy, weights, name)
        else:
            assert isinstance(strategy, Averaging)
            # In a mesh, ``NonFiniteInMesh`` looks at the gradients of all ranks.
            action = "ignore" if options.mesh else options.on_nonfinite
            nonfinite = None if action == "ignore" else NonFinite(action, self.model, checks)
            reduction = Reduction(checks, strategy, options.compression, statistics, nonfinite)
            parameters = self.parameters.values()
            layers = refusals.sparse_layers(self.model).values()
            sparse = {each.weight for each in layers} & set(parameters)
            worker = self.reducer = GradientReducer(
                parameters, sparse, reduction, follows_passes=follows_passes
            )
        firsts = [p for model in self.models for p in itertools.islice(model.parameters(), 1)]
        _keep_as_long_as(firsts or itertools.islice(self.parameters.values(), 1), worker)
        for optimizer, around in hooks.items():
            stepping = stepping_in(optimizer)
            adopt = follow_groups(stepping, worker, group)
            if isinstance(worker, GradientReducer):
                worker.watch(stepping, around, adopt)
            else:
                worker.watch(SteppedOptimizer(stepping, around, weights), adopt)
        return worker.sync if isinstance(worker, GradientReducer) else worker

    def _synchronise_batch_norm(self) -> None:
        group, strategy = self.options.group, self.options.strategy
        if self.options.batch_norm == "sync":
            buffers.synchronise_batch_norm(buffers.batch_norm_of(self.model), group)
        elif self.options.batch_norm == "average":
            layers = buffers.made_synchronised(self.model)
            if isinstance(strategy, Averaging):
                buffers.synchronise_batch_norm(layers, group)
            elif layers and not isinstance(strategy, FullyShard):  # which leaves it to PyTorch
                warn_of_own_batches("SyncBatchNorm layers", strategy)

    def _averaged_statistics(self, model: nn.Module) -> RunningStatistics | None:
        statistics = RunningStatistics(model)
        wanted = self.options.batch_norm != "local" and statistics.length > 0
        return statistics if wanted else None


_bytes_not_looked_for = 0


def _free_dropped_models(size: int) -> None:
    """Free earlier models that the script has dropped, once they are large; ``size`` is in bytes.

    Each is a cycle of few objects with much memory, which Python's collector would leave for long.
    """
    global _bytes_not_looked_for
    if _bytes_not_looked_for > _MUCH:
        gc.collect()
        _bytes_not_looked_for = 0
    _bytes_not_looked_for += size


def _keep_as_long_as(parameters: Iterable[Any], kept: object) -> None:
    """Let an object live as long as any of these parameters, also without the optimizers.

    Pickles and copies leave out the dict of hooks, and the garbage collector sees it.
    """
    for p in parameters:
        if p._backward_hooks is None:
            p._backward_hooks = OrderedDict()
        vars(p._backward_hooks).setdefault("_hvkit", []).append(kept)


def reduce_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Average the gradients of the models with these parameters; return whether there are any."""
    for reducer in reducers_of(parameters):
        reducer.reduce()
    return any(map(is_distributed_parameter, parameters))


_IS_DISTRIBUTED = is_averaged, has_local_weights, refusals.is_divided, refusals.is_in_mesh


def is_distributed_parameter(parameter: torch.Tensor) -> bool:
    """Whether a model that was passed to ``distribute`` has this parameter."""
    return any(each(parameter) for each in _IS_DISTRIBUTED)


def watch_updates() -> None:
    """Look at each step of an optimizer that was not passed to ``distribute``."""
    refusals.watch_steps(is_distributed_parameter)


def _refuse_distributed(parameters: Mapping[str, torch.Tensor], *, several: bool) -> None:
    """Raise if an earlier call got one of the parameters, with another model."""
    for name, p in parameters.items():
        if is_distributed_parameter(p):
            part = name if "optimizer" in name or several else f"{name} of this model"
            raise ValueError(
                f"parameter {part} was passed to hvkit.distribute before, with another model: pass "
                "models that share parameters or an optimizer in one call, "
                "hvkit.distribute([encoder, decoder], [first, second])"
            )
