"""Divides the layers of a model among the ranks of a tensor group.

Parameters stay the same objects, with this rank's part as their data: optimizers, gradient reducers
and scalers see plain parameters. A column layer returns a ``DTensor``, until its row layer has
summed over the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.rank_groups import SameRandomNumbers
from hvkit.frameworks.pytorch.model_parallel.tensor import divided_tensors
from hvkit.frameworks.pytorch.model_parallel.tensor.activations import (
    DividedActivations,
    divided,
    for_all,
    gathered,
    mark_fused,
    part_for_this_rank,
    total_for_all,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import (
    LayerDivision,
    Placement,
    index_in_part,
    part_of,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import TensorPlan, placements_of
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import call_structure


def divide(
    model: nn.Module, plan: TensorPlan, mesh: DeviceMesh, random: SameRandomNumbers
) -> dict[str, Placement]:
    """Keep this rank's part of a model's weights, and make the forward use it.

    All ranks of the tensor group hold the same weights before, and get the same inputs afterwards.
    Parameters stay the same objects. Optimizers must divide their state in the same way, with
    ``part_of``. Hooks on gradients are attached afterwards, since weights change their shape.

    Returns the placement of each divided parameter, by its name.
    """
    _follow_checkpoints()
    here = {
        name: each
        for name, each in plan.divisions.items()
        # Parameters of other stages of a pipeline are on the meta device.
        if not all(p.is_meta for p in model.get_submodule(name).parameters(recurse=False))
    }
    plan = replace(plan, divisions=here)
    placements = placements_of(model, plan.divisions)
    index, ways = mesh.get_local_rank(), mesh.size()
    for name, placement in placements.items():
        p = model.get_parameter(name)
        p.data = part_of(p.data, placement, index, ways)
        if p.grad is not None:
            p.grad = part_of(p.grad, placement, index, ways)
    attentions = {
        n for n in plan.divisions if isinstance(model.get_submodule(n), nn.MultiheadAttention)
    }
    along_sequence = {name for region in plan.sequence_regions for name in region.begins}
    for name, division in plan.divisions.items():
        module: Any = model.get_submodule(name)
        if name in attentions:
            along = f"{name}.out_proj".removeprefix(".") in along_sequence
            module.forward = MethodType(_heads(mesh, random, along), module)
        elif name.rpartition(".")[0] not in attentions:  # its out_proj has no call of its own
            if isinstance(module, nn.Embedding):
                forward = _lookup(mesh, division, name in along_sequence)
            elif division.style == "experts":
                forward = _experts(_own_forward(module), mesh, division)
            elif division.style == "row":
                forward = _row(mesh, division, name in along_sequence)
            else:
                forward = _column(mesh, division)
            module.forward = MethodType(forward, module)
    of_regions = {name for region in plan.sequence_regions for name in region.modules}
    # Gradient checkpointing may recompute a block between two layers of a pair.
    around = {name[:i] for name in plan.divisions for i, c in enumerate(name) if c == "."}
    for name in {*of_regions, *around, ""}:
        region: Any = model.get_submodule(name)
        wrapped = _inside(region, DividedActivations(mesh, random), None if name else random)
        region.forward = MethodType(wrapped, region)
    return placements


def _column(mesh: DeviceMesh, division: LayerDivision) -> Callable[..., torch.Tensor]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if not division.by_itself and not DividedActivations.active():
            raise HvkitError(
                f"a {type(self).__name__} layer, of which each rank of a tensor group holds a "
                "part, was called outside the forward of its model: call the model itself"
            )
        weight = self.weight.t() if division.transposed else self.weight
        y = F.linear(for_all(input, mesh), weight, getattr(self, "bias", None))
        if division.by_itself:
            return divided_tensors.all_gather(y, mesh)
        product = divided(y, mesh, y.dim() - 1)
        return mark_fused(product) if division.parts > 1 else product

    return forward


def _row(
    mesh: DeviceMesh, division: LayerDivision, along_sequence: bool
) -> Callable[..., torch.Tensor]:
    """The forward of a layer with this rank's part of the inputs: the products are summed."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if division.transposed else self.weight
        y = F.linear(part_for_this_rank(input, mesh), weight)
        return total_for_all(y, getattr(self, "bias", None), mesh, along_sequence=along_sequence)

    return forward


def _experts(
    run: Callable[..., torch.Tensor], mesh: DeviceMesh, division: LayerDivision
) -> Callable[..., torch.Tensor]:
    """The forward of experts with this rank's part of each: what they compute is summed."""

    def for_parts(t: torch.Tensor) -> torch.Tensor:
        return for_all(t, mesh) if t.is_floating_point() else gathered(t)

    @functools.wraps(run)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if call_structure(args, kwargs) not in division.calls:
            raise HvkitError(
                f"{type(self).__name__}, whose experts are divided along the tensor axis, was "
                "called with other arguments than in the first call of the model: call it in the "
                "same way, or pass plan= without it"
            )
        args, kwargs = tree_map_only(torch.Tensor, for_parts, (args, kwargs))
        parameters: dict[str, Any] = self._parameters
        whole = {name: parameters[name] for name, how in division.experts.items() if how is None}
        try:
            for n, p in whole.items():
                parameters[n] = divided_tensors.divide_by_ranks(p, mesh)
            y = run(self, *args, **kwargs)
        finally:
            parameters.update(whole)
        return total_for_all(y, None, mesh, along_sequence=False)

    return forward


