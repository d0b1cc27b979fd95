"""The interface between ``hvkit.distribute`` and the frameworks.

``distribute`` makes a port for each call. ``distributed_objects`` remembers what ``keep_in_step``
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np

from hvkit.communication.group import Group
from hvkit.compression import Compression
from hvkit.learning_rate import Multiplier
from hvkit.main_rank import warn_once
from hvkit.mesh import MeshOptions
from hvkit.strategies.strategy import Strategy

BatchNorm = Literal["average", "local", "sync"]
BATCH_NORMS = get_args(BatchNorm)


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


class ShardedKeeper(Sharded, Protocol):
    """A keeper of which each rank of a mesh holds a part."""

    mesh: str
    # A hash of the division: which rank has which part; None before the model is divided.
    layout: int | None
    saved_layout: int | None  # the same of the checkpoint that is loaded next

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
    # Whether the ranks train local weights, so that its state differs; ``record`` sets it.
    local: bool = False
    sharded: ShardedObject | None = None  # its part on this rank, in a mesh
    # The keeper of a model in a mesh; None if it has none.
    sharded_keeper: ShardedKeeper | None = None


class Keeper(Protocol):
    """Keeps the state of a strategy or a compression for models that train together."""

    strategy: Strategy
    compression: Compression | None  # as passed to ``distribute``
    local: bool = False  # whether the ranks train local weights, so that their weights differ
    equal_steps: bool = True  # whether all ranks must take equally many steps

    def arrive(self) -> None:
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

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        """Keep the ranks in step from now on, as the strategy says.

        Returns each optimizer with its record, and the keeper of state that a checkpoint saves.
        """


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
