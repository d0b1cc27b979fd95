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
    from hvkit.frameworks.pytorch.model_parallel.pipeline.gpipe import Pipeline

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

    def check(self, args: Any, kwargs: Any, batches: list[MicroBatch]) -> None:
        """Compare, if this call is one of those; then a collective.

        Args:
            args, kwargs: of the call.
            batches: its micro-batches.

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
        try:
            # Weights that autocast casts here have no gradient, and must not be used again.
            torch.set_autocast_cache_enabled(False)
            evaluation = [False] * len(pipeline.modules)
            with (
                torch.random.fork_rng(devices),
                pipeline.in_modes(evaluation),
                left_as_before(pipeline.modules[0]),
                _buffers_kept(pipeline.modules),
            ):
                parts, *whole = (
                    pipeline.forward(pipeline.divide(*copied_call(args, kwargs), count=count), seed)
                    for seed, count in enumerate((len(batches), 1, 1))
                )
            if pipeline.rank == source:
                once, again = (tensors_in(each.result[0]) for each in whole)
                own = len(once) - (kept := pipeline.staged.kept_in(whole[0].result[0]))
                found_parts = [tensors_in(each) for each in parts.result]
                rows = rows_in(found_parts, parts.sizes, kept)
                mean = joined(found_parts, parts.sizes, rows)
                expected, self._expected = self._expected, None
                found = (
                    None if expected is None else self._difference(once, expected),
                    self._difference(mean[:own], once[:own]),
                    self._difference(again, once),
                    self._difference(mean[own:], once[own:]),
                )
        finally:
            torch.set_autocast_cache_enabled(caches)
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

    def _difference(self, found: list[torch.Tensor], whole: list[torch.Tensor]) -> str | None:
        """What is wrong with outputs; None if they are equal but for rounding."""
        kind = self._pipeline.links.device.type
        few_bits = torch.is_autocast_enabled(kind) or self._pipeline.has_few_bits
        return _largest_difference(found, whole, few_bits=few_bits)


@contextmanager
def _buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts buffers back that a forward changes meanwhile, or replaces."""
    before = [
        (module, name, b, b.data, b.clone())
        for module in modules
        for name, b in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, data, value in before:
            module._buffers[name] = buffer
            buffer.data = data.copy_(value)


@torch.no_grad()
def plain_result(
    model: nn.Module, args: Any, kwargs: Any, passed_on: Sequence[Path] = ()
) -> list[torch.Tensor] | None:
    """The tensors that a model returns in evaluation, and keeps, before it is divided.

    None if it is on another device than its inputs.
    """
    tensors = tensors_in((args, kwargs))
    if len({t.device for t in (*tensors, *model.parameters())}) > 1:
        return None
    modules = list(model.modules())
    modes = [module.training for module in modules]
    caches = torch.is_autocast_cache_enabled()
    devices = [t.device for t in tensors[:1] if t.is_cuda]
    try:
        torch.set_autocast_cache_enabled(False)
        with torch.random.fork_rng(devices), left_as_before(model), _buffers_kept(modules):
            model.eval()
            kept = KeptResults(model, passed_on)
            kept.begin()
            args, kwargs = copied_call(args, kwargs)
            return tensors_in((model.forward(*args, **kwargs), kept.tree()))
    finally:
        torch.set_autocast_cache_enabled(caches)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _largest_difference(
    found: list[torch.Tensor], whole: list[torch.Tensor], *, few_bits: bool
) -> str | None:
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
        exact = _TOLERANCE.get(mine.dtype, _TOLERANCE_OF_FEW_BITS)
        if not relative <= (_TOLERANCE_OF_FEW_BITS if few_bits else exact):
            return f"output {number} by {relative:.1e} of its largest value"
    return None
