"""``reduce_gradients``: averages gradients when the script says so."""

from __future__ import annotations

import sys
from typing import Any

from hvkit import runtime
from hvkit.watch.calls import named


@named("hvkit.reduce_gradients")
def reduce_gradients(model_or_optimizer: Any) -> None:
    """Average over ranks what the gradients of a PyTorch model hold now.

        loss.backward()  # averages
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)  # each rank draws its own noise
        hvkit.reduce_gradients(model)
        optimizer.step()

    ``backward()`` averages gradients itself. Call this before ``step()`` if the script then changes
    them differently on each rank: adds noise, sets ``p.grad`` to a sum of clipped gradients of its
    own samples, or rounds at random. The step then uses the mean of what the ranks made of them.
    Changes that are the same on every rank, such as clipping and unscaling, need no call.

    It also ends a series of passes that is shorter than ``accumulate``, as at the end of an epoch:
    call it after the last ``backward()`` and before clipping. For a DataLoader that ``hvkit.shard``
    returned there is no need to.

    It averages all gradients of the model that was passed to ``hvkit.distribute``, also if you pass
    a part of it; a gradient that is None counts as zero, unless it is None on all ranks. Averaging
    twice is the same as once. A compression that keeps what it has not sent (``TopK``,
    ``PowerSGD``, ``DeMo``) can average once in a step only: pass ``accumulate`` one more than the
    backward passes of a step, so that this call does. With one process it does nothing, and nor
    does it with strategies that do not average whole gradients: ``LocalSGD`` and the like, where
    each rank changes its own, and ``FullyShard``, where each gradient is on one rank.

    Args:
        model_or_optimizer: a ``torch.nn.Module`` or ``torch.optim.Optimizer`` that was passed to
            ``hvkit.distribute``.

    Raises:
        TypeError: it is neither; Keras averages inside ``optimizer.apply``, so change gradients
            before.
        ValueError: it was not passed to ``hvkit.distribute``; a backward pass is running; or a
            compression has averaged the gradients of this step already.
        RankLostError: another rank has ended, or waits in another call.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model_or_optimizer, torch.nn.Module):
        parameters = list(model_or_optimizer.parameters())
    elif torch is not None and isinstance(model_or_optimizer, torch.optim.Optimizer):
        parameters = [p for group in model_or_optimizer.param_groups for p in group["params"]]
    else:
        raise TypeError(
            "hvkit.reduce_gradients takes a torch.nn.Module or a torch.optim.Optimizer, got "
            f"{type(model_or_optimizer).__module__}.{type(model_or_optimizer).__qualname__}; Keras "
            "averages inside optimizer.apply: change gradients before that"
        )
    if runtime.size() == 1:
        return
    from hvkit.adapters.pytorch import adapter

    if not adapter.reduce_gradients(parameters):
        raise ValueError(
            f"{type(model_or_optimizer).__name__} was not passed to hvkit.distribute, so no "
            "gradients of it are averaged: pass the model or optimizer that was"
        )
