"""Whether a pipeline gives what the model gives, and micro-batches what the whole batch gives.

The first holds unless a stage needs something that a cut does not pass on. The second does not if
samples depend on each other, if an input has no dimension of samples, or if a model computes a loss
that is no mean over samples. Otherwise the weights would differ without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.kept_results import (
    KeptResults,
    Path,
    left_as_before,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import (
    MicroBatch,
    ignored_unevenly,
    joined,
    rows_in,
)
from hvkit.frameworks.pytorch.model_parallel.tensor_trees import copied_call, tensors_in
from hvkit.main_rank import warn_once

if TYPE_CHECKING:
    from hvkit.frameworks.pytorch.model_parallel.pipeline.pipelined_model import Pipeline

# How far apart the outputs of a batch and of its micro-batches may be, relative to the largest.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_FEW_BITS = 5e-2


class ResultComparison:
    """Compares a pipeline with the whole model, and in some calls micro-batches with the batch.

    Args:
        pipeline: this rank's part.
        expected: by ``plain_result``, on the rank of the last stage, for the first call.
    """

    def __init__(self, pipeline: Pipeline, expected: list[torch.Tensor] | None) -> None:
        self._pipeline, self._expected = pipeline, expected
        # Calls in several micro-batches, and whether one with targets left out was compared.
        self._calls = 0
        self._compared_ignored = False

    def _compares(self, args: Any, kwargs: Any, batches: Sequence[MicroBatch]) -> bool:
        """Whether to compare the micro-batches of this call with the whole batch.

        The first ones are. A model that computes its loss may give another mean later, where
        padding begins: then also after 2, 4, 8, ... calls, and where targets are left out first.
        """
        self._calls += 1
        if len(batches) == 1:
            return self._calls == 1
        known = self._pipeline.result_of(batches)
        if self._calls == 1 or known is None or all(spec.shape for spec in known[1]):
            return self._calls == 1
        ignored = not self._compared_ignored and ignored_unevenly(
            tensors_in((args, kwargs)), [batch.samples for batch in batches]
        )
        self._compared_ignored |= ignored
        return ignored or self._calls & (self._calls - 1) == 0

    def check(self, args: Any, kwargs: Any, batches: list[MicroBatch]) -> None:
        """Compare what a call's micro-batches give with what the whole batch gives; a collective.

        Layers are in evaluation meanwhile: then dropout and batch norm do not depend on the batch.
        A model whose results are random even then cannot be compared.

        Raises:
            ValueError: the results differ.
        """
        if not self._compares(args, kwargs, batches):
            return
        pipeline = self._pipeline
        source = pipeline.stages.rank_of[pipeline.last]
        kind = pipeline.links.device.type
        with _trial(pipeline.modules, [pipeline.links.device] if kind == "cuda" else []):
            parts, *whole = (
                pipeline.forward(pipeline.divide(*copied_call(args, kwargs), count=count), seed)
                for seed, count in enumerate((len(batches), 1, 1))
            )
        found: list[str | None] | None = None
        if pipeline.links.rank == source:
            once, again = (tensors_in(each.result[0]) for each in whole)
            own = len(once) - (kept := pipeline.staged.kept_in(whole[0].result[0]))
            found_parts = [tensors_in(each) for each in parts.result]
            rows = rows_in(found_parts, parts.sizes, kept)
            mean = joined(found_parts, parts.sizes, rows)
            expected, self._expected = self._expected or once, None
            few_bits = pipeline.has_few_bits or torch.is_autocast_enabled(kind)
            found = [
                _difference(a, b, few_bits=few_bits)
                for a, b in (
                    (once, expected),
                    (mean[:own], once[:own]),
                    (again, once),
                    (mean[own:], once[own:]),
                )
            ]
        of_pipeline, text, by_chance, of_kept = pipeline.links.object_from_rank(source, found)
        if (of_pipeline or text or of_kept) and by_chance:
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
                "on activations, or what a module changes beside its result: choose other cuts "
                "with stages=[...], or return what is needed"
            )
        elif text:
            raise ValueError(
                f"in {len(batches)} micro-batches the model gives another result than for the "
                f"whole batch: {text}. Its samples must not depend on each other, its inputs must "
                "have the batch as their first dimension (batch_first=True in recurrent layers), "
                "and a loss that it computes itself must be a mean over samples, without padding: "
                "compute the loss outside of the model, or pass microbatches=1"
            )
        elif of_kept:
            warn_once(
                "kept results in micro-batches",
                f"what the model keeps for the script, such as an auxiliary loss, is another mean "
                f"over {len(batches)} micro-batches than for the whole batch: {of_kept}. Training "
                "uses the mean over micro-batches, as one process would that trains in them. For "
                "that of the whole batch, keep what it is computed from, with the batch as its "
                "first dimension, or pass microbatches=1",
            )


@contextmanager
def _trial(modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> Iterator[None]:
    """Surrounds a forward of a model in evaluation that leaves everything as it was.

    Args:
        modules: of the model, which is the first of them.
        devices: whose random numbers it may draw, beside the CPU.
    """
    buffers = [
        (module, name, b, b.data, b.clone())
        for module in modules
        for name, b in module.named_buffers(recurse=False)
    ]
    caches = torch.is_autocast_cache_enabled()
    try:
        # Weights that autocast casts here have no gradient, and must not be used again.
        torch.set_autocast_cache_enabled(False)
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            left_as_before(modules[0]),
        ):
            for module in modules:
                module.training = False
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        for module, name, buffer, data, value in buffers:
            module._buffers[name] = buffer
            buffer.data = data.copy_(value)


def plain_result(
    model: nn.Module, args: Any, kwargs: Any, passed_on: Sequence[Path] = ()
) -> list[torch.Tensor] | None:
    """The tensors that a model returns in evaluation, and keeps, before it is divided.

    None if it is on another device than its inputs.
    """
    tensors = tensors_in((args, kwargs))
    if len({t.device for t in (*tensors, *model.parameters())}) > 1:
        return None
    with _trial(list(model.modules()), [t.device for t in tensors[:1] if t.is_cuda]):
        kept = KeptResults(model, passed_on)
        kept.begin()
        args, kwargs = copied_call(args, kwargs)
        return tensors_in((model.forward(*args, **kwargs), kept.tree()))


def _difference(
    found: list[torch.Tensor], whole: list[torch.Tensor], *, few_bits: bool
) -> str | None:
    """What is wrong with outputs; None if they are equal but for rounding."""
    for number, (own, expected) in enumerate(zip(found, whole, strict=True)):
        if own.shape != expected.shape:
            return f"output {number} is of shape {tuple(own.shape)}, not {tuple(expected.shape)}"
        if not own.is_floating_point() or not own.numel():
            if not torch.equal(own, expected):
                return f"output {number} holds other integers"
            continue
        a, b = own.double(), expected.double()
        # Masks give infinities, which are equal as they are.
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).abs().max()
        scale = b[b.isfinite()].abs().amax() if b.isfinite().any() else b.new_zeros(())
        relative = float(apart / scale.clamp(min=1e-30))
        exact = _TOLERANCE.get(own.dtype, _TOLERANCE_OF_FEW_BITS)
        if not relative <= (_TOLERANCE_OF_FEW_BITS if few_bits else exact):
            return f"output {number} by {relative:.1e} of its largest value"
    return None
