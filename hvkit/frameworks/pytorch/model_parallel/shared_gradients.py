"""Gradients of parameters that several ranks hold whole, and of which each computes a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.pipeline.stage_messages import StageLinks
from hvkit.transport.traffic import count, of_allreduce


class SharedGradients:
    """Adds up what ranks have computed of such a gradient, so that all have the same.

    Args:
        of_stages: the parameters that several stages of a pipeline use, with the ranks that do.
        kept: the parameters of this rank that the shard axis does not divide.
        links: to the other stages.
        copies: the ranks along the data and shard axes, which have other batches.
        device: of this rank's part.
        equalised: whether stages use one gradient although each has rounded its own.
    """

    def __init__(
        self,
        of_stages: Mapping[nn.Parameter, dist.ProcessGroup],
        kept: Iterable[nn.Parameter],
        links: StageLinks,
        copies: StageLinks,
        device: torch.device,
        *,
        equalised: bool,
    ) -> None:
        self._of_stages, self._kept = of_stages, dict.fromkeys(kept)
        self._links, self._copies, self._device = links, copies, device
        self._equalised = equalised

    def before_backward(self, around: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Prepare for the gradients of a backward pass; return what to call when they are there."""
        end = around()
        # What this pass contributes is added up apart from what earlier ones have.
        before = {p: p.grad for p in {**self._of_stages, **self._kept} if p.requires_grad}
        for p in before:
            p.grad = None

        def add_up() -> None:
            for p, earlier in before.items():
                if not self._has_gradient(p):
                    p.grad = earlier
                    continue
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                if p in self._of_stages:
                    self._sum(gradient, self._of_stages[p])
                if p in self._kept:
                    self._sum(gradient, self._copies.group)
                    gradient /= len(self._copies.ranks)
                p.grad = gradient if earlier is None else earlier.add_(gradient)
            end()
            if self._equalised:
                self._equalise()

        return add_up

    def _equalise(self) -> None:
        """Use the same gradient on all stages: each has rounded its own, among other gradients."""
        for p, group in self._of_stages.items():
            if p.grad is not None:
                source = dist.get_process_group_ranks(group)[0]
                if source == dist.get_rank():
                    count("gradients", p.grad.nbytes)
                with self._links.waiting():
                    dist.broadcast(p.grad, source, group=group)

    def _has_gradient(self, p: nn.Parameter) -> bool:
        """Whether any rank that adds to the gradient of a parameter has one; a collective."""
        found = torch.tensor([float(p.grad is not None)], device=self._device)
        groups = [self._of_stages[p]] if p in self._of_stages else []
        for group in [*groups, self._copies.group] if p in self._kept else groups:
            with self._links.waiting():
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return bool(found)

    def _sum(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        count("gradients", of_allreduce(gradient.nbytes, group.size()))
        with self._links.waiting():
            dist.all_reduce(gradient, group=group)