def _lookup(
    mesh: DeviceMesh, division: LayerDivision, along_sequence: bool
) -> Callable[..., torch.Tensor]:
    def features(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        return divided_tensors.all_gather(F.embedding(input, self.weight, self.padding_idx), mesh)

    def rows(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        """Rows of other ranks are zeros, and the sum has them from there."""
        count, index = len(self.weight), mesh.get_local_rank()
        local, elsewhere = index_in_part(input, count, index, mesh.size())
        padding = None if self.padding_idx is None else self.padding_idx - count * index
        found = F.embedding(local, self.weight, padding if padding in range(count) else None)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return total_for_all(found, None, mesh, along_sequence=along_sequence)

    return features if division.style == "column" else rows


def _heads(
    mesh: DeviceMesh, random: SameRandomNumbers, along_sequence: bool
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The forward of an ``nn.MultiheadAttention`` with this rank's heads.

    ``torch.nn.functional.multi_head_attention_forward`` takes whole weights only.
    """

    @functools.wraps(nn.MultiheadAttention.forward)
    def forward(
        self: nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batched = query.dim() == 3
        q, k, v = _projected(self, (query, key, value), batched, mesh)
        mask = _mask(self.num_heads, attn_mask, key_padding_mask, q, mesh)
        drop = self.dropout if self.training else 0.0
        weights = None
        with random.different(q.device) if drop else nullcontext():
            if need_weights:
                scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
                weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
                weights = F.dropout(weights, drop)
                y = weights @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, mask, drop)
        y = F.linear(y.transpose(1, 2).flatten(2), self.out_proj.weight)
        if not batched:
            y = y.squeeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        y = total_for_all(y, self.out_proj.bias, mesh, along_sequence=along_sequence)
        if weights is None:
            return y, None
        if average_attn_weights:
            weights = divided_tensors.all_reduce(weights.sum(1) / self.num_heads, mesh)
        else:
            weights = divided(weights, mesh, 1).full_tensor()
        return y, weights if batched else weights.squeeze(0)

    return forward


def _projected(
    module: nn.MultiheadAttention,
    inputs: tuple[torch.Tensor, ...],
    batched: bool,
    mesh: DeviceMesh,
) -> list[torch.Tensor]:
    """Queries, keys and values of this rank's heads: (batch, heads, length, head size)."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    bias = module.in_proj_bias
    biases = [None] * 3 if bias is None else bias.chunk(3)
    # One sum of gradients for each tensor, not for each use.
    copies = {id(x): for_all(x, mesh) for x in inputs}
    projected = []
    for x, weight, b in zip(inputs, weights, biases, strict=True):
        each = F.linear(copies[id(x)], weight, b)
        if not batched:
            each = each.unsqueeze(0)
        elif not module.batch_first:
            each = each.transpose(0, 1)
        projected.append(each.view(*each.shape[:2], -1, module.head_dim).transpose(1, 2))
    return projected


def _mask(
    heads: int,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    query: torch.Tensor,
    mesh: DeviceMesh,
) -> torch.Tensor | None:
    """Both masks as one that is added to the scores: (batch or 1, heads or 1, 1 or T, S)."""
    masks = []
    if attn_mask is not None:
        mask = _additive(attn_mask, query.dtype)
        if mask.dim() == 3:
            mask = mask.view(-1, heads, *mask.shape[1:])
            mask = mask.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        else:
            mask = mask[None, None]
        masks.append(mask)
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, query.dtype)
        masks.append(padding.reshape(query.shape[0], 1, 1, padding.shape[-1]))
    return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores: minus infinity where a boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


@functools.cache
def _follow_checkpoints() -> None:
    """Divide activations also in functions that ``torch.utils.checkpoint`` calls in backward."""
    recompute: Any = torch.utils.checkpoint
    without_reentry = recompute._checkpoint_without_reentrant_generator
    with_reentry = recompute.CheckpointFunction.forward

    @functools.wraps(without_reentry)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return without_reentry(DividedActivations.computing_again(function), *args, **kwargs)

    @functools.wraps(with_reentry)
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return with_reentry(ctx, DividedActivations.computing_again(function), *args)

    recompute._checkpoint_without_reentrant_generator = generator
    recompute.CheckpointFunction.forward = staticmethod(forward)


def _inside(
    module: nn.Module, activations: DividedActivations, random: SameRandomNumbers | None
) -> Callable[..., Any]:
    """The forward of a module in which activations are divided.

    The whole model also draws the group's random numbers, and returns whole tensors. Modules
    inside it need this for themselves: gradient checkpointing calls them during backward.
    """
    run = _own_forward(module)

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if activations.active():
            return run(self, *args, **kwargs)
        with random or nullcontext(), activations:
            output = run(self, *args, **kwargs)
        return gathered(output) if random is not None else output

    return forward


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module as it is now, as a function of the module and its arguments."""
    before: Any = vars(module).get("forward")
    if before is None:
        return type(module).forward
    # In a copy of a model a bound method belongs to the original.
    return before.__func__ if isinstance(before, MethodType) else lambda _, *a, **k: before(*a, **k)
