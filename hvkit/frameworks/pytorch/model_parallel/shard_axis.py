"""Weights of a stage, divided among the ranks along the shard axis by PyTorch's ``fully_shard``.

Each rank along the axis trains on batches of its own. Weights are gathered before a layer computes
and dropped after it, and each rank gets its part of the mean gradient. Along the data axis the same
parts are held again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.divided_state.fully_shard import (
    CountedGather,
    CountedScatter,
    follow_hooks,
    parts_of,
    units_of,
)


def shard(
    model: nn.Module,
    own: Mapping[str, nn.Parameter],
    kept: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    mesh: DeviceMesh,
    name: str,
) -> dict[str, nn.Parameter]:
    """Divide a rank's parameters; a collective of the ranks along the axis.

    Args:
        model: PyTorch replaces its parameters by new ones.
        own: this rank's, by name.
        kept: those of them that stay whole.
        cuts: modules after which stages end; none without a pipeline.
        called: modules that the model's forward calls.
        mesh: of the shard axis, or of the data and the shard axis.
        name: of the model, for waits.

    Returns:
        This rank's parameters by name, some of them new.
    """
    held = set(own.values()) - set(kept)
    parts = _parts_within(model, held, cuts, called) if cuts else [*units_of(model), model]
    for part in parts:
        each: Any = fully_shard(part, mesh=mesh)
        each.set_custom_all_gather(CountedGather(name, _not_noted))
        each.set_custom_reduce_scatter(CountedScatter(name))
    now = dict(model.named_parameters())
    return {name: now[name] for name in own}


def _not_noted() -> None:
    """In place of a note of the order of layers, which each forward pass of a mesh compares."""


def _parts_within(
    model: nn.Module,
    held: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
) -> list[nn.Module]:
    """Modules that are gathered one at a time: layers of lists, then what is outside of these.

    Weights are there only while their module is called, so one whose weights another module reads,
    such as the last projection of ``nn.MultiheadAttention``, is gathered with that one.
    """
    at_cuts = {model.get_submodule(cut) for cut in cuts}
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for unit in units_of(model):
        has_cut = not at_cuts.isdisjoint(set(unit.modules()) - {unit})
        if not has_cut and all(p in held for p in unit.parameters()):
            found.append(unit)
            taken.update(unit.parameters())
    uses = Counter(p for each in model.modules() for p in each.parameters(recurse=False))
    outer = {""}
    for name in called:
        while name := name.rpartition(".")[0]:
            outer.add(name)
    for name, module in model.named_modules():
        own = list(module.parameters())
        alone = all(p in held and p not in taken and uses[p] == 1 for p in own)
        if own and alone and name in called and name not in outer:
            found.append(module)
    return found


def follow(
    optimizers: Sequence[Optimizer],
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> None:
    """Let optimizers update new parameters in place of old ones of the same names."""
    new: dict[torch.Tensor, nn.Parameter] = {p: after[name] for name, p in before.items()}
    follow_hooks(new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new.get(p, p) for p in group["params"]]
        for p in [p for p in optimizer.state if p in new and new[p] is not p]:
            optimizer.state[new[p]] = parts_of(optimizer.state.pop(p), new[p])
