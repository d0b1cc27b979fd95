"""The interface between ``hvkit.distribute`` and the frameworks, and what was distributed.

``distribute`` makes a port for each call, and remembers what ``keep_in_step`` returns. A second
call looks here for a first one. ``hvkit.settled`` and checkpoints look for the syncs of a model,
and checkpoints for the step count of a warm-up. At the end is what ports do alike: warnings, and
the sentence about gradients that are NaN or infinite.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar, get_args
from weakref import WeakKeyDictionary, WeakMethod, ref

import numpy as np

from hvkit.compression import Compression
from hvkit.errors import ranks_text
from hvkit.learning_rate import Multiplier
from hvkit.main_rank import warn_once
from hvkit.mesh import MeshOptions
from hvkit.runtime import Group
from hvkit.strategies.strategy import Strategy

BatchNorm = Literal["average", "local", "sync"]
BATCH_NORMS = get_args(BatchNorm)
OnNonfinite = Literal["ignore", "skip", "stop"]
NONFINITE_ACTIONS = get_args(OnNonfinite)

T = TypeVar("T")

# Parameters that a sentence about NaN names.
_SHOWN = 3


@dataclass(frozen=True)
class Options:
    """The keyword arguments of ``hvkit.distribute`` that ports act on."""

    accumulate: int
    warmup_steps: int
    compression: Compression | None
    batch_norm: str
    check_every: int | None
    on_nonfinite: str
    strategy: Strategy
    # The ranks that train together, or in a mesh those that hold the same part of the model.
    group: Group = field(repr=False)
    mesh: MeshOptions | None = None  # how ranks divide the model; None if each holds all of it


class Warmup(Protocol):
    """A warm-up that counts optimizer steps itself."""

    steps_done: int


class RandomNumbers(Protocol):
    """Random numbers that some ranks draw together."""

    # The states of the generators; empty if there are none. May be set.
    numbers: list[np.ndarray[Any, Any]]


class Sharded(Protocol):
    """An object of which each rank of a mesh has a part, for sharded checkpoints."""

    @property
    def is_divided(self) -> bool:
        """Whether each rank has its part already."""

    def shards(self) -> dict[str, Any]:
        """The pieces that this rank writes, by parameter."""

    def plan(self) -> dict[str, Any]:
        """A description of the whole, which rank 0 adds."""


class ShardedObject(Sharded, Protocol):
    """A model or an optimizer of which each rank of a mesh holds a part."""

    @property
    def reads_shards(self) -> bool:
        """Whether a rank must read its part only; if not, it holds the whole object."""

    def load_shards(self, saved: Any, load: Callable[[dict[str, Any]], None]) -> None:
        """Read this rank's part, once the model is divided.

        ``load`` gets the part of an optimizer's state dict, or the entries of a model's that are no
        tensors.
        """

    def rank_state(self) -> dict[str, Any]:
        """The state of this rank's part; empty before the model is divided."""

    def load_rank_state(self, load: Callable[[], None]) -> None:
        """Load what ``rank_state`` returned, if the ranks continue the saved round."""


class ShardedSync(Sharded, Protocol):
    """A sync of which each rank of a mesh holds a part."""

    mesh: str
    # A hash of the division: which rank has which part; None before the model is divided.
    layout: int | None
    saved_layout: int | None  # the layout of the checkpoint that is loaded next

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which ``state`` works on rank 0; a collective."""

    def load_shards(self, saved: Any, *, in_round: bool) -> None:
        """Read this rank's part, once the model is divided; as ``load_state``."""


@dataclass(frozen=True)
class Record:
    """The objects that ``distribute`` attached to one optimizer, or to a model."""

    # The step counter of its warm-up; None without a warm-up, or if the optimizer counts steps.
    warmup: Warmup | None = None
    # A context in which rank 0 has its whole state, if it is divided; a collective.
    gathered: Callable[[], AbstractContextManager[None]] | None = None
    # Random numbers that a model keeps apart from the global generators; None if none.
    numbers: RandomNumbers | None = None
    # Whether the ranks train local weights, so that its state differs; ``remember`` sets it.
    local: bool = False
    sharded: ShardedObject | None = None  # its part on this rank, in a mesh
    # What keeps a model in a mesh in step; None if there is no such state.
    sharded_sync: ShardedSync | None = None


class Sync(Protocol):
    """Keeps models that train together in step; has the state of a strategy or a compression."""

    strategy: Strategy
    compression: Compression | None  # as passed to ``distribute``
    local: bool = False  # whether the ranks train local weights, so that their weights differ
    equal_steps: bool = True  # whether all ranks must take equally many steps

    def wait_for_agreements(self) -> None:
        """Wait for overlapped agreements; a collective."""
        return

    def settled(self) -> AbstractContextManager[None]:
        """A context with the weights that ranks would agree on now; a collective if ``local``."""
        return nullcontext()

    def unsettled(self) -> AbstractContextManager[None]:
        """A context, inside ``settled``, with the local weights again."""
        return nullcontext()

    def start_over(self) -> None:
        """Forget the state; begin with the ranks' present weights, the same on all."""

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank."""

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        ``in_round`` says that each rank will have its local weights again. If not, a new round
        begins, with the weights that all ranks have now.
        """

    def rank_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals."""
        return {}

    def load_rank_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``rank_state`` returned on this rank."""
        return


