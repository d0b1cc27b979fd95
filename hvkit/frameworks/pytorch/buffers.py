"""Buffers of models: the statistics of batch norm, and others that forward passes change.

``batch_norm="average"``: running statistics are averaged along with the gradients, so that any rank
can evaluate or save the model after a step. ``"sync"``: layers compute the statistics of each
training batch over all ranks' batches, as one process with the larger batch does, and so do
PyTorch's ``SyncBatchNorm`` layers by default. Ranks compare other buffers, and rank 0 warns if they
differ; ``hvkit.average_buffers`` averages them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hvkit.frameworks.pytorch.fingerprints import fingerprints_of
from hvkit.frameworks.pytorch.initial_state import own_elements
from hvkit.frameworks.pytorch.optimizers import named_in
from hvkit.frameworks.pytorch.wire import Wire, set_from_vector, to_vector
from hvkit.runtime import Group
from hvkit.sync.fingerprints import Compared, Rows, require_same_buffers, warn_of_integers
from hvkit.sync.port import kept_statistics
from hvkit.watch.calls import call


class RunningStatistics:
    """One vector of the running means and variances that are not the same on all ranks already."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [each for each in _statistics_in(model) if each[0] not in _synchronised]
        self._sizes = [getattr(module, name).numel() for module, name in self._kept]
        self.length = sum(self._sizes)
        # The buffers at the last call, their addresses, and vectors with the same memory.
        self._buffers: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._flat: list[torch.Tensor] = []

    def _flat_buffers(self) -> list[torch.Tensor]:
        """Vectors with the buffers' memory, which ``model.to()`` and the like replace."""
        buffers = [getattr(module, name) for module, name in self._kept]
        addresses = list(map(torch.Tensor.data_ptr, buffers))
        if addresses != self._addresses or not all(map(operator.is_, buffers, self._buffers)):
            self._buffers, self._addresses = buffers, addresses
            self._flat = [buffer.data.view(-1) for buffer in buffers]
        return self._flat

    def read_into(self, vector: torch.Tensor) -> None:
        if self._kept:  # one GPU kernel instead of one per buffer
            torch._foreach_copy_(list(torch.split(vector, self._sizes)), self._flat_buffers())

    def read(self) -> torch.Tensor:
        module, name = self._kept[0]
        vector = torch.zeros(self.length, device=getattr(module, name).device)
        self.read_into(vector)
        return vector

    def write(self, vector: torch.Tensor, *, also_in_evaluation: bool = False) -> None:
        """Copy a vector back. Through ``data``: a graph may hold the buffers for its backward."""
        pieces = zip(
            self._kept, self._flat_buffers(), torch.split(vector, self._sizes), strict=True
        )
        changed = [
            (buffer, piece)
            for (module, _), buffer, piece in pieces
            if module.training or also_in_evaluation
        ]
        if changed:
            torch._foreach_copy_([b for b, _ in changed], [piece for _, piece in changed])

    @torch.no_grad()
    def average(self, group: Group, name: str, *, also_in_evaluation: bool = False) -> None:
        """Average them over ranks; a collective. As ``write`` for layers in evaluation mode."""
        mean, wire = self.read(), Wire("batch norm", group)
        wire.wait(wire.start_mean(mean, name))
        self.write(mean, also_in_evaluation=also_in_evaluation)


class LastStatistics:
    """Statistics after the last step that was not skipped: a batch with a NaN spoils later ones."""

    def __init__(self, model: nn.Module) -> None:
        self._statistics = _statistics_in(model)
        self._kept = [getattr(module, name).detach().clone() for module, name in self._statistics]
        kept_statistics.add(self)

    def keep(self) -> None:
        if self._statistics:
            now = [getattr(module, name).data for module, name in self._statistics]
            torch._foreach_copy_(self._kept, now)

    def put_back(self) -> None:
        """Restore the values of layers whose statistics are no longer finite."""
        for (module, name), kept in zip(self._statistics, self._kept, strict=True):
            now = getattr(module, name).data
            if not torch.isfinite(now).all():
                now.copy_(kept)


def _statistics_in(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for name in ("running_mean", "running_var")
        if getattr(module, name) is not None
    ]


# Synchronised layers with the names of their collectives, and the ranks that take part.
_synchronised: WeakKeyDictionary[nn.Module, tuple[str, Group]] = WeakKeyDictionary()


def synchronise_batch_norm(layers: Sequence[nn.Module], group: Group) -> None:
    """Make batch-norm layers compute batch statistics over all ranks of a group.

    Their classes' ``forward`` looks for them, so that the modules do not change and pickle as
    before.
    """
    for module in layers:
        _patch_forward()
        _synchronised[module] = group.numbered("hvkit.batch_norm"), group


def batch_norm_of(model: nn.Module) -> list[_BatchNorm]:
    """The layers that can be synchronised; raise if one has a forward of its own."""
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in found:
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise ValueError(
                f'batch_norm="sync" cannot synchronise {type(module).__module__}.'
                f"{type(module).__qualname__}, which has a forward of its own: use "
                'torch.nn.BatchNorm layers, or batch_norm="average"'
            )
    return found


def made_synchronised(model: nn.Module) -> list[nn.Module]:
    """The model's ``SyncBatchNorm`` layers, which scripts for DDP make."""
    found = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    return [each for each in found if type(each).forward is nn.SyncBatchNorm.forward]


@functools.cache
def _patch_forward() -> None:
    for cls in (_BatchNorm, nn.SyncBatchNorm):
        cls.forward = _forward_of(cls.forward)  # type: ignore[method-assign]


