"""Saves each object in a file, and in another file the state that differs between ranks.

A ``Part`` saves one object into one file, which holds rank 0's state. State that differs
between ranks, such as random states and layer statistics of a rank's batches, is kept for each rank
as named arrays, in one file for all. The beginning of a name says when a rank loads the array again
(``SEED``, ``LOCAL``, ``NOT_IN_FILE``). As many ranks as saved load arrays of other names.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hvkit import random_states, runtime
from hvkit.communication import collectives
from hvkit.random_states import Arrays
from hvkit.sync.fingerprints import Compared, Rows
from hvkit.sync.port import Record, Sharded, record_of

SEED = "seed-"
"""Prefix of the names of seeds, which a rank keeps also if another number of ranks resumes."""

LOCAL = "alone-"
"""Prefix of the names of a rank's local weights and states, to go on in the middle of a round."""

NOT_IN_FILE = f"{LOCAL}own-"
"""The same for arrays that are not in the part's file, which holds the agreed weights."""

Fingerprints = tuple[list[Compared], list[Rows]]
"""Names of the tensors that are compared between ranks, and the fingerprint of each."""

RANKS_FILE = "ranks.npz"
"""The file with what differs between ranks, unless each rank writes its own."""

_RANDOM = "random"
# Prefix of the names of random states as of the beginning of the epoch.
_EPOCH = "epoch-"


class Part(ABC):
    """One object, which a checkpoint saves into one file."""

    suffix: ClassVar[str]
    optional = False
    """Whether a checkpoint without it can be loaded."""

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self.file = f"{name}{self.suffix}"
        self.object = obj
        self.is_local = False
        """Whether the ranks have local weights in a round, so that their objects differ."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the file; TypeError or ValueError if the object cannot be saved."""

    @abstractmethod
    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        """Load the file's content; any error if it does not fit the object.

        ``facts`` are those of the time when the checkpoint was saved, and its ``step``.
        """

    def load_shards(self, files: Sequence[Path], facts: Mapping[str, Any]) -> None:
        """Load the object, or this rank's part of it, from files that all ranks have written."""
        raise ValueError(f"{type(self).__name__} has no parts of several ranks")

    def begin_after(self, step: int) -> None:  # noqa: B027  # only optional parts are left out
        """Begin where a checkpoint without this part was saved: after so many steps."""

    @property
    def model(self) -> Any:
        """The model that the part saves; None for other objects."""
        return None

    @property
    def record(self) -> Record | None:
        """The record that ``distribute`` attached to the object; None if there is none."""
        return record_of(self.object)

    @property
    def sharded(self) -> Sharded | None:
        """The object as shards, for a sharded checkpoint; None if every rank has all of it."""
        return None

    def facts(self) -> dict[str, Any]:
        """Facts that ``load`` needs besides the file, as JSON values."""
        return {}

    def rank_state(self) -> Arrays:
        """The arrays that may differ between ranks: statistics, seeds; all if ``is_local``."""
        return {}

    def load_rank_state(self, arrays: Arrays) -> None:  # noqa: B027  # none by default
        """Set the arrays that ``rank_state`` returned."""

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which rank 0 can save an object that ranks have divided; a collective."""
        record = self.record
        return record.gathered() if record and record.gathered else nullcontext()

    def compared(self) -> Fingerprints:
        """The state that must be equal on all ranks."""
        return [], []

    def may_differ(self) -> Fingerprints:
        """The state of the object that may differ between ranks."""
        return [], []

    def end_epoch(self) -> None:
        """Count the current epoch as done, even if a loop left the data before its end."""
        if callable(end := getattr(self.object, "end_epoch", None)):
            end()


class ContentReader(io.RawIOBase):
    """Bytes of shape (n,) as a file to read; ``io.BytesIO`` would copy them."""

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as into:
            piece = self._content[self._at : self._at + len(into)]
            into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays into a file that ``numpy.load`` reads; ValueError if one holds objects.

    Not with ``numpy.savez``, which takes some names, other ones in each version, for its arguments.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            _add_array(archive, name, array)


def _add_array(archive: zipfile.ZipFile, name: str, array: np.ndarray[Any, Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def named_fingerprints(
    found: Iterable[tuple[str, list[Compared], list[Rows]]],
) -> Fingerprints:
    """The fingerprints of all parts, with the parts' names; none if there is only one rank."""
    all_compared: list[Compared] = []
    all_rows: list[Rows] = []
    for name, compared, rows in found if runtime.size() > 1 else ():
        all_compared += [replace(each, label=f"{each.label} of {name}") for each in compared]
        all_rows += rows
    return all_compared, all_rows