class Port(Protocol):
    """The steps of ``hvkit.distribute`` that depend on the framework, in calling order.

    The constructor checks its arguments and raises TypeError or ValueError; it uses no collective.
    """

    def facts(self) -> Sequence[str]:
        """One line for each parameter and optimizer; they must be equal on all ranks."""

    def more_than_sgd(self) -> list[str]:
        """The classes of the optimizers other than SGD without momentum."""

    def synchronise(self) -> None:
        """Copy rank 0's weights and optimizer state to every rank, bit for bit."""

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        """Multiply rates in updates from now on; return the user's, None with a step length."""

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        """Keep the ranks in step from now on, as the strategy says.

        Returns each optimizer with its record, and the sync whose state a checkpoint saves.
        """


# Weak on both sides: a sync leads to weights, and hooks on these may lead to the model.
_models: WeakKeyDictionary[Any, ref[Sync] | None] = WeakKeyDictionary()
_records: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()
# The groups of models and optimizers that not all ranks train with.
_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


def remember(
    models: Iterable[Any],
    records: Iterable[tuple[Any, Record]],
    sync: Sync | None = None,
    group: Group | None = None,
) -> None:
    """Remember models and optimizers as distributed; the models must keep their sync."""
    plain = [_plain(model) for model in models]
    known = [(_plain(thing), each) for thing, each in records]
    _models.update((model, None if sync is None else ref(sync)) for model in plain)
    if group is not None and not group.is_all_ranks:
        _groups.update((each, group) for each in (*plain, *(thing for thing, _ in known)))
    local = sync is not None and sync.local
    _records.update((thing, replace(each, local=local)) for thing, each in known)


def refuse_groups(call: str, things: Iterable[Any]) -> None:
    """Raise if only some ranks train one of these, or a part; ``call`` would count them as all."""
    for thing in things if _groups else ():
        for group in _known(_groups, thing):
            raise ValueError(
                f"{call} is for what all ranks train together, but {type(thing).__name__} is "
                f"trained by {ranks_text(group.members)} as a group"
            )


def _known(values: WeakKeyDictionary[Any, T], thing: Any) -> list[T]:
    """The value of a model or an optimizer, or those of models that share weights with it."""
    thing, known = _plain(thing), list(values.items())
    if found := [value for other, value in known if other is thing]:
        return found
    weights = set(map(id, _weights_of(thing)))
    return [value for other, value in known if not weights.isdisjoint(map(id, _weights_of(other)))]


# How ranks begin to train models together that had no weights yet in ``distribute``.
_unbuilt: WeakKeyDictionary[Any, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()


def begin_with_weights(model: Any, begin: Callable[[], None]) -> None:
    """Remember a method by which ranks begin to train a model that has no weights yet."""
    _unbuilt[_plain(model)] = WeakMethod(begin)


def is_distributed(model_or_optimizer: Any) -> bool:
    return _plain(model_or_optimizer) in _models or model_or_optimizer in _records


def syncs_of(model: Any) -> list[Sync]:
    """The syncs of a model, and of those that share weights with it; every rank must call it."""
    reference = _unbuilt.get(_plain(model))
    if reference is not None and (begin := reference()) is not None:
        begin()
    found = _known(_models, model)
    return [sync for each in found if each is not None and (sync := each()) is not None]


def _weights_of(model: Any) -> list[Any]:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.layers.Layer):  # on PyTorch also a module
        return [w._value for w in model.weights if getattr(w, "_value", None) is not None]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return list(model.parameters())
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(model, nnx.Module):
        return []  # an optimizer or a pytree of JAX
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]


def _plain(model: Any) -> Any:
    """The model inside one that ``torch.compile`` has wrapped."""
    return getattr(model, "_orig_mod", model)


def record_of(thing: Any) -> Record | None:
    """The record of an optimizer, and of a model that has one; None for anything else."""
    try:
        return _records.get(_plain(thing))
    except TypeError:  # a list, for example, has no weak references
        return None


def warn_of_own_batches(layers: str, strategy: Strategy) -> None:
    """Warn that layers cannot normalise over all ranks' batches where ranks train local weights."""
    warn_once(
        "own batches",
        f"{layers} normalise with each rank's own batch, since with {strategy} each trains at its "
        "own pace: hvkit.Synchronous() normalises over all ranks' batches",
    )


def warn_of_own_models(optimizer: str) -> None:
    """Warn of a model that each rank trains for itself, as ``distribute`` did not get it."""
    warn_once(
        "own models",
        f"optimizer {optimizer} updates a model, but neither was passed to hvkit.distribute: each "
        "rank trains a model of its own. Pass both, also where the model is a copy or was loaded "
        "from a file",
    )


# Their number in this process.
skipped_steps = SimpleNamespace(number=0)


class Statistics(Protocol):
    """Running statistics of batch norm, which a skipped step must not spoil."""

    def keep(self) -> None:
        """Remember the finite ones."""


# The statistics of all models with ``on_nonfinite="skip"``; loading a checkpoint must ``keep``
# them, too.
kept_statistics: weakref.WeakSet[Statistics] = weakref.WeakSet()


def describe_nonfinite(
    by_rank: Sequence[Sequence[str]], members: Sequence[int] | None = None
) -> str:
    """The sentence about ranks with gradients that are not finite, and their parameters' names."""
    found = []
    for rank, names in zip(members or range(len(by_rank)), by_rank, strict=True):
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = f"parameter{'s' if len(names) > 1 else ''} {', '.join(names[:_SHOWN])}{more}"
        if names:
            found.append(f"rank {rank} has a NaN or infinite gradient of {listed}")
    return "; ".join(found)
