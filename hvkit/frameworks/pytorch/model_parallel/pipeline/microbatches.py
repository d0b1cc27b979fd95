"""Divides the arguments of a model's call into micro-batches, joins their outputs, and checks them.

The check compares a pipeline with the model, and micro-batches with the whole batch. The first
fails if a stage needs something that a cut does not pass on. The second fails if samples depend on
each other, if an input has no dimension of samples, or if a model computes a loss that is no mean
over samples. Without the check the weights would differ silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hvkit.frameworks.pytorch.model_parallel.side_outputs import (
    OutputPath,
    SideOutputs,
    undoing_side_effects,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import copied_call, samples_in, tensors_in
from hvkit.main_rank import warn_once
from hvkit.pipeline.gpipe import sizes_of

if TYPE_CHECKING:
    from hvkit.frameworks.pytorch.model_parallel.pipeline.pipelined_model import Pipeline


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch: the arguments of the model's call, and how many samples they have."""

    args: Any
    kwargs: Any
    samples: int


class Divider:
    """Divides the calls of one model into micro-batches.

    It divides tensors whose first dimension is as long as the batch. An argument that once had
    another length, such as a mask, has this one by chance, and stays whole.
    """

    def __init__(self) -> None:
        # By structure of the call, the numbers of arguments that are the same in each micro-batch.
        self._whole: set[tuple[str, int]] = set()

    def __call__(
        self, args: Any, kwargs: Any, count: int, *, even: bool = False
    ) -> list[MicroBatch]:
        """Micro-batches whose sizes differ by at most one sample; fewer if there are fewer samples.

        ``even`` makes the largest number of micro-batches, up to ``count``, that have equal sizes.
        """
        flat, spec = tree_flatten((args, kwargs))
        samples = samples_in(args, kwargs)
        count = max(min(count, samples), 1)  # also of an empty batch
        if even:
            count = next(m for m in range(count, 0, -1) if samples % m == 0)
        sizes, call = sizes_of(samples, count), str(spec)
        columns: list[Sequence[Any]] = []
        for i, t in enumerate(flat):
            if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] != samples:
                self._whole.add((call, i))
            of_samples = isinstance(t, torch.Tensor) and t.dim() and (call, i) not in self._whole
            columns.append(torch.split(t, sizes) if of_samples else [t] * count)
        rows = [tree_unflatten([column[i] for column in columns], spec) for i in range(count)]
        return [
            MicroBatch(some, named, size) for (some, named), size in zip(rows, sizes, strict=True)
        ]


def ignored_unevenly(
    targets: Iterable[torch.Tensor], sizes: Sequence[int], index: int | None = None
) -> bool:
    """Whether a loss ignores different fractions of the integer targets of micro-batches.

    Then the mean of their losses is not the loss of the batch. ``index`` None: all negative targets
    are ignored.
    """
    samples = sum(sizes)
    for t in targets:
        is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
        if not is_integer or not t.dim() or not t.numel() or t.shape[0] % samples:
            continue
        ignored = (t < 0) if index is None else (t == index)
        rows = t.shape[0] // samples
        parts = torch.split(ignored, [n * rows for n in sizes])
        if len({float(part.double().mean()) for part in parts}) > 1:
            return True
    return False


def joined(
    outputs: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], side_outputs: int = 0
) -> tuple[list[torch.Tensor], list[int]]:
    """The output tensors of a whole batch from those of its micro-batches, of these sizes.

    Tensors with rows for each sample are concatenated. Other floats are means over samples, such as
    a loss, and integers are counts. The last ``side_outputs`` tensors may have any shape. Also
    returns, by tensor, how many rows of it each sample has; 0 for numbers without samples.
    """
    columns = list(zip(*outputs, strict=True))
    returned, total = len(columns) - side_outputs, sum(sizes)
    rows = [_rows_of(column, sizes, side_output=i >= returned) for i, column in enumerate(columns)]
    found = []
    for column, each in zip(columns, rows, strict=True):
        parts = [t.detach() for t in column]
        if len(parts) > 1 and not each:
            if parts[0].is_floating_point():
                parts = [t * (n / total) for t, n in zip(parts, sizes, strict=True)]
            parts = [torch.stack(parts).sum(0).to(parts[0].dtype)]
        found.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return found, rows


