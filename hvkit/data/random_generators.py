"""Random generators for data: the same numbers on every rank, and again when a run resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from hvkit import random_states
from hvkit.random_states import States

_GLOBAL = frozenset({"python", "numpy", "torch"})


class Generators:
    """The generators that some data may draw from: the global ones, and those of its samplers.

    Args:
        own: PyTorch's generators that belong to the data, possibly with repetitions.
    """

    def __init__(self, own: Iterable[Any] = ()) -> None:
        distinct = {id(each): each for each in own}.values()
        self.own = {f"generator-{number}": each for number, each in enumerate(distinct)}

    def states(self) -> States:
        """The state of each, by name."""
        own = {name: generator.get_state() for name, generator in self.own.items()}
        return random_states.global_states() | own

    def set(self, states: States) -> None:
        """Set the generators that ``states`` names; the others do not change."""
        random_states.set_global_states(states)
        for name, generator in self.own.items():
            if name in states:
                generator.set_state(states[name])

    def seed(self, seed: int) -> None:
        """Seed all."""
        random_states.seed_global(seed)
        for generator in self.own.values():
            generator.manual_seed(seed)


def as_text(states: States) -> dict[str, str]:
    """States as text, for messages and files."""
    return {name: random_states.as_text(name, state) for name, state in states.items()}


def from_text(text: Mapping[str, str]) -> States:
    """The states that ``as_text`` returned as text."""
    return {name: random_states.from_text(name, each) for name, each in text.items()}


def own_in(text: Mapping[str, str]) -> States:
    """The states of the data's own generators among all that ``as_text`` returned."""
    return from_text({name: each for name, each in text.items() if name not in _GLOBAL})


def begins_an_epoch(text: Mapping[str, str]) -> bool:
    """Whether these are the states of all generators, and not only of the data's own."""
    return "python" in text


class FixedRandomness:
    """A context in which code draws random numbers from a given state on, for example rank 0's.

    The first time, the generators begin in that state; each further time, in the state that they
    had when the context was left. On exit they get back their state from before. But a generator
    that was already in the right state when the context was entered is not set back. So if all
    ranks use the state of rank 0, rank 0 draws as one process does.

    It may be entered while it is active.

    Args:
        start: a seed of 63 bits, or states; generators without a state there do not change.
        generators: the generators to set.
    """

    def __init__(self, start: int | States, generators: Generators | None = None) -> None:
        self._generators = generators or Generators()
        self._inside: int | States = start
        self._outside: States = {}
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        outside = self._generators.states()
        if isinstance(self._inside, int):
            self._outside = outside
            self._generators.seed(self._inside)
            return
        inside = self._inside
        self._outside = {
            name: state
            for name, state in outside.items()
            if name in inside and not random_states.equal(state, inside[name])
        }
        self._generators.set({name: inside[name] for name in self._outside})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._inside = self._generators.states()
            self._generators.set(self._outside)
