"""Refuses models and optimizers that hvkit cannot keep equal on all ranks, or cannot divide.

Wrappers of models and ``torch.distributed`` would average gradients as well. Another optimizer than
the one that was passed would change weights unseen. The one that was passed may update more than
the modules that were: a single parameter, such as a temperature, is averaged like the parameters of
a module. A module has more: its buffers must begin as rank 0's, and its batch norm has statistics.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence, Set
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvkit import runtime
from hvkit.frameworks.pytorch import torch_distributed
from hvkit.frameworks.pytorch.optimizers import (
    is_left_to_rank,
    optimizers_in_attributes,
    optimizers_inside,
    parameters_of,
    stepping_in,
)
from hvkit.main_rank import warn_once
from hvkit.strategies import FullyShard
from hvkit.sync.port import warn_of_own_models

# Class names, so that looking for them imports nothing, and what to do instead.
_WRAPPERS = {
    "DistributedDataParallel": "pass the plain module (model.module) and its optimizer",
    "FullyShardedDataParallel": "pass the module as it was before it was wrapped",
    "ShardedDataParallel": "pass the module as it was before it was wrapped",
    "FSDPModule": "pass the module without fully_shard",
    "DeepSpeedEngine": "pass the plain module (engine.module) and a plain optimizer",
}
_LIBRARIES = ("torch", "fairscale", "deepspeed")


def refuse_other_wrappers(model: nn.Module) -> None:
    """Raise if another library already distributes this model."""
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "model is wrapped in DataParallel, which itself divides batches: pass the plain module "
            "(model.module) and its optimizer"
        )
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _WRAPPERS and cls.__module__.split(".")[0] in _LIBRARIES:
                part = f"model part {name!r}" if name else "model"
                raise TypeError(
                    f"{part} is wrapped in {cls.__name__}, which itself distributes training: "
                    f"{_WRAPPERS[cls.__name__]}"
                )
    for name, parameter in model.named_parameters():
        if is_divided(parameter):
            raise TypeError(
                f"parameter {name} is a DTensor, which torch.distributed divides among processes: "
                "pass the module as it was before fully_shard or parallelize_module"
            )
    if (processes := processes_of_torch_distributed()) > 1:
        raise ValueError(two_at_once(processes))


def refuse_changes_in_forward(model: nn.Module) -> None:
    """Raise if the forward pass changes weights depending on this rank's batch, of several."""
    if runtime.size() == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            cls, limit = type(module).__name__, module.max_norm
            raise ValueError(
                f"{f'layer {name!r}' if name else 'the model'} is an {cls} with max_norm={limit}: "
                "its forward pass changes the rows that a rank looks up, so the ranks' weights "
                "would differ. Make it without max_norm, and on every rank call "
                f"`with torch.no_grad(): layer.weight.renorm_({module.norm_type}, 0, {limit})` "
                "after each optimizer.step()"
            )


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether processes of ``torch.distributed`` hold parts of this tensor."""
    # Its class takes half a second to import.
    return any(each.__name__ == "DTensor" for each in type(tensor).__mro__)


_IN_MESH = "_hvkit_in_mesh"


def mark_in_mesh(parameter: torch.Tensor, *, pipeline: bool) -> None:
    """Remember that the ranks of a mesh hold this parameter, or a part of it."""
    # No weak reference: PyTorch exchanges no tensor that has one.
    setattr(parameter, _IN_MESH, pipeline)


def is_in_mesh(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, _IN_MESH)


def is_in_pipeline(parameter: torch.Tensor) -> bool:
    """Whether it is one of a model of which each rank holds a stage."""
    return getattr(parameter, _IN_MESH, False)


def processes_of_torch_distributed() -> int:
    """The number of processes of ``torch.distributed``; 1 if only hvkit has started it."""
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialised and not torch_distributed.started() else 1


def two_at_once(processes: int) -> str:
    """The error message for ``torch.distributed`` with several processes beside hvkit."""
    return (
        f"torch.distributed is initialised with {processes} processes beside hvkit: both would "
        "divide the data and average the gradients. Train with one of them: remove "
        "torch.distributed.init_process_group and whatever calls it, or remove hvkit.distribute"
    )


def refuse_what_cannot_be_divided(
    strategy: FullyShard, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Raise for models and optimizers that PyTorch's ``fully_shard`` cannot divide."""
    owner: dict[torch.Tensor, int] = {}
    for number, model in enumerate(models):
        if isinstance(model, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"{type(model).__name__} has no forward, in which {strategy} gathers weights: pass "
                "the module that calls its elements"
            )
        first: tuple[str, torch.dtype] | None = None
        for name, p in model.named_parameters():
            if p.dim() == 0:
                raise ValueError(
                    f"parameter {name} is a single number, which {strategy} cannot divide: give it "
                    "the shape (1,)"
                )
            first = first or (name, p.dtype)
            if p.dtype is not first[1]:
                raise ValueError(
                    f"parameter {name} is of {p.dtype}, {first[0]} of {first[1]}: {strategy} takes "
                    "one dtype; use torch.autocast for mixed precision"
                )
            if owner.setdefault(p, number) != number:  # each model gathers and drops its own
                raise ValueError(
                    f"models {owner[p]} and {number} share the parameter {name}, but {strategy} "
                    "divides each model for itself: pass one module that contains both"
                )
        refuse_sparse(strategy, model)
    for each in optimizers:
        others = [p for p in parameters_of(each) if p not in owner]
        if others:
            raise ValueError(
                f"{type(each).__name__} holds {len(others)} parameters that are not the model's, "
                f"and {strategy} divides a model only: make them parameters of the model"
            )


