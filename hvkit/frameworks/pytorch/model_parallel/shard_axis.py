"""Divides the weights of a stage along the shard axis, by PyTorch's ``fully_shard``.

Each rank along the axis trains on batches of its own. Weights are gathered before a layer computes
and freed after it, and each rank gets its shard of the mean gradient. Ranks along the data axis
hold the same shards.
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
    unsharded: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    value_readers: Collection[str],
    mesh: DeviceMesh,
    name: str,
) -> dict[str, nn.Parameter]:
    """Divide a rank's parameters, and return them, some replaced by new ones; a collective.

    Stages end after the modules ``cuts``. What the modules ``value_readers`` call may depend on
    values. The mesh is that of the shard axis, or of the data and the shard axis.
    """
    sharded = set(own.values()) - set(unsharded)
    inside = {
        m for reader in value_readers for m in list(model.get_submodule(reader).modules())[1:]
    }
    units = [unit for unit in units_of(model) if unit not in inside]
    parts = [*units, model]
    if cuts:
        parts = _parts_within(model, units, inside, sharded, cuts, called, value_readers)
    # A forward pass in a mesh compares more than the order of layers.
    shard_parts(parts, mesh, name, lambda number: None)
    for part in parts if value_readers else ():
        _agree_on_gradients(part, mesh)
    now = dict(model.named_parameters())
    return {name: now[name] for name in own}


def _agree_on_gradients(part: Any, mesh: DeviceMesh) -> None:
    """Give a rank zero gradients for parameters, as of an expert, that only other ranks have used.

    PyTorch would reduce the gradients that each rank happens to have.
    """
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        group.post_backward = functools.partial(_with_zeros, group, group.post_backward, mesh)


@torch.no_grad()
def _with_zeros(group: Any, own: Callable[..., Any], mesh: DeviceMesh, *unused: Any) -> Any:
    parameters = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
    used = [
        each.unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None
        for each in parameters
    ]
    used_anywhere = torch.tensor(used, dtype=torch.int32, device=mesh.device_type)
    for axis in range(mesh.ndim):
        if parameters:
            dist.all_reduce(used_anywhere, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for each, here, anywhere in zip(parameters, used, used_anywhere.tolist(), strict=True):
        if anywhere and not here:
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
    return own(*unused)


def _parts_within(
    model: nn.Module,
    units: Collection[nn.Module],
    inside: Collection[nn.Module],
    sharded: Collection[nn.Parameter],
    cuts: Collection[str],
    called: Collection[str],
    value_readers: Collection[str],
) -> list[nn.Module]:
    """Modules that are gathered one at a time: layers of lists, then modules outside of these.

    Weights are there only while their module is called. So a module whose weights another one
    reads, as the last projection of ``nn.MultiheadAttention``, is gathered with that one. So is a
    module that another calls or not by values, as an expert.
    """
    at_cuts = {model.get_submodule(cut) for cut in cuts}
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for unit in units:
        has_cut = not at_cuts.isdisjoint(set(unit.modules()) - {unit})
        if not has_cut and all(p in sharded for p in unit.parameters()):
            found.append(unit)
            taken.update(unit.parameters())
    uses = Counter(p for each in model.modules() for p in each.parameters(recurse=False))
    outer = {""}
    for name in called:
        while name := name.rpartition(".")[0]:
            outer.add(name)
    outer -= set(value_readers)
    for name, module in model.named_modules():
        own = list(module.parameters())
        unshared = all(p in sharded and p not in taken and uses[p] == 1 for p in own)
        if own and unshared and name in called and name not in outer and module not in inside:
            found.append(module)
    return found
