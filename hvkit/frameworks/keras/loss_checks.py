"""Names, on rank 0, losses that differ from the loss of one process.

A loss that is no mean over samples, as Dice, contrastive losses, and functions of the script that
return a ratio of sums, needs the samples of all ranks together. The first step compares such a loss
of the batch with the losses of the batch's halves. A loss with its own count (``loss_means``), in a
loop of the script, is a mean over one rank's count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
from keras import ops

from hvkit import runtime
from hvkit.main_rank import warn_once

# Models whose gradients are averaged in every step, in updates by optimizers of Keras, and in loops
# with optimizers of PyTorch.
_in_updates: WeakSet[keras.Model] = WeakSet()
_in_loops: WeakSet[keras.Model] = WeakSet()
# Whether the last loss outside of steps of ``fit`` had its own count.
_own_count = False


def watch_losses(model: keras.Model, *, in_loop: bool = False) -> None:
    (_in_loops if in_loop else _in_updates).add(model)


def watches_losses() -> bool:
    return bool(_in_updates or _in_loops)


def note_own_count(has_own: bool) -> None:
    global _own_count
    _own_count = has_own
    if _in_loops:  # whose updates do not call ``warn_of_own_count``
        warn_of_own_count(averaged=True)


def warn_of_own_count(averaged: bool) -> None:
    """Warn if the update that begins is of a loss with its own count."""
    global _own_count
    if _own_count and averaged:
        warn_once(
            "own count",
            "a loss of Keras divides by what a mask shows of this rank's samples, or by their "
            "weights, where other ranks have another number: N ranks do not train as one process. "
            "fit divides by the numbers of all ranks; in a loop of your own make the loss with "
            "reduction=None, and write loss = hvkit.mean(sum(losses * weights), sum(weights))",
        )
    _own_count = False


def warn_of_own_means() -> None:
    warn_once(
        "own means",
        "evaluate reports losses with a mask or weights that a loss or test_step of the script's "
        "computes as means of the ranks' own: they are not those of one process where ranks have "
        "other numbers",
    )


def warn_of_factor(model: keras.Model) -> None:
    """Warn of a factor for sums that scripts needed before."""
    compiled = getattr(model, "_compile_loss", None)
    factors = keras.tree.flatten(getattr(compiled, "_user_loss_weights", None) or ())
    if factors and all(each == runtime.size() for each in factors):
        warn_once(
            "factor",
            f"loss_weights={factors[0]} is the number of ranks, and the loss a sum "
            '(reduction="sum"): fit already trains with the sum over all ranks; leave '
            "loss_weights out, unless one process would have them, too",
        )


def is_mean_over_samples(loss: Any) -> bool:
    """Whether no comparison is needed; in 16 bits it would show nothing."""
    return loss.dtype not in ("float32", "float64") or gives_each_sample_its_own(loss)


def gives_each_sample_its_own(loss: Any) -> bool:
    """Whether each sample has its own loss, as in nearly all losses of Keras."""
    function = getattr(loss, "fn", type(loss))
    module = getattr(function, "__module__", "") or ""
    return module.startswith("keras.") and function.__name__ not in ("dice", "tversky", "circle")


def compare_with_halves(loss: Any, data: Any, *values: Any) -> None:
    rows = len(values[-1]) if values[-1].ndim else 0
    if rows < 2 or any(not each.ndim or len(each) != rows for each in values):
        return
    parts = slice(None), slice(None, rows // 2), slice(rows // 2, None)
    try:
        whole, first, second = (
            _numbers_of(loss, data, [v[part] for v in values]) for part in parts
        )
    except Exception as error:  # of any type: the script's function's
        _warn_of_no_mean(loss.name, f"it fails with half of a batch ({error})")
        return
    if whole.shape and len(whole) == len(first) + len(second):
        of_halves = np.concatenate([first, second])
    elif whole.shape == first.shape == second.shape:
        of_halves = (first * (rows // 2) + second * (rows - rows // 2)) / rows
    else:
        return
    if not np.allclose(whole, of_halves, rtol=np.finfo(whole.dtype).eps ** 0.5, atol=1e-7):
        halves = f"{np.mean(first):.4g} and {np.mean(second):.4g} of its halves"
        _warn_of_no_mean(loss.name, f"it is {np.mean(whole):.4g} of a batch, {halves}")


def _numbers_of(loss: Any, data: Any, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    tensors = [ops.convert_to_tensor(each, dtype=loss.dtype) for each in values]
    found: np.ndarray[Any, Any] = ops.convert_to_numpy(
        loss.call(*keras.tree.pack_sequence_as(data, tensors))
    )
    return found


def _warn_of_no_mean(name: str, why: str) -> None:
    warn_once(
        f"no mean {name}",
        f"loss {name!r} is no mean over samples: {why}. Each rank computes it of "
        "its own samples, so N ranks do not train as one process with all of them. Write a ratio "
        "of sums as hvkit.mean(total, count), multiply a sum by hvkit.size(), and gather samples "
        "that a loss needs together with hvkit.allgather",
    )
