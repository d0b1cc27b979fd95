"""Which strategies and compressions ``hvkit.distribute`` takes, and what contradicts them."""

from __future__ import annotations

from hvkit import strategies
from hvkit.communication.group import refuse_in_group
from hvkit.compression import BY_NAME, Compression
from hvkit.errors import ranks_text
from hvkit.monitor.monitor import Monitor
from hvkit.strategies.diloco import DiLoCo
from hvkit.strategies.fully_shard import FullyShard
from hvkit.strategies.local_sgd import LocalSGD
from hvkit.strategies.parameter_server import ParameterServer
from hvkit.strategies.sharded_optimizer import ShardedOptimizer
from hvkit.strategies.strategy import Averaging, Rounds, Strategy, strategies_in
from hvkit.strategies.synchronous import Synchronous
from hvkit.sync.port import Options


def checked_compression(value: object) -> Compression | None:
    """The compression that a name or an object stands for; None for none.

    Raises:
        TypeError, ValueError: it is none.
    """
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
    """The strategy itself.

    Raises:
        TypeError: it is none.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise TypeError(
            f"strategy must be an object, got the class {strategy.__name__}: make one, "
            f"hvkit.{strategy.__name__}(...)"
        )
    known = ", ".join(f"hvkit.{name}(...)" for name in strategies_in(strategies))
    raise TypeError(
        f"strategy must be one of {known}; got {strategy!r} of type {type(strategy).__name__}"
    )


def refuse_contradictions(options: Options) -> None:
    """Raise for options that cannot hold together.

    Raises:
        ValueError: names them.
    """
    options.strategy.check(options.compression)
    _refuse_nonfinite(options)
    if not isinstance(options.strategy, Rounds | ParameterServer):
        return
    if options.batch_norm == "sync":
        raise ValueError(
            f'batch_norm="sync" needs all ranks in every forward pass, but with {options.strategy} '
            'each trains at its own pace: use batch_norm="average"'
        )
    if options.check_every is not None:
        raise ValueError(
            f"check_every={options.check_every} compares the ranks' weights, but with "
            f"{options.strategy} they differ between agreements: leave check_every out"
        )


def _refuse_nonfinite(options: Options) -> None:
    if options.on_nonfinite == "ignore":
        return
    asked = f"on_nonfinite={options.on_nonfinite!r}"
    if not isinstance(options.strategy, Averaging) or isinstance(options.strategy, FullyShard):
        raise ValueError(
            f"{asked} looks at gradients before they are averaged, but with {options.strategy} "
            'they are not averaged as a whole: use on_nonfinite="ignore"'
        )
    compression = options.strategy.gradient_compression(options.compression)
    if options.on_nonfinite == "skip" and compression and compression.keeps_state:
        raise ValueError(
            f"{asked}: {compression} keeps what it has not sent of each step's gradients, and "
            'would keep NaN: use on_nonfinite="stop", or another compression'
        )


# What works among some of the ranks.
_IN_GROUPS = (Synchronous, ShardedOptimizer, LocalSGD, DiLoCo)


def refuse_what_groups_lack(options: Options, engine: str | None, monitor: Monitor | None) -> None:
    """Raise for what only all ranks together can do.

    Raises:
        ValueError: names it.
    """
    if not isinstance(options.strategy, _IN_GROUPS):
        refuse_in_group(str(options.strategy), options.group)
    if monitor is not None:
        refuse_in_group("hvkit.Monitor", options.group)
    if options.group.size > 1 and options.group.framework != engine:
        raise ValueError(
            f"the group of {ranks_text(options.group.members)} was made for Horovod's library for "
            f"{options.group.framework}, but these models send tensors of {engine}"
        )
