"""``hvkit.allgather`` and ``hvkit.mean``: gradients of tensors flow back through them.

With N ranks, rank s computes a loss ``L_s`` of all
embeddings ``z_0 ... z_{N-1}``, and the gradients of the weights become means over ranks. So that
they are those of ``mean_s L_s``, rank r must continue its backward pass with ``sum_s dL_s/dz_r``:

    d(mean_s L_s)/dw = 1/N sum_r (sum_s dL_s/dz_r) dz_r/dw

That is one process's gradient, whether each rank computes the loss of all samples, or each that of
its own samples against all others.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hvkit.communication.collectives import gather, gather_or_raise, pickled, undivided, unpickled
from hvkit.errors import RanksDisagreeError
from hvkit.registry import gather_module, in_graph, tensor_in
from hvkit.runtime import size
from hvkit.watch.calls import named
from hvkit.watch.rank_errors import mark_as_shown_by

Object = TypeVar("Object")
P = ParamSpec("P")
R = TypeVar("R")


def _outside_compiled_code(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: call a function outside of PyTorch's compiled code, for what losses contain.

    A script may import PyTorch after hvkit, so its own decorator is put on by the first call that
    finds it.
    """
    without: list[Callable[P, R]] = []

    @functools.wraps(function)
    def _uncompiled(*args: P.args, **kwargs: P.kwargs) -> R:
        if not without and (torch := sys.modules.get("torch")) is not None:
            without.append(torch.compiler.disable(function))
        return (without[0] if without else function)(*args, **kwargs)

    _uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]  # of that decorator
    return _uncompiled


@_outside_compiled_code
@named("hvkit.allgather")
def allgather(obj: Object) -> list[Object]:
    """Return the objects of all ranks, in rank order, on every rank.

    Gradients flow through a tensor that needs them, so a loss over the samples of all ranks trains
    as in one process:

        z = torch.cat(hvkit.allgather(model(x)))
        loss = contrastive(z)

    In the backward pass each rank gets the sum of what all ranks' losses say about its own part.
    Gradients of weights are then averaged over ranks, so what is minimised is the mean of the
    ranks' losses. Each rank may compute the loss of all samples, or that of its own samples against
    all others. Every rank must run the same backward passes, which are collectives, too. They
    cannot be differentiated again.

    In TensorFlow it also works in graphs, such as that of ``fit``, there for tensors of numbers
    only, whose shapes may differ in the first dimension. Of a variable all ranks get the values.

    Args:
        obj: any object that pickles. A tensor that needs gradients may have another shape on each
            rank. Gradients do not flow through tensors inside of lists and dicts.

    Raises:
        RanksDisagreeError: another rank makes another collective call, or only some ranks pass a
            tensor that needs gradients, or of another dtype.
        RankLostError: another rank has ended, or waits in another call.
        TypeError: the object of a rank does not pickle, on every rank; or it is a tensor of
            something else than numbers, in a graph.
    """
    in_graph("hvkit.allgather", obj)  # raises for what JAX traces
    return [obj] if size() == 1 else _gathered(undivided(obj))


def _gathered(obj: Any) -> list[Any]:
    package, obj = tensor_in(obj)
    found: list[Any]
    tensors: Any = gather_module(package) if package in ("torch", "tensorflow") else None
    if package == "tensorflow":
        tf = sys.modules["tensorflow"]
        obj = tf.convert_to_tensor(obj)
        if not tf.executing_eagerly():
            found = tensors.gather_in_graph(obj, _rows_for_each)
            return found
    if tensors is None or not tensors.needs_gradients(obj):
        objects = _gather_alike("", (), pickled(obj))
        return [unpickled(data, source) for source, (_, _, data) in enumerate(objects)]
    dtype = str(getattr(obj.dtype, "name", obj.dtype))
    shapes = [shape for _, shape, _ in _gather_alike(dtype, tuple(map(int, obj.shape)), b"")]
    found = tensors.gather(obj, shapes, rows_for_each=_rows_for_each())
    return found


