"""What a fit of Lightning needs: optimizers, accumulated batches, where a loader resumes."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

import hvkit
from hvkit.data.pytorch_loader import ShardedLoader
from hvkit.random_states import begins_an_epoch, from_text, set_global_states

# The optimizers and the options of a module's first fit.
first_fits: WeakKeyDictionary[torch.nn.Module, tuple[list[Any], Any]] = WeakKeyDictionary()


def renewed(first: list[Any], later: list[Any]) -> list[Any]:
    """The optimizers that hvkit has got, with the groups and the state of later ones."""
    if [type(each) for each in first] != [type(each) for each in later]:
        names = [", ".join(type(each).__name__ for each in every) for every in (later, first)]
        raise ValueError(
            f"a later fit of this module has other optimizers ({names[0]}) than the first "
            f"({names[1]}), which hvkit keeps in step: return the same kinds from "
            "configure_optimizers, or fit a new module with the weights of this one"
        )
    for kept, given in zip(first, later, strict=True):
        if kept is not given:  # schedulers change the rates in the lists
            kept.param_groups, kept.state = given.param_groups, given.state
    return first


class ClosureFirst:
    """An optimizer whose ``step(closure)`` calls the closure, and then ``step()``."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for the script's ``on_before_optimizer_step``
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        loss = closure() if closure else None
        self._optimizer.step(**kwargs)
        return loss


def most_batches(trainer: Any) -> int:
    """The most batches that a step accumulates; fewer are announced in the pass that ends them."""
    most: int = trainer.accumulate_grad_batches
    for each in trainer.callbacks:  # a GradientAccumulationScheduler has a dict of them
        most = max(most, *vars(each).get("scheduling", {}).values(), 1)
    return most


def load_position(loader: ShardedLoader, state: dict[str, Any]) -> None:
    """Resume a loader; after the last batch of an epoch with the next epoch.

    Lightning leaves an epoch's iterator after that batch, at which the sampler may draw no more.
    """
    ShardedLoader.load_state_dict(loader, state)
    if hvkit.is_main() and begins_an_epoch(random := state.get("random", {})):
        set_global_states(from_text(random))  # from which rank 0 draws the order of later epochs
    if loader.load_before_last_step():
        next(iter(loader))


def model_inside(module: torch.nn.Module) -> torch.nn.Module:
    """The one module in a LightningModule that holds all parameters: ranks divide its calls."""
    holding = [each for each in module.children() if any(True for _ in each.parameters())]
    own = any(True for _ in module.parameters(recurse=False))
    if len(holding) != 1 or own:
        raise ValueError(
            f"in a mesh {type(module).__name__} must hold its parameters in one module, whose "
            f"calls the ranks divide, got {len(holding)}{' and some of its own' * own}: "
            "put them into one nn.Module and call that in training_step"
        )
    return holding[0]
