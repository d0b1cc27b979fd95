"""The parts of a checkpoint for the state that the models' strategies keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.checkpoint.saved_object import NOT_IN_FILE, Arrays, ContentReader, Part, write_arrays
from hvkit.log import logger
from hvkit.sync.distributed_objects import keepers_of
from hvkit.sync.port import InShares, Keeper, KeeperInParts


class StrategyPart(Part):
    """The state that a strategy and a compression keep for a model, in a plain ``.npz`` file.

    Args:
        model: the name of the model's part.
        keeper: of the model.
        in_parts: the same, if the model is in a mesh.
    """

    optional = True

    def __init__(self, model: str, keeper: Keeper, in_parts: KeeperInParts | None = None) -> None:
        super().__init__(f"{model}-strategy", ".npz")
        self.keeper = keeper
        self._in_parts = in_parts
        self.in_round = True
        """Whether ``load`` goes on in the saved round, with each rank's own weights."""

    def facts(self) -> dict[str, Any]:
        held = self._in_parts
        where = {"mesh": held.mesh, "layout": held.layout} if held else {}
        return self._identity() | where

    def _identity(self) -> dict[str, Any]:
        return {
            "strategy": repr(self.keeper.strategy),
            "compression": repr(self.keeper.compression),
        }

    def gathered(self) -> AbstractContextManager[None]:
        return self._in_parts.gathered() if self._in_parts else nullcontext()

    def own(self) -> Arrays:
        return {f"{NOT_IN_FILE}{n}": array for n, array in self.keeper.own_state().items()}

    def load_own(self, arrays: Arrays) -> None:
        self.keeper.load_own_state({n.removeprefix(NOT_IN_FILE): a for n, a in arrays.items()})

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether the run was saved with this strategy and compression."""
        return all(facts.get(name) == value for name, value in self._identity().items())

    def may_go_on(self, facts: Mapping[str, Any]) -> bool:
        """Whether as many ranks can go on in the saved round: also their mesh is the same."""
        mesh = self._in_parts.mesh if self._in_parts else None
        return self.matches(facts) and facts.get("mesh") == mesh

    def save(self, path: Path) -> None:
        write_arrays(path, self.keeper.state())

    @property
    def in_shares(self) -> InShares | None:
        return self._in_parts if self._in_parts and self._in_parts.is_divided else None

    def write_share(self, path: Path, *, first: bool) -> bool:
        if self.in_shares is None:
            return False
        from hvkit.checkpoint.pytorch import write_share

        return write_share(path, self.name, self.keeper, self.in_shares, first=first)

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        if self._begins_with(facts):
            with np.load(ContentReader(content)) as values:
                arrays = {name: values[name] for name in values.files}
            self.keeper.load_state(arrays, in_round=self.in_round)

    def load_shares(self, files: Sequence[Path], facts: Mapping[str, Any]) -> None:
        from hvkit.frameworks.pytorch.model_parallel.shares import SavedState

        if not self._begins_with(facts):
            return
        saved = SavedState(files)
        if self._in_parts:
            self._in_parts.load_shares(saved, in_round=self.in_round)
        else:
            self.keeper.load_state(saved.plain(), in_round=self.in_round)

    def _begins_with(self, facts: Mapping[str, Any]) -> bool:
        """Whether to load what was saved; if not, begin anew."""
        if not self.matches(facts):
            self.begin_anew(f"saved with {facts['strategy']}, compression {facts['compression']}")
            return False
        if not self.in_round:
            self._log("begins a new round: other ranks or mesh, or another model's strategy")
        if self._in_parts:
            self._in_parts.saved_layout = facts.get("layout")
        return True

    def begin_anew(self, reason: str) -> None:
        """Begin with the weights that all ranks have loaded."""
        self.keeper.begin_anew()
        self._log(f"begins anew with the loaded weights: {reason}")

    def _log(self, text: str) -> None:
        if runtime.rank() == 0:
            mine = f"{self.keeper.strategy}, compression {self.keeper.compression},"
            logger.info(f"{mine} {text}")


def parts_of_strategies(parts: Sequence[Part]) -> list[StrategyPart]:
    """A part for each keeper of the models; also sets ``is_local`` of the given parts."""
    models = {part: keepers_of(part.model) for part in parts if part.model is not None}
    # Once each: several parts may be parts of one distributed model.
    names = {
        keeper: part.name + (f"-{number}" if number else "")
        for part, keepers in reversed(models.items())
        for number, keeper in enumerate(keepers)
    }
    for part in parts:
        if part.model is None and part.record:
            part.is_local = part.record.local
        else:  # a scheduler, for example, is local if any of the models is
            part.is_local = any(keeper.local for keeper in models.get(part, names))
    in_parts = {
        keeper: part.record.keeper_in_parts if part.record else None
        for part, keepers in models.items()
        for keeper in keepers
    }
    return [StrategyPart(name, keeper, in_parts[keeper]) for keeper, name in names.items()]


@contextmanager
def together(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """All of these contexts at once, such as ``keeper.settled()`` of each model."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