def refuse_sparse(divided_by: object, model: nn.Module) -> None:
    """Raise for layers whose gradients ``fully_shard`` cannot divide for a strategy or mesh."""
    for name in sparse_layers(model):
        raise ValueError(
            f"{name} has row-sparse gradients, which {divided_by} cannot divide: make it with "
            "sparse=False"
        )


def sparse_layers(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The layers whose gradients will be row-sparse, by name."""
    kinds = nn.Embedding | nn.EmbeddingBag
    named = model.named_modules()
    return {name: each for name, each in named if isinstance(each, kinds) and each.sparse}


def checked_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer; raise if it is none of PyTorch's, or calls no hooks around its step."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer of a PyTorch model must be a torch.optim.Optimizer, or a list of them, "
            f"got {type(optimizer).__module__}.{type(optimizer).__qualname__}: pass the one whose "
            "step() updates this model; a script that updates weights by hand needs one, too"
        )
    if not stepping_in(optimizer):
        raise TypeError(
            f"optimizer {type(optimizer).__name__} does not call super().__init__(parameters, "
            "defaults), so it calls no hooks around its step, and holds no optimizer that does: "
            "add the call, or pass the optimizer that it was made from"
        )
    if type(optimizer).__module__.startswith("horovod."):
        raise TypeError(
            "optimizer is already wrapped by Horovod's DistributedOptimizer: pass the plain "
            "torch.optim optimizer, hvkit.distribute does the averaging"
        )
    return optimizer


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


def refuse_uninitialised(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor of a lazy module, or on the meta device."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape yet (a lazy module): run one batch through the model, then make "
            "the optimizer, then call hvkit.distribute"
        )
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: load or initialise the weights first")


_ours: WeakSet[Optimizer] = WeakSet()
# Optimizers that had no parameter of a distributed model, with their number of parameters then.
_harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def refuse_other_optimizers(
    optimizers: Sequence[Optimizer], is_averaged: Callable[[torch.Tensor], bool]
) -> None:
    """Let only these optimizers, and those of earlier calls, update distributed models."""
    _ours.update(optimizers)
    watch_steps(is_averaged)


@functools.cache
def watch_steps(is_averaged: Callable[[torch.Tensor], bool]) -> None:
    """Look at each step of an optimizer that was not passed; ``is_averaged`` as above."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in _ours:
            _refuse_if_distributed(optimizer, is_averaged)

    register_optimizer_step_pre_hook(before)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_if_distributed(
    optimizer: Optimizer, is_averaged: Callable[[torch.Tensor], bool]
) -> None:
    parameters = parameters_of(optimizer)
    if _harmless.get(optimizer) == len(parameters):
        return
    around_one_of_ours = any(each in _ours for each in optimizers_inside(optimizer))
    if not around_one_of_ours and any(map(is_averaged, parameters)):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} updates parameters of a model that was passed "
            "to hvkit.distribute, but was not passed itself, so nothing keeps it equal on all "
            "ranks: use the optimizer that was passed, and pass optimizers of later phases in the "
            "same call: distribute(model, [first, second])"
        )
    # One of ours may update copies, such as master weights, with an optimizer that it holds.
    inside_ours = any(optimizer in optimizers_in_attributes(each) for each in _ours)
    # Tensors that are no parameters may be inputs or codes, which differ between ranks.
    of_model = any(isinstance(p, nn.Parameter) for p in parameters)
    # Horovod's wrapper averages by itself, and so may PyTorch where nothing was passed to hvkit.
    by_others = type(optimizer).__module__.startswith("horovod.") or (
        not _ours and torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if of_model and not around_one_of_ours and not inside_ours and not by_others:
        warn_of_own_models(type(optimizer).__name__)
    _harmless[optimizer] = len(parameters)