def _rows_of(column: Sequence[torch.Tensor], sizes: Sequence[int], *, side_output: bool) -> int:
    first = column[0]
    rows = first.shape[0] // max(sizes[0], 1) if first.dim() else 0
    if len(sizes) == 1:  # it is the whole
        return rows
    if rows and all(t.shape[0] == rows * n for t, n in zip(column, sizes, strict=True)):
        return rows
    if side_output and any(t.shape != first.shape for t in column):
        raise ValueError(
            f"the model keeps tensors of shapes {[tuple(t.shape) for t in column]} for "
            f"micro-batches of {list(sizes)} samples, without the batch as their first dimension: "
            "keep them with it, or pass microbatches=1"
        )
    if first.dim() and not side_output:
        raise ValueError(
            f"the model returns a tensor of shape {tuple(first.shape)} for {sizes[0]} samples: "
            "in a pipeline every output must have the batch as its first dimension, "
            "or be a single number"
        )
    if not first.is_floating_point() and not side_output:
        raise ValueError(
            "the model returns a single integer, such as a count, of which micro-batches give "
            "several: return a tensor with an entry for each sample"
        )
    return 0


def gradients_of_parts(
    gradients: Sequence[torch.Tensor | None], sizes: Sequence[int], rows: Sequence[int]
) -> list[list[torch.Tensor | None]]:
    """By micro-batch, the gradients of its outputs from those of the joined outputs."""
    total = sum(sizes)
    columns = [
        [None] * len(sizes)
        if g is None
        else [g]
        if len(sizes) == 1
        else list(torch.split(g, [n * each for n in sizes]))
        if each
        else [g * (n / total) for n in sizes]
        for g, each in zip(gradients, rows, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


# How far outputs of a batch and of its micro-batches may differ, relative to the largest value.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_FEW_BITS = 5e-2


class ResultComparison:
    """Compares a pipeline with ``expected``, by ``plain_result``; some micro-batches with the
    batch.
    """

    def __init__(self, pipeline: Pipeline, expected: list[torch.Tensor] | None) -> None:
        self._pipeline, self._expected = pipeline, expected
        # How many calls there were, and whether one with ignored targets was compared.
        self._calls = 0
        self._compared_ignored = False

    def _compares(self, args: Any, kwargs: Any, batches: Sequence[MicroBatch]) -> bool:
        """Whether to compare the micro-batches of this call with the whole batch.

        The first call is compared. A model that computes its loss may give another mean later, as
        when padding begins: calls 2, 4, 8, ..., and the first one with ignored targets are, too.
        """
        self._calls += 1
        if len(batches) == 1 or self._calls == 1:
            return self._calls == 1
        known = self._pipeline.result_of(batches)
        if known is None or all(spec.shape for spec in known[1]):
            return False
        ignored = not self._compared_ignored and ignored_unevenly(
            tensors_in((args, kwargs)), [batch.samples for batch in batches]
        )
        self._compared_ignored |= ignored
        return ignored or self._calls & (self._calls - 1) == 0

    def check(self, args: Any, kwargs: Any, batches: list[MicroBatch]) -> None:
        """Compare the outputs of micro-batches with those of the whole batch; a collective.

        Layers are in evaluation meanwhile, so that dropout and batch norm do not depend on the
        batch. A model whose results are random even then cannot be compared.
        """
        if not self._compares(args, kwargs, batches):
            return
        pipeline = self._pipeline
        source = pipeline.stages.rank_of[pipeline.last]
        device_type = pipeline.channel.device.type
        with _trial(pipeline.modules, [pipeline.channel.device] if device_type == "cuda" else []):
            parts, *whole = (
                pipeline.forward(pipeline.divide(*copied_call(args, kwargs), count=count), seed)
                for seed, count in enumerate((len(batches), 1, 1))
            )
        found: list[str | None] | None = None
        if pipeline.channel.rank == source:
            once, again = (tensors_in(each.result[0]) for each in whole)
            side_outputs = pipeline.staged.side_outputs_in(whole[0].result[0])
            returned = len(once) - side_outputs
            mean, _ = joined(list(map(tensors_in, parts.result)), parts.sizes, side_outputs)
            expected, self._expected = self._expected or once, None
            few_bits = pipeline.has_few_bits or torch.is_autocast_enabled(device_type)
            found = [
                _difference(a, b, few_bits=few_bits)
                for a, b in (
                    (once, expected),
                    (mean[:returned], once[:returned]),
                    (again, once),
                    (mean[returned:], once[returned:]),
                )
            ]
        of_pipeline, of_microbatches, random, of_side_outputs = pipeline.channel.object_from_rank(
            source, found
        )
        if random and (of_pipeline or of_microbatches or of_side_outputs):
            warn_once(
                "random results",
                "the model's results are random in evaluation, too, so hvkit cannot see whether "
                "micro-batches give the result of the whole batch: its samples must not depend on "
                "each other, and its inputs have the batch as their first dimension",
            )
        elif of_pipeline:
            raise ValueError(
                f"in a pipeline the model gives another result than without: {of_pipeline}. A "
                "later stage needs something that no cut passes on, such as a buffer that depends "
                "on activations, or what a module changes apart from its result: choose other cuts "
                "with stages=[...], or return what is needed"
            )
        elif of_microbatches:
            raise ValueError(
                f"in {len(batches)} micro-batches the model gives another result than for the "
                f"whole batch: {of_microbatches}. Its samples must not depend on each other, its "
                "inputs must have the batch as their first dimension (batch_first=True in "
                "recurrent layers), and a loss that it computes itself must be a mean over "
                "samples, without padding: compute the loss outside of the model, or pass "
                "microbatches=1"
            )
        elif of_side_outputs:
            warn_once(
                "kept results in micro-batches",
                f"what the model keeps for the script, such as an auxiliary loss, is another mean "
                f"over {len(batches)} micro-batches than for the whole batch: {of_side_outputs}. "
                "Training uses the mean over micro-batches, as one process would that trains in "
                "them. For that of the whole batch, keep what it is computed from, with the batch "
                "as its first dimension, or pass microbatches=1",
            )


@contextmanager
def _trial(modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> Iterator[None]:
    """Surrounds forwards in evaluation of the first module, and undoes all that they change."""
    buffers = [
        (module, name, b, b.data, b.clone())
        for module in modules
        for name, b in module.named_buffers(recurse=False)
    ]
    caches = torch.is_autocast_cache_enabled()
    try:
        # Autocast must not use the weights again that it casts here without a gradient.
        torch.set_autocast_cache_enabled(False)
        with torch.no_grad(), torch.random.fork_rng(devices), undoing_side_effects(modules[0]):
            for module in modules:
                module.training = False
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        for module, name, buffer, data, value in buffers:
            module._buffers[name] = buffer
            buffer.data = data.copy_(value)


def plain_result(
    model: nn.Module, args: Any, kwargs: Any, passed_on: Sequence[OutputPath] = ()
) -> list[torch.Tensor] | None:
    """The outputs of an undivided model in evaluation; None if its inputs are on another device."""
    tensors = tensors_in((args, kwargs))
    if len({t.device for t in (*tensors, *model.parameters())}) > 1:
        return None
    with _trial(list(model.modules()), [t.device for t in tensors[:1] if t.is_cuda]):
        side_outputs = SideOutputs(model, passed_on)
        side_outputs.begin()
        args, kwargs = copied_call(args, kwargs)
        return tensors_in((model.forward(*args, **kwargs), side_outputs.tree()))


def _difference(
    found: list[torch.Tensor], whole: list[torch.Tensor], *, few_bits: bool
) -> str | None:
    """How outputs differ; None if they are equal except for rounding."""
    for number, (output, expected) in enumerate(zip(found, whole, strict=True)):
        if output.shape != expected.shape:
            return f"output {number} is of shape {tuple(output.shape)}, not {tuple(expected.shape)}"
        if not output.is_floating_point() or not output.numel():
            if not torch.equal(output, expected):
                return f"output {number} holds other integers"
            continue
        a, b = output.double(), expected.double()
        # Masks give infinities, which are equal as they are.
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).abs().max()
        scale = b[b.isfinite()].abs().amax() if b.isfinite().any() else b.new_zeros(())
        relative = float(apart / scale.clamp(min=1e-30))
        exact = _TOLERANCE.get(output.dtype, _TOLERANCE_OF_FEW_BITS)
        if not relative <= (_TOLERANCE_OF_FEW_BITS if few_bits else exact):
            return f"output {number} by {relative:.1e} of its largest value"
    return None
