"""Buffers that forward passes change: their means over ranks, and whether they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.fingerprints import fingerprints_of
from hvkit.frameworks.pytorch.initial_state import own_elements
from hvkit.frameworks.pytorch.local_weights import flat_copy, set_flat
from hvkit.frameworks.pytorch.modules import named_in
from hvkit.sync.fingerprints import Compared, Rows, require_same_buffers, warn_of_integers


@torch.no_grad()
def average(modules: Sequence[nn.Module]) -> None:
    """Average the buffers of modules over ranks; a collective.

    This writes through ``data``, because a graph that still needs its backward pass may hold them.
    """
    held = {n: b for n, b in named_in(modules, _buffers).items() if b.layout is torch.strided}
    first = require_same_buffers(
        [f"buffer {n}: {tuple(b.shape)}, {b.dtype}" for n, b in held.items()]
    )
    wire = Wire("batch norm")
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for each in held.values():
        if each.is_floating_point() or each.is_complex():
            groups.setdefault((each.dtype, each.device), []).append(own_elements(each.data))
    for number, group in enumerate(groups.values()):
        flats = [flat_copy(each) for each in group]
        mean = wire.wait(wire.start_mean(torch.cat(flats), f"hvkit.average_buffers.{number}"))
        for each, piece in zip(group, torch.split(mean, list(map(len, flats))), strict=True):
            set_flat(each, piece)
    if first:
        rest = {n: b for n, b in held.items() if not (b.is_floating_point() or b.is_complex())}
        warn_of_integers(*_compared(rest))


def compared_in(
    model: nn.Module, is_distributed_parameter: Callable[[torch.Tensor], bool]
) -> tuple[list[Compared], list[Rows]]:
    """What of a model may differ between ranks although a file holds rank 0's, and fingerprints.

    These are its buffers, without those of normalisation layers if it was distributed: hvkit
    averages them, unless the script wants each rank's own. Of a model that was not distributed
    these are the parameters, too.

    Args:
        model: one that is saved.
        is_distributed_parameter: whether a distributed model has the parameter.
    """
    apart = {n: p for n, p in model.named_parameters() if not is_distributed_parameter(p)}
    whole = len(apart) == sum(1 for _ in model.parameters())
    buffers, labels = _compared(dict(_buffers(model) if whole else learnt_in(model)))
    rows = fingerprints_of(list(apart.values()))
    return [*buffers, *(Compared(f"parameter {n}") for n in apart)], [*labels, *rows]


def compared_of(models: Sequence[nn.Module]) -> tuple[list[Compared], list[Rows]]:
    """What the forward passes of distributed models learn outside of normalisation layers."""
    return _compared(named_in(models, learnt_in))


def learnt_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers outside of normalisation layers, by name."""
    for prefix, module in model.named_modules():
        if not isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_buffers()


def _compared(named: dict[str, torch.Tensor]) -> tuple[list[Compared], list[Rows]]:
    return [Compared(f"buffer {name}") for name in named], fingerprints_of(list(named.values()))
