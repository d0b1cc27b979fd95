"""When the ranks compare the weights of models of NNX and Keras on JAX, and how they do it.

Only ``hvkit.batch`` sees them between two compiled steps. Weights in pytrees are out of reach.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any
from weakref import ref

import jax

from hvkit.communication.collectives import gather
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.frameworks.jax.arrays import (
    is_array,
    is_nnx,
    is_whole_everywhere,
    named_leaves,
    own_part,
    own_place,
    weights_of,
)
from hvkit.sync.fingerprints import Compared, fingerprint, require_same
from hvkit.watch.rank_errors import mark_as_shown_by

_FIX = (
    "each rank has trained with batches, keys or arrays of its own, or weights were set on some "
    "ranks only, after hvkit.distribute: pass each batch through hvkit.batch, and the same keys "
    "and other arguments to compiled functions on every rank; load weights before "
    "hvkit.distribute, on every rank, or with hvkit.Checkpoint"
)


class WeightChecks:
    """When the ranks compare the weights of which models.

    Args:
        every: each so many batches, and before the first; None for before the first and after 1, 2,
            4, 8, ...
        models: of NNX or Keras.
    """

    def __init__(self, every: int | None, models: Sequence[Any]) -> None:
        self._every = every
        self._models = [ref(model) for model in models]
        self._seen = [_arrays_of(model) for model in models]
        self._batches = 0

    def are_of(self, model: Any) -> bool:
        """Whether this model is among theirs."""
        return any(reference() is model for reference in self._models)

    def next_batch(self, call: str) -> None:
        """Compare the weights, if it is time; a collective then."""
        n = self._batches
        self._batches += 1
        if n % self._every == 0 if self._every else n & (n - 1) == 0:
            models = [reference() for reference in self._models]
            # A batch may be for another model, whose training those of this one do not concern.
            changed = [self._has_changed(number, model) for number, model in enumerate(models)]
            require_same_weights(call, models, changed, fix=_FIX if n and call == "batch" else "")

    def _has_changed(self, number: int, model: Any) -> bool:
        """Whether the model has other arrays than at the last call."""
        seen, held = self._seen[number], _arrays_of(model)
        self._seen[number] = held
        return len(seen) != len(held) or not all(map(operator.is_, seen, held))


def _arrays_of(model: Any) -> list[ref[Any]]:
    """References to the arrays of a model; one to the same array is the same object."""
    return [ref(leaf) for _, leaf in _named_weights(model) if isinstance(leaf, jax.Array)]


def require_same_weights(
    call: str, models: Sequence[Any], changed: Sequence[bool] = (), fix: str = ""
) -> None:
    """Raise on every rank unless all hold the same weights of some models; a collective.

    Args:
        call: the user's.
        models: of NNX or Keras; None for one that this rank has no more.
        changed: which of them may differ, on any rank; all by default.
        fix: what to do, for errors, if not what holds for weights of any framework.

    Raises:
        RanksDisagreeError: names the first weight that differs.
    """
    held = [_named_weights(model) for model in models]
    # Ranks may collect garbage at different times, and one may have an array of its own.
    divided = any(not is_whole_everywhere(leaf) for weights in held for _, leaf in weights)
    own = ([bool(weights) for weights in held], list(changed) or [True] * len(models), divided)
    have, may_differ, are_divided = zip(*gather(call, own), strict=True)
    compared: list[tuple[str, Any]] = []
    for model, weights, haves, flags in zip(
        models, held, zip(*have, strict=True), zip(*may_differ, strict=True), strict=True
    ):
        if not all(haves) or not any(flags):
            continue
        if any(are_divided) and not all(flags):  # no other rank has the same part
            of = ranks_text([rank for rank, has_changed in enumerate(flags) if has_changed])
            raise mark_as_shown_by(
                RanksDisagreeError(
                    f"{of} alone changed weights of {type(model).__name__}, of which each rank "
                    "holds a part: load or change weights before hvkit.distribute, on every rank, "
                    "or with hvkit.Checkpoint"
                ),
                0,
            )
        compared += [each for each in weights if is_array(each[1])]
    if not compared:
        return
    for whole in (True, False) if any(are_divided) else (True,):
        leaves = [each for each in compared if is_whole_everywhere(each[1]) is whole]
        require_same(
            call,
            [Compared(name, fix=fix) for name, _ in leaves],
            [fingerprint(own_part(leaf)) for _, leaf in leaves],
            part=repr([own_place(leaf) for _, leaf in leaves]) if not whole else "",
        )


def _named_weights(model: Any) -> list[tuple[str, Any]]:
    """A model's weights with their names; none if it is gone, or its weights are elsewhere by now.

    A loop that splits a module of NNX and donates its arrays to each step keeps the weights in a
    pytree, and leaves the module with arrays that JAX has deleted.
    """
    if model is None:
        return []
    leaves = list(named_leaves(weights_of(model), in_variables=is_nnx(model)))
    deleted = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for _, leaf in leaves)
    whose = f"{type(model).__name__}:" if is_nnx(model) else "variable"
    return [] if deleted else [(f"{whose} {name}", leaf) for name, leaf in leaves]
