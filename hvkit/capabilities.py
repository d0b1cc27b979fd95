"""Which arguments of ``hvkit.distribute`` go together, and what each framework supports.

All of it is in tables. A row says which values of an option are not possible, why, and what to use
instead. What depends on the model or the optimizer, the framework's port refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from hvkit import strategies
from hvkit.compression import BY_NAME, Compression
from hvkit.mesh import AXES
from hvkit.registry import (
    JAX,
    KERAS_IN_PYTORCH_LOOP,
    KERAS_ON_JAX,
    KERAS_ON_PYTORCH,
    KERAS_ON_TENSORFLOW,
    PYTORCH,
    Framework,
)
from hvkit.strategies import (
    DiLoCo,
    FullyShard,
    LocalSGD,
    ParameterServer,
    ShardedOptimizer,
    Synchronous,
)
from hvkit.strategies.strategy import Averaging, Rounds, Strategy, strategies_in
from hvkit.sync.port import Options

Strategies = tuple[type[Strategy], ...]


# Defaults of options, where they are not None.
_DEFAULTS = {"accumulate": 1, "warmup_steps": 0, "on_nonfinite": "ignore", "schedule": "GPipe"}


def _not_sync(value: Any) -> bool:
    return bool(value != "sync")


@dataclass(frozen=True)
class Refusal:
    """Values of an option that are not possible."""

    option: str  # a field of ``Options`` or of ``MeshOptions``
    # Why, and what to do, with ``{value}``, ``{strategy}``, ``{mesh}`` and ``{framework}``.
    because: str
    # Whether a value is possible; None if only the default is.
    unless: Callable[[Any], bool] | None = None
    strategies: Strategies = (Strategy,)
    axis: str = ""  # along which axis of a mesh; ``"any"`` for all meshes; empty for all calls

    def check(self, options: Options, framework: str) -> None:
        mesh = options.mesh and options.mesh.mesh
        if self.axis and (mesh is None or getattr(mesh, self.axis, 2) == 1):
            return
        value = getattr(options if hasattr(options, self.option) else options.mesh, self.option)
        default = _DEFAULTS.get(self.option)
        possible = self.unless(value) if self.unless else value == default
        if not possible and isinstance(options.strategy, self.strategies):
            given = repr(value) if isinstance(value, str) else value
            because = self.because.format(
                value=given, strategy=options.strategy, mesh=mesh, framework=framework
            )
            raise ValueError(f"{self.option}={given} {because}")


@dataclass(frozen=True)
class Support:
    """The strategies, axes and options that a framework supports."""

    strategies: Strategies  # their base classes; a script may write subclasses
    in_mesh: Strategies  # those that work along the data axis of a mesh
    other_strategies: str  # why it does not have others, and an alternative
    axes: tuple[str, ...]
    other_axes: str  # an alternative to other axes
    refused: tuple[Refusal, ...]


STRATEGIES = tuple(strategies_in(strategies).values())
_LOCAL = (Rounds, ParameterServer)
_IN_ANY = (
    Refusal(
        "batch_norm",
        "needs all ranks in every forward pass, but with {strategy} each trains at its own pace: "
        'use batch_norm="average"',
        _not_sync,
        _LOCAL,
    ),
    Refusal(
        "check_every",
        "compares the ranks' weights, but with {strategy} they differ between agreements: leave "
        "check_every out",
        strategies=_LOCAL,
    ),
    Refusal(
        "on_nonfinite",
        "looks at gradients before they are averaged, but with {strategy} they are not averaged "
        'as a whole: use on_nonfinite="ignore"',
        strategies=(*_LOCAL, FullyShard),
    ),
)
_NO_SYNC_IN_MESH = Refusal(
    "batch_norm",
    'does not work in micro-batches, as in {mesh}: use "average"',
    _not_sync,
    axis="any",
)
_BY_PYTORCH = (
    "does not work along the shard axis of {mesh}, where PyTorch averages gradients: leave it out, "
    "or use the data axis instead"
)
_PYTORCH = Support(
    (Strategy,),
    (Synchronous, LocalSGD, DiLoCo),
    "",
    AXES,
    "",
    (
        Refusal(
            "batch_norm",
            "exchanges statistics inside layers that {strategy} divides: use "
            'batch_norm="average", or layers without batch statistics',
            _not_sync,
            (FullyShard,),
        ),
        Refusal(
            "check_every",
            "compares the ranks' weights, but with {strategy} each rank holds another part of "
            "them: leave check_every out",
            strategies=(FullyShard,),
        ),
        Refusal(
            "accumulate",
            "is not needed with {strategy}: each backward pass adds the mean of all ranks to the "
            "gradients, so leave accumulate out",
            strategies=(FullyShard,),
        ),
        _NO_SYNC_IN_MESH,
        Refusal("strategy", _BY_PYTORCH, lambda value: value == Synchronous(), axis="shard"),
        Refusal("compression", _BY_PYTORCH, axis="shard"),
        Refusal(
            "schedule",
            "runs several stages on a rank, or computes gradients of weights apart, where PyTorch "
            "does not gather those of {mesh}: use 'GPipe' or '1F1B'",
            ("GPipe", "1F1B").__contains__,
            axis="shard",
        ),
    ),
)
_KERAS_IN_LOOP = Support(
    (Averaging, Rounds, ParameterServer),
    (Synchronous,),
    "hvkit.ShardedOptimizer() divides the optimizer's state; a model that is too large for one "
    "device needs PyTorch, whose fully_shard this uses",
    ("data", "pipeline"),
    "run Keras on JAX (KERAS_BACKEND=jax), write the model as a torch.nn.Module, or use the "
    "pipeline axis, or hvkit.ShardedOptimizer() without a mesh",
    (
        _NO_SYNC_IN_MESH,
        Refusal("schedule", "is for models of PyTorch: leave it out", axis="any"),
        Refusal("plan", "chooses layers to divide along a tensor axis: leave it out", axis="any"),
        Refusal(
            "on_nonfinite",
            "looks at the gradients of a whole model, which no rank of {mesh} has: leave it out",
            axis="any",
        ),
    ),
)
_ACCUMULATED = Refusal(
    "accumulate",
    "is not for {framework}: pass gradient_accumulation_steps={value} to the optimizer",
)
_KERAS = replace(_KERAS_IN_LOOP, refused=(_ACCUMULATED, *_KERAS_IN_LOOP.refused))
_BY_XLA = (
    Refusal(
        "compression",
        "is not for {framework}, where XLA sends gradients in their own dtype: compute in "
        "jax.numpy.bfloat16 to halve what is sent",
    ),
    Refusal(
        "batch_norm",
        "is not for {framework}, where a batch is one array of all ranks, and its statistics are "
        "those of all: leave batch_norm out",
        lambda value: value != "local",
    ),
    Refusal(
        "plan",
        "is not for {framework}, where the tensor axis divides all weights by their longest "
        "dimensions, which does not change what a step computes: leave it out",
        axis="any",
    ),
)
_JAX = Support(
    (Synchronous, ShardedOptimizer, FullyShard, LocalSGD, DiLoCo),
    (Synchronous, ShardedOptimizer, FullyShard),
    "XLA averages gradients inside the compiled step",
    ("data", "shard", "tensor"),
    "a step is one function for all ranks: use the axes data, shard and tensor",
    (
        *_BY_XLA,
        Refusal(
            "accumulate",
            "is not for {framework}: wrap the optimizer, optax.MultiSteps(tx, "
            "every_k_schedule={value})",
        ),
        Refusal(
            "on_nonfinite",
            "is not for {framework}: wrap the optimizer, optax.apply_if_finite(tx, "
            "max_consecutive_errors=...)",
        ),
        Refusal(
            "warmup_steps",
            "is not for {framework}: use a schedule of Optax, "
            "optax.warmup_cosine_decay_schedule(...)",
        ),
        Refusal(
            "strategy",
            "is not for {framework}, where ranks agree between two steps: leave overlap out",
            lambda value: not getattr(value, "overlap", 0),
        ),
        Refusal(
            "strategy",
            "divides weights among all ranks, and {mesh} among some: leave one out",
            lambda value: not isinstance(value, FullyShard),
            axis="shard",
        ),
    ),
)
_KERAS_ON_JAX = replace(
    _JAX,
    strategies=_JAX.in_mesh,
    other_strategies="compiled steps hold the weights of all ranks; take KERAS_BACKEND=torch or "
    "tensorflow, or a model of Flax NNX",
    refused=(
        *_BY_XLA,
        _ACCUMULATED,
        Refusal(
            "on_nonfinite",
            "is not for {framework}: pass keras.callbacks.TerminateOnNaN() to fit",
        ),
        _JAX.refused[-1],
    ),
)
SUPPORT: dict[Framework, Support] = {
    PYTORCH: _PYTORCH,
    KERAS_ON_TENSORFLOW: _KERAS,
    KERAS_ON_PYTORCH: _KERAS,
    KERAS_IN_PYTORCH_LOOP: _KERAS_IN_LOOP,
    KERAS_ON_JAX: _KERAS_ON_JAX,
    JAX: _JAX,
}


def refuse_unsupported(framework: Framework, options: Options) -> None:
    support, strategy, name = SUPPORT[framework], options.strategy, framework.name
    strategy.check(options.compression)
    _refuse_residuals_of_nan(options)
    if not isinstance(strategy, support.strategies):
        known = [each for each in STRATEGIES if issubclass(each, support.strategies)]
        raise ValueError(
            f"{strategy} is not for {name}, which has {_names(known)}: {support.other_strategies}"
        )
    if options.mesh:
        mesh = options.mesh.mesh
        for axis in AXES:
            if getattr(mesh, axis) > 1 and axis not in support.axes:
                raise ValueError(
                    f"the axis {axis} of {mesh} is not for {name}: {support.other_axes}"
                )
        if not isinstance(strategy, support.in_mesh):
            raise ValueError(
                f"{strategy} does not work along the data axis of {mesh} in {name}, where ranks "
                f"hold a part of the model: use {_names(support.in_mesh)}"
            )
    for refusal in (*_IN_ANY, *support.refused):
        refusal.check(options, name)


def _refuse_residuals_of_nan(options: Options) -> None:
    if not isinstance(options.strategy, Averaging) or options.on_nonfinite != "skip":
        return
    compression = options.strategy.gradient_compression(options.compression)
    if compression and compression.keeps_state:
        raise ValueError(
            f"on_nonfinite='skip': {compression} keeps what it has not sent of each step's "
            'gradients, and would keep NaN: use on_nonfinite="stop", or another compression'
        )


def checked_compression(value: object) -> Compression | None:
    if isinstance(value, Strategy):
        raise TypeError(f"compression={value} is a strategy: pass strategy=hvkit.{value}")
    if isinstance(value, Compression):
        return value
    if isinstance(value, str) and value in BY_NAME:
        return BY_NAME[value]
    raise ValueError(
        f"compression must be one of {', '.join(BY_NAME)}, or an object such as "
        f"hvkit.TopK(ratio=0.01) and hvkit.PowerSGD(rank=4); got {value!r}"
    )


def checked_strategy(strategy: object) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise TypeError(
            f"strategy must be an object, got the class {strategy.__name__}: make one, "
            f"hvkit.{strategy.__name__}(...)"
        )
    known = ", ".join(f"hvkit.{each.__name__}(...)" for each in STRATEGIES)
    raise TypeError(
        f"strategy must be one of {known}; got {strategy!r} of type {type(strategy).__name__}"
    )


def _names(found: Iterable[type[Strategy]]) -> str:
    return ", ".join(each.__name__ for each in found)