def rank_states(parts: Sequence[Part], epoch_random: Arrays) -> tuple[Arrays, dict[str, bytes]]:
    """The state of this rank that may differ between ranks, by ``part/name``.

    With the global random state, and that with which ``fit`` shuffled its epoch, if inside one.
    Also returns digests of those arrays that the parts' files may hold, too.
    """
    states = {f"{_RANDOM}/{name}": state for name, state in random_states.as_arrays().items()}
    states |= {f"{_RANDOM}/{_EPOCH}{name}": state for name, state in epoch_random.items()}
    digests: dict[str, bytes] = {}
    for part in parts:
        for name, array in part.rank_state().items():
            states[f"{part.name}/{name}"] = array
            if not name.startswith((SEED, NOT_IN_FILE)):
                content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                digests[f"{part.name}/{name}"] = hashlib.sha256(content).digest()
    return states, digests


def unlike_rank_0(states: Arrays, digests: dict[str, bytes]) -> Arrays:
    """The arrays of ``rank_states`` that rank 0's files do not hold; a collective."""
    first = collectives.from_rank(0, digests)
    return {
        key: array
        for key, array in states.items()
        if key not in digests or digests[key] != first.get(key)
    }


def write_states(path: Path, states: Iterable[Arrays]) -> None:
    """Write the states of ranks, as ``rank/part/name``, to a file that ``numpy.load`` reads."""
    rank = 0
    with zipfile.ZipFile(path, "w") as archive:
        for of_rank in states:
            for key in of_rank:
                _add_array(archive, f"{rank}/{key}", of_rank[key])
            del of_rank  # before the next one takes memory
            rank += 1


def keys_by_rank(keys: Iterable[str]) -> dict[int, list[str]]:
    """The names of arrays in a file of ``write_states``, by the rank that saved them."""
    found: dict[int, list[str]] = {}
    for key in keys:
        found.setdefault(int(key.partition("/")[0]), []).append(key)
    return found


def states_of(
    values: Mapping[str, Any],
    keys: Iterable[str],
    *,
    same_size: bool = True,
    in_round: bool = True,
) -> Arrays:
    """The arrays that a rank loads of those with its ``keys`` in a file of ``write_states``.

    ``same_size`` is whether as many ranks resume as saved: if not, layers keep rank 0's statistics.
    ``in_round`` is whether ranks go on in the middle of the saved round, with local weights.
    """
    found: Arrays = {}
    for key in keys:
        _, part, name = key.split("/", 2)
        wanted = in_round if name.startswith(LOCAL) else same_size
        if wanted or part == _RANDOM or name.startswith(SEED):
            found[f"{part}/{name}"] = values[key]
    return found


def load_rank_states(saved: Arrays, parts: Sequence[Part]) -> Arrays:
    """Set this rank's state to what it saved; does nothing for a rank that has saved nothing.

    Returns the random state with which ``fit`` shuffled the epoch, if it was saved inside one.
    """
    if not saved:
        return {}
    for part in parts:
        part.load_rank_state(_below(f"{part.name}/", saved))
    random = _below(f"{_RANDOM}/", saved)
    random_states.set_from_arrays(random)
    return _below(_EPOCH, random)


def _below(prefix: str, arrays: Arrays) -> Arrays:
    return {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)}


@contextmanager
def all_of(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """All of these contexts at once, such as ``gathered()`` of each part."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
