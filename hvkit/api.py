"""``hvkit.distribute``: checks its arguments, and runs the steps that all frameworks share."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hvkit import integrations, runtime
from hvkit.argument_checks import advise_on_extra_arguments, check_count, check_one_of
from hvkit.capabilities import checked_compression, checked_strategy, refuse_unsupported
from hvkit.communication import collectives
from hvkit.communication.collectives import require_equal, together
from hvkit.compression import Compression, CompressionName
from hvkit.learning_rate import (
    LRScaling,
    Multiplier,
    describe,
    length_of_warmup,
    make_multiplier,
)
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.mesh import Mesh, divide, mesh_options, picture, rows
from hvkit.monitor.monitor import Monitor
from hvkit.registry import Framework, framework_of, framework_of_all
from hvkit.runtime import Group, all_ranks
from hvkit.strategies import DiLoCo, LocalSGD, ParameterServer, ShardedOptimizer, Synchronous
from hvkit.strategies.strategy import Strategy
from hvkit.sync.port import (
    BATCH_NORMS,
    NONFINITE_ACTIONS,
    BatchNorm,
    OnNonfinite,
    Options,
    Port,
    Record,
    Sync,
    is_distributed,
    remember,
)
from hvkit.watch.calls import named

# Strategies that work among some of the ranks.
_IN_GROUPS = (Synchronous, ShardedOptimizer, LocalSGD, DiLoCo)
_SYNCHRONOUS = Synchronous()

Call = TypeVar("Call", bound=Callable[..., Any])
Model = TypeVar("Model")
Optimizers = TypeVar("Optimizers")


def _of_trainers(call: Call) -> Call:
    """Decorator: ``distribute(trainer, **options)`` takes a trainer, and returns it."""

    @functools.wraps(call)
    def of_trainer(*args: Any, **options: Any) -> Any:
        if len(args) == 1 and (distributor := integrations.distributor(args[0])):
            return distributor(args[0], options)
        return call(*args, **options)

    return of_trainer  # type: ignore[return-value]


@named("hvkit.distribute")
@_of_trainers
@advise_on_extra_arguments(
    "hvkit.distribute takes a model and an optimizer, or lists of them: distribute([encoder, "
    "decoder], [first, second]). Data goes through hvkit.shard(loader), schedulers and losses stay "
    'as they are, and options need their names: lr_scaling="linear"'
)
def distribute(
    model: Model,
    optimizer: Optimizers,
    *,
    lr_scaling: LRScaling = "none",
    warmup_steps: int = 0,
    warmup_epochs: float = 0,
    steps_per_epoch: int | None = None,
    strategy: Strategy = _SYNCHRONOUS,
    accumulate: int = 1,
    compression: CompressionName | Compression = "none",
    batch_norm: BatchNorm = "average",
    check_every: int | None = None,
    on_nonfinite: OnNonfinite = "ignore",
    monitor: Monitor | None = None,
    mesh: Mesh | None = None,
    microbatches: int | None = None,
    schedule: str = "GPipe",
    stages: Sequence[str] | str = "flops",
    plan: Mapping[str, Any] | None = None,
    _group: Group | None = None,
) -> tuple[Model, Optimizers]:
    """Train this model with its optimizer on all ranks together.

    Call it on every rank before the first step, once both have loaded their checkpoint, if any.
    Each update then uses the mean over ranks of the ranks' gradients, so N ranks with batch size B
    train the model that one process trains with batch size N*B. One process trains as without it.
    PyTorch's gradients are averaged when ``backward()`` returns, Keras's inside
    ``optimizer.apply``, which ``fit`` calls. Take the mean over samples as the loss; multiply a sum
    by ``hvkit.size()``, except in JAX, where a step sees the samples of all ranks. All ranks begin
    with rank 0's weights; do not change them later on some ranks only.

    Args:
        model: a ``torch.nn.Module`` or a ``keras.Model`` (Keras 3 on TensorFlow,
            PyTorch or JAX), or a list of them that train together; in JAX an ``nnx.Module`` or a
            pytree.
        optimizer: the one that updates the model, or a list of all, also of later phases. It may
            hold parameters of no module, such as SAC's ``log_alpha``. In JAX an ``nnx.Optimizer``;
            for a pytree, a transformation of Optax or its state.
        lr_scaling: the factor on the learning rate inside an update: 1 for ``"none"``, the world
            size for ``"linear"``, its square root for ``"sqrt"``. The rate you set stays yours.
        warmup_steps: optimizer steps in which the rate grows to the full one; 0 for none.
        warmup_epochs: the same in epochs, also a fraction; needs ``steps_per_epoch``.
        steps_per_epoch: each rank's optimizer steps in an epoch.
        strategy: how ranks combine gradients or weights, such as ``hvkit.DiLoCo(every=50)``. Where
            ranks' weights differ between agreements, evaluate under ``with hvkit.settled(model):``.
        accumulate: backward passes before each ``optimizer.step()``, in PyTorch; in Keras, set
            ``gradient_accumulation_steps`` on the optimizer.
        compression: how float32 gradients, or a round's changes of weights, travel: ``"bf16"``,
            ``"fp16"``, ``"int8"``, ``hvkit.TopK(ratio=0.01)`` or ``hvkit.PowerSGD(rank=4)``.
        batch_norm: ``"average"`` averages running statistics over ranks; ``"sync"`` normalises with
            the batches of all ranks together; ``"local"`` leaves each rank its own.
        check_every: compare the ranks' weights every this many steps; None after 0, 1, 2, 4, 8, ...
        on_nonfinite: after NaN or infinite gradients on any rank, ``"stop"`` raises
            FloatingPointError on all, ``"skip"`` leaves the step out; both name the rank.
        monitor: records the learning rate and gradients' norm, and each step of Keras's ``fit``.
        mesh: ``hvkit.Mesh(pipeline=2, data=2)`` divides the model as well, among the ranks along
            the pipeline axis; ranks along the data axis train with ``strategy``. All axes in
            PyTorch; data and pipeline for Sequential and Functional models of Keras; all axes
            except pipeline in JAX, and for Keras on JAX.
        microbatches: parts of a batch that follow each other through a pipeline; None for four for
            each stage.
        schedule: in which order: ``"GPipe"``, all forward and then all backward; or one of
            PyTorch's, ``"1F1B"``, ``"LoopedBFS"``, ``"Interleaved1F1B"``,
            ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"``, ``"DualPipeV"``, for a loss that is a
            mean over samples.
        stages: the modules or layers after which to cut a pipeline, ``["blocks.3"]``; or what to
            balance, ``"flops"`` or ``"bytes"`` of weights.
        plan: which linear layers ranks along the tensor axis divide, by name:
            ``{"*.fc1": "colwise", "*.fc2": "rowwise"}``; None for all that hvkit proves it can.

    Returns:
        The same model and optimizer objects (or the lists) that were passed in; for a pytree of
        JAX a new one.

    Raises:
        TypeError: the model or optimizer has an unsupported type, or they belong to different
            frameworks.
        ValueError: an argument has a wrong value; the optimizer does not hold the model's
            parameters, or updates a module with buffers or batch norm that was not passed; the
            model or optimizer was passed to an earlier call; or a layer cannot be synchronised.
        RanksDisagreeError: the ranks' models, optimizers or arguments differ. Later, in
            ``backward``, an update, ``fit`` or a save: their weights; in PyTorch also their rates
            or frozen parameters.
        HorovodNotFoundError: several ranks were launched, but there is no usable Horovod.
        LaunchError: Horovod sees a different number of ranks than were launched, this host has more
            ranks than GPUs, or the script itself has started several processes that train.
    """
    framework = framework_of(model)
    pytrees = framework is not None and framework.takes_pytrees  # where a list may be one
    models, optimizers = ([each] if pytrees else _listed(each) for each in (model, optimizer))
    framework = framework or (framework_of(models[0]) if models else None)
    runtime.init(framework.engine if framework else None)
    group = _group or all_ranks()
    runtime.refuse_separate_training()
    with together(group=group):
        options = Options(
            accumulate=check_count("accumulate", accumulate),
            warmup_steps=length_of_warmup(warmup_steps, warmup_epochs, steps_per_epoch),
            compression=checked_compression(compression),
            batch_norm=check_one_of("batch_norm", batch_norm, BATCH_NORMS),
            check_every=(None if check_every is None else check_count("check_every", check_every)),
            on_nonfinite=check_one_of("on_nonfinite", on_nonfinite, NONFINITE_ACTIONS),
            strategy=checked_strategy(strategy),
            group=group,
        )
        in_mesh = mesh_options(mesh, microbatches, schedule, stages, plan)
        if in_mesh and group.size > 1:
            options = replace(options, mesh=in_mesh)
        _refuse_in_groups(options, monitor)
        framework = _checked_framework(models, optimizers, options)
    if options.mesh and framework.engine != "jax":  # there XLA divides the ranks
        options = _in_data_group(options, framework.engine)
    batches = options.mesh.position.batches if options.mesh else group.size
    with together(group=group):
        multiplier = make_multiplier(lr_scaling, batches, options.warmup_steps)
        port: Port = framework.port_for(models, optimizers, options)
    if group.size > 1:
        monitored = "" if monitor is None else ", with a monitor"
        arguments = f"lr_scaling={lr_scaling}, {options}{monitored}"
        require_equal(
            "model or call",
            [*(type(each).__name__ for each in models), arguments, *port.facts()],
            "build the same model and optimizer, and pass the same arguments, on every rank",
            group=group,
        )
    if monitor is not None:  # before averaging wraps the optimizers: it looks at the means
        paced = not isinstance(strategy, ParameterServer)
        position = options.mesh.position if options.mesh else None
        monitor.attach(models, optimizers, equal_steps=paced, position=position)
    sync: Sync | None = None
    records = [] if pytrees else [(each, Record()) for each in optimizers]
    if group.size > 1:
        rates = _synchronise(port, options, multiplier, group)
        records, sync = port.keep_in_step()
        if group.rank == 0:
            said = describe(rates, lr_scaling, batches)
            if pytrees:  # an optimizer of Optax shows no rate
                said = f"{strategy}" if sync else "they share each global batch"
            logger.info(f"{group.size} ranks; {said}")
    # A pytree cannot be looked up. Models of JAX with local weights are none.
    remember([] if pytrees and sync is None else models, records, sync, group)
    if pytrees:  # new objects
        of_jax: Any = port
        return of_jax.model, of_jax.optimizer
    return model, optimizer


def _refuse_in_groups(options: Options, monitor: Monitor | None) -> None:
    """Refuse what needs all ranks if only some train together, and what is no monitor."""
    if not isinstance(options.strategy, _IN_GROUPS):
        options.group.require_all_ranks(f"{options.strategy}")
    if monitor is not None:
        options.group.require_all_ranks("hvkit.Monitor")
        if not isinstance(monitor, Monitor):
            raise TypeError(f"monitor must be a hvkit.Monitor, got {monitor!r}")


def _checked_framework(models: list[Any], optimizers: list[Any], options: Options) -> Framework:
    for name, things in (("model", models), ("optimizer", optimizers)):
        if not things:
            raise ValueError(f"{name} must hold at least one {name}, got {things!r}")
    framework = framework_of_all(models, optimizers)
    refuse_unsupported(framework, options)
    if not framework.takes_pytrees:  # there the port finds a second call by the arrays
        _refuse_second_call(models, optimizers)
    return framework


def _synchronise(
    port: Port, options: Options, multiplier: Multiplier, group: Group
) -> list[tuple[float, Multiplier | None]]:
    """Copy rank 0's weights and state to all ranks, and scale the rates; return the user's."""
    if options.mesh:
        hosts = collectives.gather("distribute", socket.gethostname())
        if group.rank == 0:
            logger.info(picture(options.mesh.mesh, hosts))
    if options.strategy.has_momentum and (found := port.more_than_sgd()):
        warn_once(
            "momentum",
            f"{options.strategy} has a momentum of its own, and takes the place of what "
            f"{', '.join(found)} adds to SGD: use SGD without momentum, and a small rate",
            group,
        )
    port.synchronise()
    return port.scale_learning_rate(multiplier)


def _in_data_group(options: Options, engine: str | None) -> Options:
    """The options with the group of ranks that hold the same part of a model; a collective."""
    assert options.mesh
    assert engine
    mesh, position = options.mesh.mesh, options.mesh.position
    if mesh.shard > 1 or mesh.data == 1:
        # Horovod sends nothing in this group.
        group = Group(position.batch, position.members("data", "shard"))
    else:
        group = divide(rows(mesh, "data"), engine)
    return replace(options, group=group)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _refuse_second_call(models: Sequence[object], optimizers: Sequence[object]) -> None:
    roles = [("model", each) for each in models] + [("optimizer", each) for each in optimizers]
    for role, thing in roles:
        if is_distributed(thing):
            raise ValueError(
                f"this {role} ({type(thing).__name__}) was passed to hvkit.distribute before; pass "
                "models that share an optimizer, and all optimizers of a model, including those of "
                "later training phases, in one call: "
                "hvkit.distribute([encoder, decoder], [first, second])"
            )