def _forward_of(local: Any) -> Any:
    @functools.wraps(local)
    def forward(self: Any, input: torch.Tensor) -> Any:
        if self.training and self in _synchronised:
            return _normalise(self, input)
        return local(self, input)

    return forward


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _normalise(module: Any, x: torch.Tensor) -> torch.Tensor:
    module._check_input_dim(x)
    name, group = _synchronised[module]
    apply: Any = _Normalise.apply
    y, mean, variance, count = apply(x, module.weight, module.bias, module.eps, name, group)
    if module.track_running_stats and module.running_mean is not None:
        module.num_batches_tracked.add_(1)
        momentum = module.momentum
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        with torch.no_grad():
            module.running_mean.data.lerp_(mean.to(module.running_mean.dtype), momentum)
            module.running_var.data.lerp_(unbiased.to(module.running_var.dtype), momentum)
    return y  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """Ioffe and Szegedy, "Batch Normalization" (2015), over the batches of all ranks.

    It combines the ranks' means and variances as in Chan, Golub and LeVeque, "Updating formulae and
    a pairwise algorithm for computing sample variances" (1979).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, eps: float, name: str, group: Group
    ) -> Any:
        wire = Wire("batch norm", group)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = _statistics(wide, f"{name}.forward", wire)
        scale = torch.rsqrt(variance + eps)
        normalised = (wide - _channels(mean, x)) * _channels(scale, x)
        ctx.save_for_backward(normalised, scale, count, weight)
        ctx.name, ctx.wire = name, wire
        ctx.mark_non_differentiable(mean, variance, count)
        y = normalised
        if weight is not None:
            y = y * _channels(weight, x) + _channels(bias, x)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normalised, scale, count, weight = ctx.saved_tensors
        wide = grad.to(normalised.dtype)
        dims = [0, *range(2, wide.dim())]
        of_bias, of_weight = wide.sum(dims), (wide * normalised).sum(dims)
        factor = scale if weight is None else scale * weight
        # A sum over the ranks' losses: the gradients of the weights are averaged later.
        with call("backward()"):
            sums = ctx.wire.sum(torch.cat([of_bias, of_weight]), f"{ctx.name}.backward")
        mean_grad, mean_product = (sums / count).chunk(2)
        x_grad = wide - _channels(mean_grad, wide) - normalised * _channels(mean_product, wide)
        x_grad = (x_grad * _channels(factor, wide)).to(grad.dtype)
        if weight is None:
            return x_grad, None, None, None, None, None
        return x_grad, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None


def _statistics(
    x: torch.Tensor, name: str, wire: Wire
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel over all ranks' samples; the number of samples."""
    dims = [0, *range(2, x.dim())]
    samples = x.numel() // x.shape[1]
    if samples:
        variance, mean = torch.var_mean(x, dims, correction=0)
    else:
        variance = mean = x.new_zeros(x.shape[1])
    sent = torch.cat([mean, variance, x.new_tensor([samples])])
    with call("the forward pass of synchronised batch norm"):
        by_rank = wire.gather(sent[None], name)
    counts = by_rank[:, -1:]
    means, variances = by_rank[:, :-1].chunk(2, dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    spread = ((variances + (means - mean) ** 2) * counts).sum(0)
    return mean, spread / total, total


def _channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per channel, in a shape that broadcasts to ``x`` of shape (n, channels, ...)."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


@torch.no_grad()
def average(modules: Sequence[nn.Module]) -> None:
    """Average the buffers of modules over ranks; a collective. Through ``data``, as statistics."""
    everything = named_in(modules, operator.methodcaller("named_buffers"))
    named = {n: b for n, b in everything.items() if b.layout is torch.strided}
    first = require_same_buffers(
        [f"buffer {n}: {tuple(b.shape)}, {b.dtype}" for n, b in named.items()]
    )
    wire = Wire("batch norm")
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    rest: dict[str, torch.Tensor] = {}
    for name, each in named.items():
        if each.is_floating_point() or each.is_complex():
            groups.setdefault((each.dtype, each.device), []).append(own_elements(each.data))
        else:
            rest[name] = each
    for number, group in enumerate(groups.values()):
        flats = [to_vector(each) for each in group]
        mean = wire.wait(wire.start_mean(torch.cat(flats), f"hvkit.average_buffers.{number}"))
        for each, piece in zip(group, torch.split(mean, list(map(len, flats))), strict=True):
            set_from_vector(each, piece)
    if first:
        warn_of_integers(*_compared(rest))


def compared_in(
    model: nn.Module, is_distributed_parameter: Callable[[torch.Tensor], bool]
) -> tuple[list[Compared], list[Rows]]:
    """Tensors of a model that may differ between ranks, while a file has rank 0's; fingerprints.

    In a distributed model these are the buffers outside of normalisation layers, whose buffers
    hvkit averages, unless the script wants them to differ. In another model, all buffers and
    parameters.
    """
    apart = {n: p for n, p in model.named_parameters() if not is_distributed_parameter(p)}
    whole = len(apart) == sum(1 for _ in model.parameters())
    buffers, labels = _compared(dict(model.named_buffers() if whole else learnt_in(model)))
    rows = fingerprints_of(list(apart.values()))
    return [*buffers, *(Compared(f"parameter {n}") for n in apart)], [*labels, *rows]


def compared_of(models: Sequence[nn.Module]) -> tuple[list[Compared], list[Rows]]:
    """The buffers of distributed models outside of normalisation layers, and fingerprints."""
    return _compared(named_in(models, learnt_in))


def learnt_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers outside of normalisation layers, by name."""
    for prefix, module in model.named_modules():
        if not isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _compared(named: dict[str, torch.Tensor]) -> tuple[list[Compared], list[Rows]]:
    return [Compared(f"buffer {name}") for name in named], fingerprints_of(list(named.values()))
