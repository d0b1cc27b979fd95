"""Lightning's ``Trainer`` and ``Fabric`` on hvkit's ranks: ``Trainer(strategy="hvkit")``.

A strategy of Lightning answers what its loops ask of ranks: who writes, who reads which samples,
and what numbers are over all ranks. hvkit averages gradients as in a loop of the script's own.
Lightning exists as two packages, ``lightning`` and ``pytorch_lightning``, with classes of their
own: each gets strategies below its own base class.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import hvkit
from hvkit.communication.collectives import require_equal
from hvkit.data.pytorch_loader import LoaderLike, ShardedLoader
from hvkit.frameworks.pytorch import torch_distributed
from hvkit.frameworks.pytorch.gradients.backward_passes import last_batch
from hvkit.host.rank_variables import launched
from hvkit.integrations.lightning_fits import (
    ClosureFirst,
    first_fits,
    load_position,
    model_inside,
    most_batches,
    renewed,
)
from hvkit.integrations.ranks import (
    BatchRanks,
    Mixin,
    accumulating,
    check_use,
    divides_weights,
    part_of,
    same_weights,
    whole_state,
)
from hvkit.main_rank import warn_once
from hvkit.models import settled


class _Ranks(Mixin):  # type: ignore[misc]
    """What both strategies answer; a mixin before Lightning's ``ParallelStrategy``."""

    is_distributed = True

    def __init__(
        self,
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        **options: Any,
    ) -> None:
        precision = {n: options.pop(n) for n in ("precision", "precision_plugin") if n in options}
        check_use(self.package.split(".")[0], options)
        hvkit.init("torch")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.environment_class(),
            checkpoint_io=checkpoint_io,
            **precision,
        )
        self._options = options
        self._ranks = BatchRanks(options.get("mesh"))
        self._trained: tuple[Any, ...] = ()  # the model and the optimizers that hvkit has got
        self.num_nodes = 1  # Lightning sets the user's; the launcher knows better

    @property
    def root_device(self) -> torch.device:
        devices: Any = self.parallel_devices
        kind = devices[0].type if devices else "cpu"
        return torch.device(f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        return {"num_replicas": self._ranks.batches, "rank": self._ranks.batch}

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        _refuse_group("all_gather", group)
        parts = hvkit.allgather(tensor if sync_grads else tensor.detach().cpu())
        return torch.stack([each.to(tensor.device) for each in parts])

    def barrier(self, *_: Any, **__: Any) -> None:
        hvkit.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvkit.broadcast(obj, root=src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return not hvkit.any_rank(not decision) if all else hvkit.any_rank(decision)

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        _refuse_group("reduce", group)
        op = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        return self._ranks.reduce(tensor, "mean" if op == "avg" else op)

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def _distribute(
        self, module: torch.nn.Module, optimizers: list[Any], options: dict[str, Any]
    ) -> list[Any]:
        """Distribute a module once; a later ``fit`` goes on with the first one's optimizers."""
        model = module if options.get("mesh") is None else model_inside(module)
        if module in first_fits:
            first, first_options = first_fits[module]
            if first_options != self._options:
                raise ValueError(
                    f"this module was fitted with {first_options or 'no options'} before, and now "
                    f"with {self._options or 'none'}: keep them, or fit a new module with its "
                    "weights"
                )
            optimizers = renewed(first, optimizers)
        else:
            hvkit.distribute(model, optimizers, **options)
            first_fits[module] = optimizers, self._options
        self._trained = model, *optimizers
        return optimizers

    @property
    def _is_divided(self) -> bool:
        """Whether ranks hold parts of the weights, which stay where they are."""
        return bool(self._trained) and divides_weights(self._options)

    def _state(self, thing: Any) -> dict[str, Any]:
        return whole_state(thing, self._trained)


class _ForTrainer(_Ranks):
    """The strategy of ``Trainer``; its options are those of ``hvkit.distribute``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._shards_loaders: bool | None = None  # whether the user wants it
        self._blocked = False  # within ``block_backward_sync``
        self._in_step = False  # whether ``log`` reduces nothing now
        self._in_log = False
        self._names: dict[str, None] = {}  # of what was logged since ranks compared it
        # Whether each rank evaluates all samples; None before a loader is known.
        self._evaluates_whole: bool | None = None
        self._evaluation = ExitStack()

    def set_world_ranks(self) -> None:
        """Let rank 0 alone print, log and write; the Trainer calls this first."""
        for name in ("lightning_utilities.core.rank_zero", f"{self.package}.utilities.rank_zero"):
            import_module(name).rank_zero_only.rank = hvkit.rank()

    def connect(self, model: Any) -> None:
        super().connect(model)
        model.log = functools.partial(self._log, model)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._evaluates_whole = None
        connector = self._trainer._accelerator_connector
        if self._shards_loaders is None:  # the first call of this trainer
            self._shards_loaders = connector.use_distributed_sampler
        # Lightning's own sampler remembers the indices of predictions.
        connector.use_distributed_sampler = self._shards_loaders and self._trainer.predicting

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        held = (each for callback in trainer.callbacks for each in vars(callback).values())
        modules = [self.lightning_module, *(m for m in held if isinstance(m, torch.nn.Module))]
        _use_all_ranks_states(modules, self._ranks)
        if not (trainer.training or self._trained):
            same_weights(self.lightning_module)

    def model_to_device(self) -> None:
        if not self._is_divided:
            self.module_to_device(self.model)

    def on_train_start(self) -> None:
        """Distribute the model: its weights and the optimizers' state are loaded now, if at all."""
        super().on_train_start()
        names = [type(each).__name__ for each in self._trainer.callbacks]
        if "StochasticWeightAveraging" in names and divides_weights(self._options):
            raise ValueError(
                "StochasticWeightAveraging keeps whole weights, and ranks hold parts of them here: "
                "use EMAWeightAveraging, or a strategy that does not divide weights"
            )
        options = accumulating(self._options, most_batches(self._trainer))
        if self._layer_sync is not None:
            options.setdefault("batch_norm", "sync")
        strategy: Any = self
        strategy.optimizers = self._distribute(self.lightning_module, strategy.optimizers, options)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients before the step, not inside it: not all strategies of hvkit can."""
        repeats = isinstance(optimizer, torch.optim.LBFGS)
        scaler = getattr(self._precision_plugin, "scaler", None)  # which needs the optimizer itself
        stepped = optimizer if repeats or scaler else ClosureFirst(optimizer)
        return super().optimizer_step(stepped, *args, **kwargs)

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._shards_loaders or self._trainer.predicting:
            return dataloader
        training = self._trainer.training
        if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
            warn_once(
                "stream",
                "hvkit divides the stream of an IterableDataset among ranks: if it takes a rank's "
                "part itself, pass use_distributed_sampler=False to the Trainer",
            )
        part = part_of(dataloader, self._options, exact=not training)
        if not training and isinstance(dataloader, DataLoader):
            whole = part is dataloader and not isinstance(part, LoaderLike)
            if self._evaluates_whole not in (None, whole):
                raise ValueError(
                    "some evaluation loaders can be divided among ranks, and others not (they have "
                    "fewer samples than ranks, or unequal parts of divided weights): evaluate them "
                    "in calls of their own"
                )
            self._evaluates_whole = whole
        if isinstance(part, ShardedLoader):
            part.load_state_dict = functools.partial(load_position, part)  # type: ignore[method-assign]
        return part

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._blocked else last_batch():
            return super().backward(closure_loss, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._in_step or self._has_all_samples():
            return tensor
        if self._names and not self._in_log:
            names, self._names = list(self._names), {}
            require_equal(
                "list of names in self.log",
                names,
                "log the same names in the same order on every rank",
            )
        return self._reduced(tensor, group, reduce_op)

    def _has_all_samples(self) -> bool:
        return bool(self._evaluates_whole) and not self._trainer.training

    def _log(self, model: Any, *args: Any, sync_dist: bool = False, **kwargs: Any) -> None:
        """``self.log``, with an epoch's numbers over all ranks; a step's are those of the rank.

        A step's are over all ranks with ``sync_dist=True``, but in evaluation, where ranks may
        take different numbers of steps.
        """
        if not kwargs.get("rank_zero_only"):
            self._names[str(args[0] if args else kwargs["name"])] = None
        self._in_log, self._in_step = True, not (sync_dist and self._trainer.training)
        try:
            type(model).log(model, *args, sync_dist=True, **kwargs)
        finally:
            self._in_log = self._in_step = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return self._state(getattr(optimizer, "_optimizer", optimizer))

    def on_validation_start(self) -> None:
        """Evaluate the weights that the ranks would agree on."""
        global _each_has_all
        _each_has_all = self._has_all_samples()
        self._evaluation.enter_context(settled(*self._trained[:1]))

    def on_validation_end(self) -> None:
        global _each_has_all
        _each_has_all = False
        self._evaluation.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, exception: BaseException) -> None:
        global _each_has_all
        _each_has_all = False
        self._evaluation.pop_all()

    def teardown(self) -> None:
        if (model := self.lightning_module) is not None:
            model.__dict__.pop("log", None)
        if self._is_divided:
            for each in (self.precision_plugin, self.accelerator, self.checkpoint_io):
                each.teardown()
        else:
            super().teardown()


class _ForFabric(_Ranks):
    """The strategy of ``Fabric``; its options are those of ``hvkit.distribute``."""

    _wants_part = False

    def setup_environment(self) -> None:
        super().setup_environment()
        import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = hvkit.rank()
        if hvkit.size() > 1:  # through which metrics gather, which belong to no module here
            torch_distributed.start()

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise ValueError(
            "hvkit keeps a model and its optimizers in step together: call "
            "fabric.setup(model, optimizer) in place of setup_module and setup_optimizers"
        )

    def setup_module_and_optimizers(
        self, module: Any, optimizers: list[Any], *scheduler: Any
    ) -> tuple[Any, ...]:
        return module, self._distribute(module, optimizers, self._options), *scheduler

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None: no sampler of Lightning's is wanted. Fabric asks if it is to divide a loader."""
        self._wants_part = True

    def process_dataloader(self, dataloader: Any) -> Any:
        wanted, self._wants_part = self._wants_part, False
        return part_of(dataloader, self._options) if wanted else dataloader

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(tensor, group, reduce_op)

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        return self._state(module)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return self._state(getattr(optimizer, "optimizer", optimizer))


def _use_all_ranks_states(modules: list[torch.nn.Module], ranks: BatchRanks) -> None:
    """Let metrics of torchmetrics compute from the states of all ranks."""
    metrics = import_module("torchmetrics").Metric
    for each in (inner for module in modules for inner in module.modules()):
        if isinstance(each, metrics):
            each.distributed_available_fn, each.dist_sync_fn = _have_parts, ranks.gather_state


# Whether each rank evaluates all samples now. Not of a strategy, which cannot be pickled along with
# a module and its metrics.
_each_has_all = False


def _have_parts() -> bool:
    return hvkit.size() > 1 and not _each_has_all


def _refuse_group(call: str, group: Any) -> None:
    every = group is None or group is torch.distributed.group.WORLD
    if not every and type(group).__name__ != "object":
        raise ValueError(f"{call} works among all ranks, got the group {group!r}: leave it out")


def _environment_class(base: Any) -> Any:
    class HvkitEnvironment(base):  # type: ignore[misc]
        """The ranks that the launcher has started."""

        creates_processes_externally = True
        main_address = property(lambda self: socket.gethostname())
        main_port = 0

        @staticmethod
        def detect() -> bool:
            return hvkit.size() > 1

        def world_size(self) -> int:
            return hvkit.size()

        def global_rank(self) -> int:
            return hvkit.rank()

        def local_rank(self) -> int:
            return hvkit.local_rank()

        def node_rank(self) -> int:
            return hvkit.rank() // hvkit.local_size()

        def set_world_size(self, size: int) -> None: ...

        def set_global_rank(self, rank: int) -> None: ...

    return HvkitEnvironment


@functools.cache
def strategy_class(package: str) -> Any:
    """The strategy for the ``Trainer`` or the ``Fabric`` of a package, ``lightning.fabric``."""
    base = import_module(f"{package}.strategies").ParallelStrategy
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    environments = import_module(f"{fabric.get(package, package)}.plugins.environments")
    members = {
        "package": package,
        "environment_class": _environment_class(environments.ClusterEnvironment),
        "__module__": __name__,
    }
    mixin = _ForTrainer if package in fabric else _ForFabric
    name = "HvkitStrategy" if package in fabric else "HvkitFabricStrategy"
    return type(name, (mixin, base), {**members, "__doc__": mixin.__doc__})


def register(strategies: Any) -> None:
    """Let ``strategy="hvkit"`` be found, by the package of this module of strategies."""
    package = strategies.__name__.removesuffix(".strategies")
    registry = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
    make = functools.partial(_made, package)
    registry.register("hvkit", make, description="Horovod's allreduce, by hvkit", override=True)


def leave_mpi(environment: Any) -> None:
    """Let Lightning not start MPI to look for ranks: its end would come before Horovod's."""
    started = launched(os.environ)
    if started is not None and started.size > 1:
        environment._MPI4PY_AVAILABLE = False


def _made(package: str) -> Any:
    return strategy_class(package)()


def __getattr__(name: str) -> Any:
    packages = {
        "HvkitStrategy": ("lightning.pytorch", "pytorch_lightning"),
        "HvkitFabricStrategy": ("lightning.fabric", "lightning_fabric"),
    }
    if name not in packages:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    first, second = packages[name]
    return strategy_class(second if second in sys.modules and first not in sys.modules else first)
