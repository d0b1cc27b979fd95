"""Whether ranks that train one model together get the same batches, and hold the same weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hvkit.communication.group import all_ranks
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.frameworks.pytorch.gradients.loss_counts import LossCounts
from hvkit.frameworks.pytorch.gradients.step_report import (
    checksum_of_rates,
    rates_of,
    refuse_other_rates,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import StageLinks
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import new_seed
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import call_key, tensors_in
from hvkit.wording import shortened


def require_same_batch(
    model: nn.Module,
    number: int,
    args: Any,
    kwargs: Any,
    optimizers: Sequence[Optimizer],
    losses: LossCounts,
    at_once: StageLinks,
    together: StageLinks,
) -> int:
    """Raise on every rank unless all that compute together have the same batch; a collective.

    Args:
        model: whole, or the part of this rank.
        number: of the forward pass.
        args, kwargs: the batch.
        optimizers: of the model, whose learning rates are compared as well.
        losses: of the pass before: if they are means over different numbers, rank 0 warns.
        at_once: the ranks that must make the same call.
        together: those of them that must have the same batch.

    Returns:
        A seed, the same on all ranks of ``together``.

    Raises:
        RanksDisagreeError: names the rank, or the learning rates.
        ValueError: a gradient of an input would be needed.
    """
    tensors = tensors_in((args, kwargs))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(
            "an input of a model in a mesh requires a gradient, which only some ranks could "
            "compute: pass one module that contains both models to hvkit.distribute, or detach "
            "the input"
        )
    mine = [number, torch.is_grad_enabled(), model.training, call_key(args, kwargs)]
    # Numbers on a GPU are compared less often, because the host waits for them.
    often = number & (number - 1) == 0
    content = [checksum(t) for t in tensors if often or not t.is_cuda]
    rates = checksum_of_rates(optimizers)
    numbers = hash_of(mine), hash_of(content), new_seed(), rates, losses.checksum()
    found = at_once.gather_numbers(numbers).tolist()
    everyone = dict(zip(at_once.ranks, found, strict=True))
    for ranks, column, what in (
        (at_once.ranks, 0, "makes another call"),
        (together.ranks, 1, "gets another batch"),
    ):
        for rank in ranks:
            if everyone[rank][column] != everyone[ranks[0]][column]:
                raise RanksDisagreeError(
                    f"forward pass {number} of {ranks_text(ranks)}, which train one "
                    f"model together: rank {rank} {what} than rank {ranks[0]}. They must get "
                    "the same batches in the same order: divide data with "
                    "hvkit.shard(loader, mesh=mesh), and seed random transformations equally"
                )
    if len({theirs[3] for theirs in everyone.values()}) > 1:
        named: list[Any] = [None] * len(at_once.ranks)
        dist.all_gather_object(named, rates_of(optimizers, fetch=False), group=at_once.group)
        refuse_other_rates(dict(zip(at_once.ranks, named, strict=True)))
    other_shapes = len({theirs[4] for theirs in everyone.values()}) > 1
    if (often or other_shapes) and len(at_once.ranks) > len(together.ranks):
        counts = at_once.gather_numbers(losses.numbers())
        losses.compare(counts, all_ranks(), for_shapes=other_shapes)
    return int(everyone[together.ranks[0]][2])


def require_same_weights(model: nn.Module, holders: StageLinks) -> None:
    """Raise on every rank unless all take parts of the same model; a collective.

    A script may have loaded weights since ``distribute``.

    Raises:
        RanksDisagreeError: names the rank and the weights.
    """
    named, ranks = dict(model.named_parameters()), holders.ranks
    everyone = holders.gather_numbers([checksum(p) for p in named.values()])
    for rank, same in zip(ranks, (everyone == everyone[0]).tolist(), strict=True):
        if apart := [name for name, equal in zip(named, same, strict=True) if not equal]:
            names = shortened(", ".join(apart), 200)
            raise RanksDisagreeError(
                f"rank {rank} holds other weights than rank {ranks[0]} in {names}: load "
                "weights before hvkit.distribute, or after it on every rank"
            )


def checksum(t: torch.Tensor) -> int:
    """A number that depends on the values of a tensor, and on the order of its samples."""
    data = t.detach().contiguous().flatten()
    if not data.numel():
        return 0
    size = data.numel() * data.element_size()
    words = data.view(torch.uint8).view(torch.int32 if size % 4 == 0 else torch.uint8)
    samples = t.shape[0] if t.dim() else 1
    rows = words.view(samples, -1).sum(1, dtype=torch.int64) if len(words) % samples == 0 else words
    places = torch.arange(1, len(rows) + 1, device=rows.device)
    return int((rows * places).sum(dtype=torch.int64))


def hash_of(things: Sequence[Any]) -> int:
    """A number for some things, the same in every process."""
    return zlib.crc32(repr(things).encode())
