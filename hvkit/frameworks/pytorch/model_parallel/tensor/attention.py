"""``nn.MultiheadAttention`` of which each rank has some of the heads."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from hvkit.frameworks.pytorch.model_parallel.tensor.activations import (
    for_all,
    total_for_all,
)
from hvkit.frameworks.pytorch.model_parallel.tensor.exchanges import summed
from hvkit.frameworks.pytorch.model_parallel.tensor.random_numbers import SameRandomNumbers


class DividedHeads:
    """The forward of an ``nn.MultiheadAttention`` whose parameters are this rank's parts.

    ``torch.nn.functional.multi_head_attention_forward`` takes whole weights only.

    Args:
        mesh: the tensor group.
        random: the random numbers of the group.
        along_sequence: whether each rank goes on with its part of the sequence.
    """

    def __init__(
        self, mesh: DeviceMesh, random: SameRandomNumbers, *, along_sequence: bool = False
    ) -> None:
        self._mesh = mesh
        self._random = random
        self._along_sequence = along_sequence

    def __call__(
        self,
        module: nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``nn.MultiheadAttention.forward``, with its shapes."""
        batched = query.dim() == 3
        q, k, v = self._projected(module, (query, key, value), batched)
        mask = self._mask(module.num_heads, attn_mask, key_padding_mask, q)
        drop = module.dropout if module.training else 0.0
        weights = None
        with self._random.different(q.device) if drop else nullcontext():
            if need_weights:
                scores = q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)
                weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
                weights = F.dropout(weights, drop)
                y = weights @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, mask, drop)
        y = F.linear(y.transpose(1, 2).flatten(2), module.out_proj.weight)
        if not batched:
            y = y.squeeze(0)
        elif not module.batch_first:
            y = y.transpose(0, 1)
        bias, along = module.out_proj.bias, self._along_sequence
        y = total_for_all(y, bias, self._mesh, along_sequence=along)
        if weights is None:
            return y, None
        weights = self._of_all_heads(weights, module.num_heads, average_attn_weights)
        return y, weights if batched else weights.squeeze(0)

    def _projected(
        self, module: nn.MultiheadAttention, inputs: tuple[torch.Tensor, ...], batched: bool
    ) -> list[torch.Tensor]:
        """Queries, keys and values of this rank's heads: (batch, heads, length, head size)."""
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        bias = module.in_proj_bias
        biases = [None] * 3 if bias is None else bias.chunk(3)
        # One sum of gradients for each tensor, not for each use.
        copies = {id(x): for_all(x, self._mesh) for x in inputs}
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
        self,
        heads: int,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        query: torch.Tensor,
    ) -> torch.Tensor | None:
        """Both masks as one that is added to the scores: (batch or 1, heads or 1, 1 or T, S)."""
        masks = []
        if attn_mask is not None:
            mask = _added(attn_mask, query.dtype)
            if mask.dim() == 3:
                mask = mask.view(-1, heads, *mask.shape[1:])
                mask = mask.chunk(self._mesh.size(), 1)[self._mesh.get_local_rank()]
            else:
                mask = mask[None, None]
            masks.append(mask)
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, query.dtype)
            masks.append(padding.reshape(query.shape[0], 1, 1, padding.shape[-1]))
        return sum(masks[1:], masks[0]) if masks else None

    def _of_all_heads(self, weights: torch.Tensor, heads: int, average: bool) -> torch.Tensor:
        """The attention weights that ``nn.MultiheadAttention`` returns, on every rank."""
        if average:
            return summed(weights.sum(1) / heads, self._mesh)
        parts = DTensor.from_local(weights, self._mesh, [Shard(1)], run_check=False)
        return parts.full_tensor()


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers to add: where a boolean one is true, attention is not allowed."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
