"""One object of a checkpoint in one file: the base class, and the part for a small JSON state."""

from __future__ import annotations

import io
import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from hvkit.sync.fingerprints import Compared, Rows
from hvkit.sync.port import InShares, Record

Arrays = dict[str, np.ndarray[Any, Any]]

SEED = "seed-"
"""Prefix of the names of seeds, which a rank keeps also if another number of ranks resumes."""

LOCAL = "alone-"
"""Prefix of the names of a rank's local weights and states, to go on in the middle of a round."""

NOT_IN_FILE = f"{LOCAL}own-"
"""The same for arrays that are not in the part's file, which holds the agreed weights."""


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays into a file that ``numpy.load`` reads.

    Not with ``numpy.savez``, which takes some names, other ones in each version, for its arguments.

    Raises:
        ValueError: an array holds objects.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            add_array(archive, name, array)


def add_array(archive: zipfile.ZipFile, name: str, array: np.ndarray[Any, Any]) -> None:
    """Add one array to a file that ``numpy.load`` reads."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


class Part(ABC):
    """One object that a checkpoint saves into one file.

    Args:
        name: the name the user gave the object.
        suffix: what follows the name in the file's name.
    """

    optional = False
    """Whether a checkpoint without it can be loaded."""

    def __init__(self, name: str, suffix: str) -> None:
        self.name = name
        self.file = f"{name}{suffix}"
        self.is_local = False
        """Whether the ranks have local weights in a round, so that their objects differ."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            TypeError, ValueError: the object cannot be saved; the message gives the reason.
        """

    @abstractmethod
    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        """Load the file's content into the object.

        Args:
            content: the file's bytes, which ``ContentReader`` reads without a copy.
            facts: what ``facts`` returned when the checkpoint was saved, and its ``step``.

        Raises:
            Exception: the content does not fit the object.
        """

    def begin_after(self, step: int) -> None:  # noqa: B027  # only optional parts are left out
        """Begin where a checkpoint without this part was saved: after so many steps."""

    @property
    def model(self) -> Any:
        """The model that the part saves; None for other objects."""
        return None

    @property
    def record(self) -> Record | None:
        """What ``distribute`` attached to the object; None if nothing."""
        return None

    def facts(self) -> dict[str, Any]:
        """Whatever ``load`` needs besides the file, as JSON values."""
        return {}

    def own(self) -> Arrays:
        """The arrays that may differ between ranks: statistics, seeds; all if ``is_local``."""
        return {}

    def load_own(self, arrays: Arrays) -> None:  # noqa: B027  # no own arrays by default
        """Set the arrays that ``own`` returned."""

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which rank 0 can save the object: with the parts of other ranks.

        A collective if the object is divided among the ranks.
        """
        return nullcontext()

    @property
    def in_shares(self) -> InShares | None:
        """What a sharded checkpoint saves in parts; None if every rank has the whole object."""
        return None

    def share_file(self, rank: int) -> str:
        """The name of the file with the part of a rank."""
        return f"{self.name}-of-rank-{rank:05}.pt"

    def write_share(self, path: Path, *, first: bool) -> bool:
        """Write what this rank has and no other rank writes; return whether there is any.

        Args:
            path: the file.
            first: whether this rank adds what belongs to no rank's part.
        """
        return False

    def load_shares(self, files: Sequence[Path], facts: Mapping[str, Any]) -> None:
        """Load the object, or this rank's part of it, from the files of all ranks.

        Raises:
            Exception: the content does not fit the object.
        """
        raise ValueError(f"{type(self).__name__} has no parts of several ranks")

    def compared(self) -> tuple[list[Compared], list[Rows]]:
        """The state that must be equal on all ranks, and its fingerprints."""
        return [], []

    def may_differ(self) -> tuple[list[Compared], list[Rows]]:
        """The state of the object that may differ between ranks, and its fingerprints."""
        return [], []

    def end_epoch(self) -> None:  # noqa: B027  # most objects count no epochs
        """Count the current epoch as done, even if a loop left the data before its end."""


class JsonPart(Part):
    """An object with ``state_dict()`` and ``load_state_dict()``, next to a Keras model."""

    def __init__(self, name: str, thing: Any) -> None:
        super().__init__(name, ".json")
        self._thing = thing

    def save(self, path: Path) -> None:
        state = self._thing.state_dict()
        try:
            text = json.dumps(state)
            if json.loads(text) != state:
                raise TypeError("JSON would change it")
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.name}: next to a Keras model, a state may hold dicts with str keys, lists, "
                f"str, int, float, bool and None; {type(self._thing).__name__}.state_dict() "
                f"returned something else: {error}"
            ) from None
        path.write_text(text + "\n")

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        self._thing.load_state_dict(json.loads(bytes(content)))

    def end_epoch(self) -> None:
        end_epoch_of(self._thing)


class MonitorPart(JsonPart):
    """A ``hvkit.Monitor``, which may be added or left out when a run resumes."""

    optional = True

    def begin_after(self, step: int) -> None:
        self._thing.load_state_dict({"step": step})


class ContentReader(io.RawIOBase):
    """Bytes as a file to read; ``io.BytesIO`` would copy them.

    Args:
        content: of shape (n,).
    """

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

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as into:
            piece = self._content[self._at : self._at + len(into)]
            into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def end_epoch_of(thing: Any) -> None:
    """Call the object's ``end_epoch()`` if it has one, as sharded loaders do."""
    if callable(end := getattr(thing, "end_epoch", None)):
        end()
