"""Weights of a stage, divided among the ranks along the shard axis by PyTorch's ``fully_shard``.

Each rank along the axis trains on batches of its own. Weights are gathered before a layer computes
and dropped after it, and each rank gets its part of the mean gradient. Along the data axis the same
parts are held again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hvkit.frameworks.pytorch.divided_state.fully_shard import shard_parts, units_of


def shard(
    model: nn.Module,
    own: Mapping[str, nn.Parameter],
    kept: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    lookers: Collection[str],
    mesh: DeviceMesh,
    name: str,
) -> dict[str, nn.Parameter]:
    """Divide a rank's parameters; a collective of the ranks along the axis.

    Args:
        model: PyTorch replaces its parameters by new ones.
        kept: those of them that stay whole.
        cuts: modules after which stages end; none without a pipeline.
        lookers: those that look at values, by which they may call what is inside of them.
        mesh: of the shard axis, or of the data and the shard axis.

    Returns:
        This rank's parameters by name, some of them new.
    """
    held = set(own.values()) - set(kept)
    inside = {m for looker in lookers for m in list(model.get_submodule(looker).modules())[1:]}
    units = [unit for unit in units_of(model) if unit not in inside]
    parts = [*units, model]
    if cuts:
        parts = _parts_within(model, units, inside, held, cuts, called, lookers)
    # Each forward pass of a mesh compares more than the order of layers.
    shard_parts(parts, mesh, name, lambda number: None)
    for part in parts if lookers else ():
        _agree_on_gradients(part, mesh)
    now = dict(model.named_parameters())
    return {name: now[name] for name in own}


def _agree_on_gradients(part: Any, mesh: DeviceMesh) -> None:
    """Let each rank have zeros for what other ranks' batches have used, such as an expert.

    PyTorch would put together the gradients that each rank happens to have.
    """
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        own = group.post_backward
        group.post_backward = functools.partial(_with_zeros, group, own, mesh)


@torch.no_grad()
def _with_zeros(group: Any, own: Callable[..., Any], mesh: DeviceMesh, *unused: Any) -> Any:
    held = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
    mine = [
        each.unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None
        for each in held
    ]
    used = torch.tensor(mine, dtype=torch.int32, device=mesh.device_type)
    for axis in range(mesh.ndim):
        if held:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for each, here, anywhere in zip(held, mine, used.tolist(), strict=True):
        if anywhere and not here:
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
    return own(*unused)


def _parts_within(
    model: nn.Module,
    units: Collection[nn.Module],
    inside: Collection[nn.Module],
    held: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    lookers: Collection[str],
) -> list[nn.Module]:
    """Modules that are gathered one at a time: layers of lists, then what is outside of these.

    Weights are there only while their module is called, so one whose weights another module reads,
    such as the last projection of ``nn.MultiheadAttention``, is gathered with that one. So are
    those that a module calls or not by the values it has, as an expert.
    """
    at_cuts = {model.get_submodule(cut) for cut in cuts}
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for unit in units:
        has_cut = not at_cuts.isdisjoint(set(unit.modules()) - {unit})
        if not has_cut and all(p in held for p in unit.parameters()):
            found.append(unit)
            taken.update(unit.parameters())
    uses = Counter(p for each in model.modules() for p in each.parameters(recurse=False))
    outer = {""}
    for name in called:
        while name := name.rpartition(".")[0]:
            outer.add(name)
    outer -= set(lookers)
    for name, module in model.named_modules():
        own = list(module.parameters())
        alone = all(p in held and p not in taken and uses[p] == 1 for p in own)
        if own and alone and name in called and name not in outer and module not in inside:
            found.append(module)
    return found
