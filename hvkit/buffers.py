"""``average_buffers``: averages what forward passes learn outside of normalisation layers."""

from __future__ import annotations

import sys
from typing import Any

from hvkit.communication import collectives
from hvkit.runtime import size
from hvkit.watch.calls import named


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
    if torch is not None and all(isinstance(each, torch.nn.Module) for each in modules):
        from hvkit.adapters.pytorch import buffers
    elif keras is not None and all(isinstance(each, keras.layers.Layer) for each in modules):
        from hvkit.adapters.keras import buffers  # type: ignore[no-redef,unused-ignore]
    else:
        problem = TypeError(
            "average_buffers takes a torch.nn.Module, or a Keras model or layer, or a list of "
            f"them, got {module!r} of type {type(module).__name__}"
        )
        collectives.raise_together(problem, "average_buffers")
    if size() > 1:
        buffers.average(modules)
