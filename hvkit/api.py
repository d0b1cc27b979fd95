"""``hvkit.distribute``: checks its arguments, and runs the steps that all frameworks share.

``hvkit.settled`` is for strategies whose ranks differ between two agreements.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from hvkit import runtime
from hvkit.argument_checks import advise_on_extra_arguments, check_count, check_one_of
from hvkit.capabilities import checked_compression, checked_strategy, refuse_unsupported
from hvkit.communication import collectives
from hvkit.communication.collectives import raise_together, require_equal
from hvkit.compression import Compression, CompressionName
from hvkit.learning_rate import LRScaling, describe, length_of_warmup, make_multiplier
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.mesh import Mesh, divide, mesh_options, picture, rows
from hvkit.monitor.monitor import Monitor
from hvkit.registry import JAX, framework_of, framework_of_all
from hvkit.runtime import Group, all_ranks
from hvkit.strategies import DiLoCo, LocalSGD, ParameterServer, ShardedOptimizer, Synchronous
from hvkit.strategies.strategy import Strategy
from hvkit.sync.port import (
    BATCH_NORMS,
    NONFINITE_ACTIONS,
    BatchNorm,
    Keeper,
    OnNonfinite,
    Options,
    Port,
    Record,
    is_distributed,
    keepers_of,
    record,
    record_of,
)
from hvkit.watch.calls import call_within, named

# Strategies that work among some of the ranks.
_IN_GROUPS = (Synchronous, ShardedOptimizer, LocalSGD, DiLoCo)
_SYNCHRONOUS = Synchronous()

Model = TypeVar("Model")
Optimizers = TypeVar("Optimizers")


@named("hvkit.distribute")
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
    first = framework_of(model)
    in_jax = first is JAX  # where a list may be a pytree
    models, optimizers = ([each] if in_jax else _listed(each) for each in (model, optimizer))
    first = first or (framework_of(models[0]) if models else None)
    engine = first.engine if first else None
    runtime.init(engine)
    group = _group or all_ranks()
    runtime.refuse_separate_training()
    problem: Exception | None = None
    port: Port | None = None
    try:
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
        if not isinstance(strategy, _IN_GROUPS):
            group.require_all_ranks(f"{strategy}")
        if monitor is not None:
            group.require_all_ranks("hvkit.Monitor")
            if not isinstance(monitor, Monitor):
                raise TypeError(f"monitor must be a hvkit.Monitor, got {monitor!r}")
        if not models:
            raise ValueError(f"model must hold at least one model, got {model!r}")
        if not optimizers:
            raise ValueError(f"optimizer must hold at least one optimizer, got {optimizer!r}")
        framework = framework_of_all(models, optimizers)
        refuse_unsupported(framework, options)
        if not in_jax:  # there the port finds a second call by the arrays
            _refuse_second_call(models, optimizers)
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    raise_together(problem, group=group)
    if options.mesh and engine != "jax":  # there XLA divides the ranks
        options = _in_data_group(options, engine)
    batches = options.mesh.position.batches if options.mesh else group.size
    try:
        multiplier = make_multiplier(lr_scaling, batches, options.warmup_steps)
        port = framework.port_for(models, optimizers, options)
    except Exception as error:
        problem = error
    raise_together(problem, group=group)
    assert port is not None
    records = [] if in_jax else [(each, Record()) for each in optimizers]
    keeper: Keeper | None = None
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
    if group.size > 1:
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
        rates = port.scale_learning_rate(multiplier)
        records, keeper = port.keep_in_step()
        if group.rank == 0:
            said = describe(rates, lr_scaling, batches)
            if in_jax:  # an optimizer of Optax shows no rate
                said = f"{strategy}" if keeper else "they share each global batch"
            logger.info(f"{group.size} ranks; {said}")
    # A model of JAX may be a pytree, which cannot be looked up. Only local weights need that.
    record([] if in_jax and keeper is None else models, records, keeper, group)
    if in_jax:  # a pytree is a new object
        of_jax: Any = port
        return of_jax.model, of_jax.optimizer
    return model, optimizer


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


@contextmanager
def settled(*things: Any) -> Iterator[None]:
    """Hold the weights that the ranks would agree on now, to evaluate or save a model.

        with hvkit.settled(model):
            accuracy = evaluate(model)
            if hvkit.is_main():
                torch.save(model.state_dict(), "model.pt")

    Between two agreements of ``LocalSGD`` and the like, each rank has local weights. Inside the
    block all ranks have the same weights: the strategy's mean, for ``ElasticAveraging`` its centre,
    for ``ParameterServer`` the server's. Statistics of normalisation layers are averaged.
    Afterwards each rank has its local weights again, so looking never changes them. Every rank must
    enter the block. It does nothing while all ranks hold the same weights (``Synchronous``, one
    process, right after a round of ``LocalSGD``), nor for models that share no weights with one
    that was distributed.

    With ``FullyShard`` and ``ShardedOptimizer``, ``state_dict()`` works on rank 0 inside the block
    only, where it returns the whole weights, and for an optimizer that is passed as well, its whole
    state: ``with hvkit.settled(model, optimizer):``.

    In a mesh, ``model.generate()`` of Hugging Face's models has the whole model on every rank
    inside the block.

    Args:
        *things: models and optimizers that were passed to ``hvkit.distribute``, and lists of them.
            Do not train them inside the block.

    Raises:
        TypeError: one of them is neither a model nor an optimizer.
        RanksDisagreeError: the ranks have taken different numbers of steps, in rounds.
        RankLostError: another rank has ended, or waits in another call.
    """
    with ExitStack() as stack:
        with call_within("hvkit.settled"):
            for thing in [t for each in things for t in _listed(each)]:
                framework = framework_of(thing)
                if framework is JAX:
                    _require_module(thing)
                if framework is not None:
                    for keeper in keepers_of(thing):
                        stack.enter_context(keeper.settled())
                elif _record(thing) is None:
                    raise TypeError(
                        "hvkit.settled takes models and optimizers that were passed to "
                        "hvkit.distribute, and lists of them, got "
                        f"{thing!r} of type {type(thing).__name__}"
                    )
                if (known := _record(thing)) is not None and known.gathered:
                    stack.enter_context(known.gathered())
        yield


def _require_module(thing: Any) -> None:
    from hvkit.frameworks.jax.arrays import is_nnx

    if not is_nnx(thing):
        raise TypeError(
            "hvkit.settled takes modules and optimizers of Flax NNX, whose arrays it can set, but "
            f"not a pytree ({type(thing).__name__}): where a strategy divides its arrays, "
            "jax.experimental.multihost_utils.process_allgather(tree, tiled=True) on every rank "
            "returns whole ones"
        )


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _record(optimizer: Any) -> Record | None:
    """The record of an optimizer, also inside a ``LossScaleOptimizer`` that Keras has made."""
    while (found := record_of(optimizer)) is None and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return found


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
