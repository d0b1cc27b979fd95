"""Calls on models of all ranks: ``settled``, ``reduce_gradients``, ``average_buffers``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from hvkit.communication.collectives import raise_together
from hvkit.registry import JAX, KERAS_ON_PYTORCH, framework_of, keras_framework
from hvkit.runtime import size
from hvkit.sync.port import Record, record_of, refuse_groups, syncs_of
from hvkit.watch.calls import call_within, named


@contextmanager
def settled(*things: Any) -> Iterator[None]:
    """Hold the weights that the ranks would agree on now, to evaluate or save a model.

        with hvkit.settled(model):
            accuracy = evaluate(model)
            if hvkit.is_main():
                torch.save(model.state_dict(), "model.pt")

    Between two agreements of ``LocalSGD`` and the like, each rank has local weights. Inside the
    block all ranks have the same weights: the strategy's mean, for ``ElasticAveraging`` its centre,
    for ``ParameterServer`` the server's. Statistics of normalisation layers are averaged.
    Afterwards each rank has its local weights again, so looking never changes them. Every rank must
    enter the block. It does nothing while all ranks hold the same weights (``Synchronous``, one
    process, right after a round of ``LocalSGD``), nor for models that share no weights with one
    that was distributed.

    With ``FullyShard`` and ``ShardedOptimizer``, ``state_dict()`` works on rank 0 inside the block
    only, where it returns the whole weights, and for an optimizer that is passed as well, its whole
    state: ``with hvkit.settled(model, optimizer):``.

    In a mesh, ``model.generate()`` of Hugging Face's models has the whole model on every rank
    inside the block.

    Args:
        *things: models and optimizers that were passed to ``hvkit.distribute``, and lists of them.
            Do not train them inside the block.

    Raises:
        TypeError: one of them is neither a model nor an optimizer.
        RanksDisagreeError: the ranks have taken different numbers of steps, in rounds.
        RankLostError: another rank has ended, or waits in another call.
    """
    with ExitStack() as stack:
        with call_within("hvkit.settled"):
            for thing in chain(*(t if isinstance(t, list | tuple) else [t] for t in things)):
                framework = framework_of(thing)
                if framework is JAX:
                    _require_module(thing)
                if framework is not None:
                    for sync in syncs_of(thing):
                        stack.enter_context(sync.settled())
                elif _record(thing) is None:
                    raise TypeError(
                        "hvkit.settled takes models and optimizers that were passed to "
                        "hvkit.distribute, and lists of them, got "
                        f"{thing!r} of type {type(thing).__name__}"
                    )
                if (known := _record(thing)) is not None and known.gathered:
                    stack.enter_context(known.gathered())
        yield


def _require_module(thing: Any) -> None:
    from hvkit.frameworks.jax.trees import is_nnx

    if not is_nnx(thing):
        raise TypeError(
            "hvkit.settled takes modules and optimizers of Flax NNX, whose arrays it can set, but "
            f"not a pytree ({type(thing).__name__}): where a strategy divides its arrays, "
            "jax.experimental.multihost_utils.process_allgather(tree, tiled=True) on every rank "
            "returns whole ones"
        )


def _record(optimizer: Any) -> Record | None:
    """The record of an optimizer, also inside a ``LossScaleOptimizer`` that Keras has made."""
    while (found := record_of(optimizer)) is None and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return found


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
        model_or_optimizer: a ``torch.nn.Module``, such as a Keras model on PyTorch, or a
            ``torch.optim.Optimizer`` that was passed to ``hvkit.distribute``.

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
    if size() == 1:
        return
    from hvkit.frameworks.pytorch import port

    if not port.reduce_gradients(parameters):
        raise ValueError(
            f"{type(model_or_optimizer).__name__} was not passed to hvkit.distribute, so no "
            "gradients of it are averaged: pass the model or optimizer that was"
        )


@named("hvkit.average_buffers")
def average_buffers(module: Any) -> None:
    """Average over ranks what the forward passes of a module learn; the same on all ranks then.

    These are its buffers, and in Keras the non-trainable variables of its layers: codebooks of a
    VQ-VAE, running means of your own, the batch norm of a model that was not passed to
    ``distribute``, as after ``torch.optim.swa_utils.update_bn``. Parameters do not change. Call it
    after each step, so that each step begins with the same ones everywhere:

        optimizer.step()
        hvkit.average_buffers(model.codebook)

    A collective: every rank must call it. Only floating-point numbers have a mean. Others stay, and
    if they differ between ranks in the first call, rank 0 names them. A buffer that is not a mean
    over samples, such as a sum or a quotient of two, is not what one process has: add up inside the
    forward pass, with ``hvkit.allreduce(counts, op="sum")``, or ``hvkit.allgather`` in a graph of
    TensorFlow.

    Args:
        module: a ``torch.nn.Module``, a Keras model or layer, or a list of them. In Keras also
            inside a ``tf.function``.

    Raises:
        TypeError: it is none of these; on every rank.
        RanksDisagreeError: the ranks' buffers differ in number, name, shape or dtype.
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    torch, keras = sys.modules.get("torch"), sys.modules.get("keras")
    in_keras = keras is not None and all(isinstance(each, keras.layers.Layer) for each in modules)
    buffers: Any
    if in_keras and keras_framework() is KERAS_ON_PYTORCH:
        from hvkit.frameworks.keras import on_pytorch as buffers
    elif in_keras:
        from hvkit.frameworks.keras import buffers
    elif torch is not None and all(isinstance(each, torch.nn.Module) for each in modules):
        from hvkit.frameworks.pytorch import buffers
    else:
        problem = TypeError(
            "average_buffers takes a torch.nn.Module, or a Keras model or layer, or a list of "
            f"them, got {module!r} of type {type(module).__name__}"
        )
        raise_together(problem, "average_buffers")
    if size() > 1:
        refuse_groups("hvkit.average_buffers", [each for each in modules if framework_of(each)])
        buffers.average(modules)
