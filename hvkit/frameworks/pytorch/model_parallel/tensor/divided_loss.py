"""The cross entropy of logits of which each rank has those of some classes.

Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): the ranks exchange three numbers for each
target in place of the logits.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from hvkit.frameworks.pytorch.model_parallel.tensor.exchanges import largest, summed
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import place_in_part


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    mesh: DeviceMesh,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """As ``torch.nn.functional.cross_entropy`` of all classes, on every rank.

    Args:
        logits: of this rank's classes, (classes), (samples, classes) or (samples, classes, ...).
        target: the class of each sample.
        mesh: the tensor group.
        ignore_index: a target that does not count.
        reduction: "mean", "sum" or "none".

    Raises:
        RuntimeError: a target is no class.
    """
    dim = min(1, logits.dim() - 1)
    exact = torch.promote_types(logits.dtype, torch.float32)
    kind = exact if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    counted = target != ignore_index
    place, elsewhere = place_in_part(
        target.where(counted, 0), logits.shape[dim], mesh.get_local_rank(), mesh.size()
    )
    logits = logits.to(exact)
    logits = logits - largest(logits.detach().amax(dim, keepdim=True), mesh)
    own = logits.gather(dim, place.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0)
    losses = summed(logits.exp().sum(dim), mesh).log() - summed(own, mesh)
    losses = losses.masked_fill(~counted, 0)
    if reduction != "none":
        losses = losses.sum()
    return (losses / counted.sum() if reduction == "mean" else losses).to(kind)
