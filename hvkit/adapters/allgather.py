"""``hvkit.allgather``: the objects of all ranks; gradients flow back through tensors.

A loss over the samples of all ranks, as in contrastive learning, needs the embeddings of all of
them. With N ranks, rank s computes a loss ``L_s`` of all embeddings ``z_0 ... z_{N-1}``, and the
gradients of the weights become means over ranks. So that they are those of ``mean_s L_s``, rank r
must continue its backward pass with ``sum_s dL_s/dz_r``:

    d(mean_s L_s)/dw = 1/N sum_r (sum_s dL_s/dz_r) dz_r/dw

That is one process's gradient, whether each rank computes the loss of all samples, or each that of
its own samples against all others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hvkit.communication.collectives import gather, pickled, unpickled
from hvkit.errors import RanksDisagreeError
from hvkit.runtime import size
from hvkit.watch.calls import named
from hvkit.watch.rank_errors import mark_as_shown_by

Object = TypeVar("Object")


class _Tensors(Protocol):
    """The module that gathers the tensors of a framework."""

    def needs_gradients(self, tensor: Any) -> bool:
        """Whether a backward pass may come back to this tensor."""

    def gather(self, tensor: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The tensors of all ranks, of these shapes, with a backward pass."""


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
    return [obj] if size() == 1 else _gathered(obj)


def _gathered(obj: Any) -> list[Any]:
    # keras.Variable itself is a subclass of the class of weights in Keras 3.5.
    torch, tf, keras = map(sys.modules.get, ("torch", "tensorflow", "keras.src.backend"))
    if keras is not None and isinstance(obj, keras.Variable):
        obj = obj.value
    tensors: _Tensors | None = None
    if torch is not None and isinstance(obj, torch.Tensor):
        from hvkit.adapters.pytorch.collectives import gather as tensors
    elif tf is not None and isinstance(obj, tf.Tensor | tf.Variable):
        from hvkit.adapters.keras.collectives import gather as tensors_of_tf

        tensors, obj = tensors_of_tf, tf.convert_to_tensor(obj)
        if not tf.executing_eagerly():
            found: list[Any] = tensors_of_tf.gather_in_graph(obj)
            return found
    if tensors is None or not tensors.needs_gradients(obj):
        everyone = gather("allgather", ("", (), pickled(obj)))
        _require_same([theirs for theirs, _, _ in everyone])
        return [unpickled(theirs, source) for source, (_, _, theirs) in enumerate(everyone)]
    shapes = gather("allgather", _facts(obj))
    _require_same([theirs for theirs, _, _ in shapes])
    return tensors.gather(obj, [shape for _, shape, _ in shapes])


def _facts(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    dtype = getattr(tensor.dtype, "name", tensor.dtype)
    return str(dtype), tuple(map(int, tensor.shape)), b""


def _require_same(everyone: list[str]) -> None:
    """Raise on every rank unless all pass tensors of one dtype, or none passes one."""
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            said = [
                f"a {dtype} tensor that needs gradients" if dtype else "something else"
                for dtype in (theirs, everyone[0])
            ]
            error = RanksDisagreeError(
                f"rank {rank} passes {said[0]} to allgather, rank 0 {said[1]}: all ranks must pass "
                "tensors that need gradients, of one dtype, or none: detach() them"
            )
            raise mark_as_shown_by(error, 0)


if (_torch := sys.modules.get("torch")) is not None:  # a compiled loss may contain the call
    allgather = _torch.compiler.disable(allgather)
