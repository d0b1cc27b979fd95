"""The part for JAX: the arrays of a module of Flax NNX, or of pytrees, by name in an ``.npz`` file.

Arrays come back on the devices where they are now, so a run that divides them in another way, or on
another number of ranks, resumes the same numbers.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from hvkit.checkpoint.saved_object import (
    LOCAL,
    NOT_IN_FILE,
    SEED,
    ContentReader,
    Fingerprints,
    Part,
    write_arrays,
)
from hvkit.frameworks.jax.arrays import (
    gathered,
    is_array,
    is_replicated,
    local_data,
    shape_in_host,
    to_host,
    with_numbers,
)
from hvkit.frameworks.jax.trees import is_nnx, named_leaves, tree_of, with_tree
from hvkit.random_states import Arrays
from hvkit.sync.fingerprints import Compared, fingerprint

# The entry of the file that names the dtypes, which NumPy's format has not all.
_DTYPES = "dtypes"


class ArraysPart(Part):
    """The arrays and numbers of a module or an optimizer of NNX, or of pytrees in a namespace."""

    suffix = ".npz"
    # What ``save`` writes inside ``gathered``.
    _gathered: Any = None

    @property
    def model(self) -> Any:
        is_model = is_nnx(self.object) and not hasattr(self.object, "tx")  # and no optimizer
        return self.object if is_model else None

    def _tree(self) -> Any:
        thing = self.object
        return vars(thing) if isinstance(thing, SimpleNamespace) else tree_of(thing)

    def _named(self, tree: Any) -> Iterator[tuple[str, Any]]:
        return named_leaves(tree, in_variables=is_nnx(self.object))

    def _leaves(self, tree: Any) -> Iterator[tuple[str, Any]]:
        return (each for each in self._named(tree) if _holds(each[1]))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._gathered = gathered(self._tree())
        try:
            yield
        finally:
            self._gathered = None

    def save(self, path: Path) -> None:
        values: dict[str, np.ndarray[Any, Any]] = {}
        for name, leaf in self._named(self._tree() if self._gathered is None else self._gathered):
            if isinstance(leaf, str | bytes):  # a run would lose it
                raise TypeError(
                    f"{self.name} holds arrays and numbers, but {name} is {leaf!r}: pass text to "
                    "save(..., extras={...})"
                )
            if not _holds(leaf):
                continue
            if name in values or name == _DTYPES:
                raise ValueError(f"{self.name} has two arrays of the name {name}")
            values[name] = to_host(leaf) if is_array(leaf) else np.asarray(leaf)
        dtypes = {name: value.dtype.name for name, value in values.items()}
        # NumPy's format knows none of ml_dtypes.
        plain = {
            name: value.view(f"u{value.dtype.itemsize}") if value.dtype.kind == "V" else value
            for name, value in values.items()
        }
        write_arrays(path, {**plain, _DTYPES: np.array(json.dumps(dtypes))})

    def rank_state(self) -> Arrays:
        """In a round of local weights: all arrays, and where this rank's random numbers go on."""
        if not self.is_local:
            return {}
        seeds = self._seeds()
        kept = NOT_IN_FILE if self.model is not None else LOCAL
        return {
            f"{SEED if name in seeds else kept}{name}": to_host(leaf)
            for name, leaf in self._leaves(self._tree())
        }

    def load_rank_state(self, arrays: Arrays) -> None:
        prefixes = (SEED, NOT_IN_FILE, LOCAL)  # LOCAL is the beginning of NOT_IN_FILE
        self._set({functools.reduce(str.removeprefix, prefixes, n): a for n, a in arrays.items()})

    def _seeds(self) -> set[str]:
        """The names of the arrays with which a module draws random numbers."""
        if not is_nnx(self.object):
            return set()
        nnx = sys.modules["flax.nnx"]
        tree = nnx.state(self.object, nnx.RngState)
        return {name for name, _ in self._named(tree)}

    def load(self, content: memoryview, facts: Mapping[str, Any]) -> None:
        own = dict(self._leaves(self._tree()))
        with np.load(ContentReader(content)) as file:
            dtypes = json.loads(str(file[_DTYPES]))
            if other := sorted(set(dtypes) ^ set(own)):
                where = "the checkpoint" if other[0] in dtypes else "the script"
                raise ValueError(f"only {where} has {other[0]}")
            values = {name: file[name].view(np.dtype(dtype)) for name, dtype in dtypes.items()}
        seeds = self._seeds() if self.is_local else set()  # each rank draws its own
        self._set({name: value for name, value in values.items() if name not in seeds})

    def _set(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        tree = self._tree()
        leaves = [
            _loaded(name, leaf, values[name]) if name in values else leaf
            for name, leaf in self._named(tree)
        ]
        tree = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        if isinstance(self.object, SimpleNamespace):
            vars(self.object).update(tree)
        else:
            with_tree(self.object, tree)

    def compared(self) -> Fingerprints:
        if self.is_local:  # each rank's is its own
            return [], []
        leaves = [
            each
            for each in self._leaves(self._tree())
            if is_array(each[1]) and is_replicated(each[1])
        ]
        return (
            [Compared(f"{self.name} {name}") for name, _ in leaves],
            [fingerprint(local_data(leaf)) for _, leaf in leaves],
        )


def _holds(leaf: Any) -> bool:
    """Whether a checkpoint saves a leaf: arrays and numbers, but no functions or text."""
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _loaded(name: str, leaf: Any, value: np.ndarray[Any, Any]) -> Any:
    """A value of the file as the leaf that it replaces: an array in the same place, or a number."""
    if not is_array(leaf):
        return type(leaf)(value[()])
    expected = shape_in_host(leaf)
    if value.shape != expected:
        raise ValueError(f"{name} has the shape {value.shape} there and {expected} here")
    return with_numbers(leaf, value)