def _gather_alike(
    dtype: str, shape: tuple[int, ...], data: bytes
) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Gather dtypes and shapes of tensors that need gradients, or else pickled objects."""
    gathered = gather("allgather", (dtype, shape, data))
    first = gathered[0][0]
    for rank, (other, _, _) in enumerate(gathered):
        if other != first:
            said = [
                f"a {each} tensor that needs gradients" if each else "something else"
                for each in (other, first)
            ]
            error = RanksDisagreeError(
                f"rank {rank} passes {said[0]} to allgather, rank 0 {said[1]}: all ranks must pass "
                "tensors that need gradients, of one dtype, or none: detach() them"
            )
            raise mark_as_shown_by(error, 0)
    return gathered


@_outside_compiled_code
@named("hvkit.mean")
def mean(total: Any, count: Any) -> Any:
    """Return the mean over what all ranks have counted, and let gradients flow back through it.

    For a loss that is no mean over samples: over tokens that are not masked, over weights, over
    batches of different sizes. Each rank passes its own sum, and what it would divide it by:

        losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        loss = hvkit.mean(losses, (targets != -100).sum())

    The result is the sum of all totals divided by the sum of all counts, the same on every rank.
    After ``backward()``, which makes no further call, the averaged gradients are those of one
    process with the batches of all ranks: with N ranks, d loss / d total = N / (sum of counts).
    Ranks of a pipeline or a tensor axis, which have the same batch, count it several times above
    and below the line. A rank may count 0; if all do, the mean is NaN, as PyTorch's own. With one
    process it is ``total / count``. A collective: every rank must call it each time, also without
    tokens. The script must go on with the result alike on all ranks.

    It works in compiled functions of PyTorch, and in graphs of TensorFlow. In JAX arrays belong to
    all ranks, and so do sums of them: there it returns ``total / count``. Of an array of this
    rank's own, outside of compiled functions, it returns the mean over ranks without gradients.

    Args:
        total: a tensor of PyTorch, TensorFlow or Keras, an array of JAX, or a number; mostly a
            single number, else one of the same shape on every rank. Where other ranks pass a
            tensor, a rank without tokens may pass 0, and call ``backward()`` as they do; not if
            several models of PyTorch were distributed.
        count: number of elements or sum of weights in ``total``: a number, or a tensor.

    Returns:
        A tensor of the dtype of ``total / count``, computed in float64; a float if all ranks pass
        two numbers, outside of graphs.

    Raises:
        TypeError: one of them is no number and no tensor, or complex, or a count of JAX is a number
            of this rank and the total an array of all ranks.
        RanksDisagreeError: another rank passes other shapes, or makes another collective call.
    """
    (of_total, total), (of_count, count) = tensor_in(total), tensor_in(count)
    packages = of_total, of_count
    if "jax" in packages:
        return _mean_of_arrays(total, count)
    if "torch" in packages:
        gather_of_torch = gather_module("torch")
        total, count = gather_of_torch.with_values(total, count)
        return _mean_of_ranks(total, count, gather_of_torch, sys.modules["torch"].Tensor)
    tf: Any = sys.modules.get("tensorflow")
    traced = hasattr(tf, "executing_eagerly") and not tf.executing_eagerly()
    # In a graph other ranks may pass a tensor where this one passes a number.
    if "tensorflow" in packages or (traced and size() > 1):
        classes = (tf.Tensor, tf.Variable)
        return _mean_of_ranks(total, count, gather_module("tensorflow"), classes, traced=traced)
    return _mean_of_ranks(total, count)


def _rows_for_each() -> Any:
    """The ranks' rows for each of this one, in place of their number, inside Keras's ``fit``."""
    loss_means = sys.modules.get("hvkit.frameworks.keras.loss_means")
    return loss_means.rows_for_each() if loss_means else None


# Of a rank with numbers only, in place of what ``facts_of_mean`` returns.
_OF_NUMBERS: Any = ("", "", "", False, [None, None])


def _mean_of_ranks(
    total: Any, count: Any, gather: Any = None, classes: Any = (), *, traced: bool = False
) -> Any:
    """``mean`` of tensors of these classes, or of numbers; other ranks may pass the other."""
    facts, numbers, problem = _OF_NUMBERS, [0.0, 0.0], None
    both = [total, count]
    try:
        both = [x if isinstance(x, classes) else float(x) for x in both]
        facts = gather.facts_of_mean(*both) if gather else _OF_NUMBERS
        numbers = [x if isinstance(x, float) else 0.0 for x in both]
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = TypeError(
            "mean takes a tensor or a number and what it counts, got "
            f"{total!r} of type {type(total).__name__} and {count!r}: {error}"
        )
    if traced:
        if problem:
            raise problem
        return gather.mean(both, [(), ()], facts, _rows_for_each())
    gathered = gather_or_raise("mean", problem, (facts, numbers))
    of_tensors = [facts for facts, _ in gathered if facts[0]]
    if not of_tensors:
        totals, counts = map(math.fsum, zip(*(each for _, each in gathered), strict=True))
        return totals / counts if counts else math.nan
    shapes = [_same_shape([facts[-1][at] for facts, _ in gathered]) for at in (0, 1)]
    framework, dtype, device, _, _ = facts if gather else of_tensors[0]
    facts = framework, dtype, device, any(each[3] for each in of_tensors), shapes
    return (gather or gather_module(framework)).mean(both, shapes, facts, _rows_for_each())


def _same_shape(by_rank: list[Any]) -> Any:
    """The shape of all ranks' tensors; None, of a number, goes with any shape."""
    shapes = {rank: shape for rank, shape in enumerate(by_rank) if shape is not None}
    first, shape = next(iter(shapes.items()), (0, ()))
    for rank, other in shapes.items():
        if other != shape:
            error = RanksDisagreeError(
                f"rank {rank} passes a tensor of shape {tuple(other)} to hvkit.mean, rank {first} "
                f"one of {tuple(shape)}: pass totals and counts of the same shapes on every rank"
            )
            raise mark_as_shown_by(error, 0)
    return shape


def _mean_of_arrays(total: Any, count: Any) -> Any:
    """``mean`` of arrays of JAX, of all ranks or of this one."""
    import jax

    if size() == 1:
        return total / count
    of_this_rank = [
        not isinstance(x, jax.Array)
        or (not isinstance(x, jax.core.Tracer) and x.is_fully_addressable)
        for x in (total, count)
    ]
    if all(of_this_rank):
        dtype = jax.numpy.true_divide(total, count).dtype
        return jax.numpy.asarray(_mean_of_ranks(total, count), dtype)
    if any(of_this_rank):
        raise TypeError(
            "mean: one of total and count is an array of all ranks, the other a number of this "
            "rank: compute both from arrays of all ranks, such as losses.sum() and mask.sum()"
        )
    return total / count
