"""Whether micro-batches give what the whole batch gives.

They do not if samples depend on each other, if an input has no dimension of samples, or if a model
computes a loss that is no mean over samples: the weights would differ without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvkit.frameworks.pytorch.model_parallel.dry_run import (
    attributes_kept,
    copied_call,
    tensors_in,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import (
    MicroBatch,
    ignored_unevenly,
    joined,
)
from hvkit.main_rank import warn_once

if TYPE_CHECKING:
    from hvkit.frameworks.pytorch.model_parallel.pipeline.gpipe import Pipeline

# How far apart the outputs of a batch and of its micro-batches may be, relative to the largest.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_FEW_BITS = 5e-2


class SampleIndependence:
    """Compares, in some calls of a pipeline, micro-batches with the whole batch.

    Args:
        pipeline: this rank's part.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        # Calls in several micro-batches, and whether one with targets left out was compared.
        self._calls = 0
        self._compared_ignored = False

    def check(self, args: Any, kwargs: Any, batches: list[MicroBatch]) -> None:
        """Compare, if this call is one of those; then a collective.

        Args:
            args, kwargs: of the call.
            batches: its micro-batches, at least two.

        Raises:
            ValueError: the results differ.
        """
        if self._compares(args, kwargs, batches):
            self._require(args, kwargs, batches)

    def _compares(self, args: Any, kwargs: Any, batches: Sequence[MicroBatch]) -> bool:
        """Whether to compare the micro-batches of this call with the whole batch.

        The first ones are. A model that computes its loss may give another mean later, where
        padding begins: then also after 2, 4, 8, ... calls, and where targets are left out first.
        """
        self._calls += 1
        known = self._pipeline.result_of(batches)
        if self._calls == 1 or known is None or all(spec.shape for spec in known[1]):
            return self._calls == 1
        ignored = not self._compared_ignored and ignored_unevenly(
            tensors_in((args, kwargs)), [batch.samples for batch in batches]
        )
        self._compared_ignored |= ignored
        return ignored or self._calls & (self._calls - 1) == 0

    @torch.no_grad()
    def _require(self, args: Any, kwargs: Any, batches: list[MicroBatch]) -> None:
        """Compare what micro-batches give with what the whole batch gives; a collective.

        Layers are in evaluation meanwhile: then dropout and batch norm do not depend on the batch.
        A model whose results are random even then cannot be compared.

        Raises:
            ValueError: the results differ.
        """
        pipeline = self._pipeline
        source, found = pipeline.stages.rank_of[pipeline.last], None
        devices = [pipeline.links.device] if pipeline.links.device.type == "cuda" else []
        caches = torch.is_autocast_cache_enabled()
        buffers = {
            b: b.clone() for module in pipeline.modules for b in module.buffers(recurse=False)
        }
        try:
            # Weights that autocast casts here have no gradient, and must not be used again.
            torch.set_autocast_cache_enabled(False)
            evaluation = [False] * len(pipeline.modules)
            with (
                torch.random.fork_rng(devices),
                pipeline.in_modes(evaluation),
                attributes_kept(pipeline.modules),
            ):
                parts, *whole = (
                    pipeline.forward(pipeline.divide(*copied_call(args, kwargs), count=count), seed)
                    for seed, count in enumerate((len(batches), 1, 1))
                )
            if pipeline.rank == source:
                once, again = (tensors_in(each.result[0]) for each in whole)
                mean = joined([tensors_in(each) for each in parts.result], parts.sizes)
                found = _largest_difference(mean, once), _largest_difference(again, once)
        finally:
            torch.set_autocast_cache_enabled(caches)
            for buffer, value in buffers.items():
                buffer.copy_(value)
        text, by_chance = pipeline.links.object_from_rank(source, found)
        if text and by_chance:
            warn_once(
                "random results",
                "the model's results are random in evaluation, too, so hvkit cannot see whether "
                "micro-batches give the result of the whole batch: its samples must not depend on "
                "each other, and its inputs have the batch as their first dimension",
            )
        elif text:
            raise ValueError(
                f"in {len(batches)} micro-batches the model gives another result than for the "
                f"whole batch: {text}. Its samples must not depend on each other, its inputs must "
                "have the batch as their first dimension (batch_first=True in recurrent layers), "
                "and a loss that it computes itself must be a mean over samples, without padding: "
                "compute the loss outside of the model, or pass microbatches=1"
            )


def _largest_difference(found: list[torch.Tensor], whole: list[torch.Tensor]) -> str | None:
    """What is wrong with outputs; None if they are equal but for rounding."""
    for number, (mine, theirs) in enumerate(zip(found, whole, strict=True)):
        if mine.shape != theirs.shape:
            return f"output {number} is of shape {tuple(mine.shape)}, not {tuple(theirs.shape)}"
        if not mine.is_floating_point() or not mine.numel():
            if not torch.equal(mine, theirs):
                return f"output {number} holds other integers"
            continue
        a, b = mine.double(), theirs.double()
        # Masks give infinities, which are equal as they are.
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).abs().max()
        scale = b[b.isfinite()].abs().amax() if b.isfinite().any() else b.new_zeros(())
        relative = float(apart / scale.clamp(min=1e-30))
        if not relative <= _TOLERANCE.get(mine.dtype, _TOLERANCE_OF_FEW_BITS):
            return f"output {number} by {relative:.1e} of its largest value"
    return None
