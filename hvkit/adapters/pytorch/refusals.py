"""Refuses what would train a distributed model past hvkit.

That is a wrapper or ``torch.distributed`` that averages as well, and an optimizer that was not
passed to ``distribute``, whose state, rate and steps nobody keeps alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvkit.adapters.pytorch.optimizers import optimizers_inside

# Classes by their names, so that nothing is imported to look for them, and what to do instead.
_WRAPPERS = {
    "DistributedDataParallel": "pass the plain module (model.module) and its optimizer",
    "FullyShardedDataParallel": "pass the module as it was before it was wrapped",
    "ShardedDataParallel": "pass the module as it was before it was wrapped",
    "FSDPModule": "pass the module without fully_shard",
    "DeepSpeedEngine": "pass the plain module (engine.module) and a plain optimizer",
}
_LIBRARIES = ("torch", "fairscale", "deepspeed")

_averaged: WeakSet[Optimizer] = WeakSet()
# How many parameters an optimizer had when it was found to hold none of a distributed model.
_harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def refuse_other_wrappers(model: nn.Module) -> None:
    """Raise if something else shares this model among processes already.

    Raises:
        TypeError: a part of the model is wrapped, or a parameter is a ``DTensor``.
        ValueError: ``torch.distributed`` spreads training over several processes.
    """
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "model is wrapped in DataParallel, which divides batches itself: pass the plain module "
            "(model.module) and its optimizer"
        )
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.split(".")[0] in _LIBRARIES:
                part = f"model part {name!r}" if name else "model"
                raise TypeError(
                    f"{part} is wrapped in {kind.__name__}, which shares the work among processes "
                    f"itself: {_WRAPPERS[kind.__name__]}"
                )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise TypeError(
                f"parameter {name} is a DTensor, divided among processes by torch.distributed: "
                "pass the module as it was before fully_shard or parallelize_module"
            )
    if (processes := processes_of_torch_distributed()) > 1:
        raise ValueError(two_at_once(processes))


def processes_of_torch_distributed() -> int:
    """How many processes ``torch.distributed`` spreads training over; 1 if it was not started."""
    distributed = torch.distributed
    started = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if started else 1


def two_at_once(processes: int) -> str:
    """Why ``torch.distributed`` over so many processes and hvkit do not go together."""
    return (
        f"torch.distributed is initialised with {processes} processes beside hvkit: both would "
        "divide the data and average the gradients. Train with one of them: leave out "
        "torch.distributed.init_process_group and what calls it (Hugging Face's Accelerator and "
        "Trainer do so by themselves under mpirun), or leave out hvkit.distribute"
    )


def refuse_other_optimizers(
    optimizers: Sequence[Optimizer], is_averaged: Callable[[torch.Tensor], bool]
) -> None:
    """From now on, only these optimizers and those of earlier calls may update their models.

    Args:
        optimizers: those that were passed to ``distribute``.
        is_averaged: whether a parameter is one of a distributed model, of any call.
    """
    _averaged.update(optimizers)
    _look_who_steps(is_averaged)


@functools.cache
def _look_who_steps(is_averaged: Callable[[torch.Tensor], bool]) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in _averaged:
            _refuse_if_distributed(optimizer, is_averaged)

    register_optimizer_step_pre_hook(before)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_if_distributed(
    optimizer: Optimizer, is_averaged: Callable[[torch.Tensor], bool]
) -> None:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    if _harmless.get(optimizer) == held:
        return
    around_one_of_ours = any(each in _averaged for each in optimizers_inside(optimizer))
    if not around_one_of_ours and any(
        is_averaged(p) for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} updates parameters of a model that was passed "
            "to hvkit.distribute, but was not passed itself, so nothing keeps it alike on all "
            "ranks: use the optimizer that was, and pass those of later phases in the same call: "
            "distribute(model, [first, second])"
        )
    _harmless[optimizer] = held
