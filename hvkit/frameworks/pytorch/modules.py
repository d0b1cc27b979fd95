"""Several modules as one model: names of their tensors; refuses modules that were left out.

An optimizer may update more than the modules that were passed with it. A single parameter, such as
a temperature, is averaged like the parameters of a module. A module has more: its buffers must
begin as rank 0's, and its batch norm has statistics.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.optimizers import parameters_of
from hvkit.main_rank import warn_once

T = TypeVar("T", bound=torch.Tensor)


def named_in(
    models: Sequence[nn.Module], named: Callable[[nn.Module], Iterable[tuple[str, T]]]
) -> dict[str, T]:
    """Tensors by a name for messages: ``0.weight``, of several models ``0.weight of model 1``."""
    of_model = " of model {}" if len(models) > 1 else ""
    return {
        name.replace("_orig_mod.", "") + of_model.format(number): tensor  # of torch.compile
        for number, model in enumerate(models)
        for name, tensor in named(model)
    }


_OF_THIS_RANK = "_hvkit_of_this_rank"


def leave_to_rank(parameter: torch.Tensor) -> None:
    """Let ranks have different values of an optimizer's tensor that no gradient will reach."""
    # No weak reference: PyTorch exchanges no tensor that has one.
    setattr(parameter, _OF_THIS_RANK, True)


def is_left_to_rank(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, _OF_THIS_RANK)


def refuse_optimizers_of_others(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], known: Sequence[nn.Module] = ()
) -> None:
    """Raise for optimizers of modules that were not passed, but for ``known`` ones, named already.

    Where nothing of a module that was left out would be wrong, rank 0 only warns.
    """
    passed = {id(p) for model in models for p in model.parameters()}
    named = ", ".join(type(model).__name__ for model in models)
    if not passed:
        raise ValueError(f"model {named} has no parameters to train")
    updated = {
        id(p): each for each in optimizers for p in parameters_of(each) if not is_left_to_rank(p)
    }
    if passed.isdisjoint(updated):
        classes = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"optimizer {classes} holds none of the {len(passed)} parameters of {named}: make it "
            "from the parameters() of the model that you pass"
        )
    others = updated.keys() - passed - {id(p) for module in known for p in module.parameters()}
    for module, number in _left_out(models, others) if others else ():
        text = (
            f"optimizer {type(updated[number]).__name__} also updates {type(module).__name__}, "
            "which was not passed to hvkit.distribute"
        )
        fix = "pass all modules that it updates: hvkit.distribute([encoder, decoder], optimizer)"
        if parts := _needs(module):
            raise ValueError(f"{text}, so that nothing takes care of {parts}: {fix}")
        warn_once(f"left out {type(module).__name__}", f"{text} with it; {fix}")


def _left_out(models: Sequence[nn.Module], wanted: Set[int]) -> list[tuple[nn.Module, int]]:
    """The largest modules that have nothing to do with the models, each with one wanted parameter.

    A parameter does not know its module, so this looks at all objects of the process, which takes
    about 0.1 s for a million. Lists of parameters do not count, nor does an object that contains
    one of the models and has the parameter itself.
    """
    passed = {id(each) for model in models for each in model.modules()}
    modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    living = [each for each in modules if "_modules" in vars(each)]  # not before its __init__
    around = {id(each) for each in living if not passed.isdisjoint(map(id, each.modules()))}
    inside = {id(child) for each in living if id(each) not in around for child in each.children()}
    excluded, found = around | inside, []
    for each in living:
        if id(each) not in excluded:
            here = [id(p) for p in each.parameters() if id(p) in wanted]
            if here and not isinstance(each, nn.ParameterList | nn.ParameterDict):
                found.append((each, here[0]))
    return found


def _needs(module: nn.Module) -> str:
    """Parts of a module that hvkit must know to keep them equal on all ranks; may be empty."""
    parts = {
        "its batch norm": any(isinstance(each, _NormBase) for each in module.modules()),
        "its buffers": any(True for _ in module.buffers()),
        "its row-sparse gradients": sparse_layers(module),
    }
    return " and ".join(part for part, has in parts.items() if has)


def named_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> dict[str, nn.Parameter]:
    """The parameters of the models, and the ones that only optimizers have; each once."""
    names: dict[nn.Parameter, str] = {}
    for name, p in named_in(models, nn.Module.named_parameters).items():
        names.setdefault(p, name)  # another model may share it
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if not is_left_to_rank(p):
                    names.setdefault(p, f"optimizer {o} group {g} parameter {i}")
    return {name: p for p, name in names.items()}


def sparse_layers(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The layers whose gradients will be row-sparse, by name."""
    kinds = nn.Embedding | nn.EmbeddingBag
    named = model.named_modules()
    return {name: each for name, each in named if isinstance(each, kinds) and each.sparse}
