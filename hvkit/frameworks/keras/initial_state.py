"""Copies the first rank's weights, optimizer state and vocabularies to every rank, bit for bit.

The first of all ranks is rank 0, as messages and names here call it; a group has another.

Layers may compute with more than their weights. ``adapt`` of ``StringLookup``, ``IntegerLookup``
and ``TextVectorization`` fills a table, that of ``Discretization`` a list. ``Normalization`` has
variables, but computes with constants that it derives from them. Ranks with rank 0's weights may
still differ in these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
from keras.ops import convert_to_tensor
from keras.src.backend import AutocastScope

from hvkit.communication import collectives
from hvkit.communication.collectives import raise_together, require_equal
from hvkit.frameworks.keras.backends import have_values, is_symbolic, outside_graphs
from hvkit.main_rank import warn_once
from hvkit.runtime import Group
from hvkit.sync.fingerprints import Compared, Rows, describe_differences, fingerprint, hashed


class JoinedModels(keras.Model):  # type: ignore[misc]
    """One model that contains several which train together; nobody calls it."""

    def __init__(self, models: Sequence[keras.Model]) -> None:
        super().__init__()
        self.models = list(models)


def has_weights(model: keras.Model) -> bool:
    """Whether the model, or each model inside one without a ``build``, has weights with values."""
    return _is_built(model) and have_values(model.weights)


def _is_built(model: keras.Model) -> bool:
    if model.built:
        return True
    parts = model._flatten_layers(include_self=False)
    own_build = type(model).build is not keras.Model.build
    return bool(parts) and not own_build and all(part.built for part in parts)


def synchronise(weights: Sequence[Any], group: Group) -> None:
    """Overwrite weights with the first rank's, in place; a collective."""
    with outside_graphs():
        facts = [f"{_name(w)}: shape {tuple(w.shape)}, {w.dtype}" for w in weights]
        advice = (
            "build the same model on every rank; if only numbers in names differ, some rank has "
            "made other models before: call keras.utils.clear_session() there, or name the layers"
        )
        require_equal("model", facts, advice, group=group)
        _broadcast(weights, group)


def synchronise_model(model: keras.Model, group: Group) -> None:
    layers = AdaptedLayers(model)
    synchronise(model.weights, group)
    layers.copy_from_first(group)


def _name(weight: Any) -> str:
    """The names of the weight's layer and of the weight.

    Not its whole path: that has the model's name only if the layer was built inside the model, and
    rank 0's may have been built before, by ``adapt``.
    """
    return "/".join(getattr(weight, "path", weight.name).split("/")[-2:])


def synchronise_optimizers(
    optimizers: Sequence[Any],
    trained: Sequence[Any],
    group: Group,
    leave_out: Container[int] = (),
) -> None:
    """Overwrite the state of optimizers with the first rank's, in place; a collective.

    If an optimizer has slot variables on some ranks only, because a script loaded a checkpoint
    there, this makes them on all ranks, for the ``trained`` variables. ``leave_out`` are ids of
    variables that differ between ranks.
    """
    with outside_graphs():
        built = collectives.gather("distribute", [each.built for each in optimizers], group)
        for i, optimizer in enumerate(optimizers):
            if not optimizer.built and any(of_rank[i] for of_rank in built):
                optimizer.build(trained)
            variables = [v for v in optimizer.variables if id(v) not in leave_out]
            require_equal(
                "optimizer",
                # Without names: a loaded optimizer names its variables differently.
                [f"variable: shape {tuple(v.shape)}, {v.dtype}" for v in variables],
                "make the same optimizer, and load the same checkpoint, on every rank",
                group=group,
            )
            _broadcast(variables, group)


def _broadcast(variables: Sequence[Any], group: Group) -> None:
    if not variables:
        return
    with AutocastScope(None):  # in a layer's call, variables look as if they had 16 bits
        values = [np.array(v.numpy(), order="C") for v in variables]
        sent = [value.reshape(-1).view(np.uint8) for value in values]
        received = collectives.broadcast_state(np.concatenate(sent), group)
        ends = np.cumsum([piece.size for piece in sent])
        pieces = np.split(received, ends[:-1])
        for variable, value, piece in zip(variables, values, pieces, strict=True):
            variable.assign(piece.view(value.dtype).reshape(value.shape))


_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
# Attributes that layers of a class compute with.
_CONSTANTS = {
    keras.layers.Normalization: ("mean", "variance"),
    keras.layers.Discretization: ("bin_boundaries",),
    keras.layers.Rescaling: ("scale", "offset"),
}

ADAPT = (
    "adapt layers to all of the data, before hvkit.shard divides it: on every rank, or on rank 0 "
    "before hvkit.distribute, which sends to all ranks what they have learnt"
)
# Methods that Keras calls after it has changed the variables of a layer that derives others.
_DERIVES = ("finalize_state", "load_own_variables")

# The fingerprint of a vocabulary by its table, which a layer replaces as a whole.
_of_tables: WeakKeyDictionary[Any, Rows] = WeakKeyDictionary()


@dataclass(frozen=True)
class _AdaptedLayer:
    """A layer that computes with more than its weights."""

    layer: Any
    name: str

    @property
    def labels(self) -> list[str]:
        names = ("vocabulary", "idf_weights") if self._looks_up else self._constants
        return [f"{each} of layer {self.name}" for each in names]

    def values(self) -> list[Any]:
        """Arrays, and a list of tokens; None for those that the layer does not have."""
        if self._looks_up:
            weights = getattr(self.layer, "idf_weights", None)
            return [self._vocabulary(), None if weights is None else weights.numpy()]
        found = [getattr(self.layer, each) for each in self._constants]
        # In a layer that a graph has built, they are values of that graph until derived again.
        unknown = [each is None or is_symbolic(each) for each in found]
        return [None if u else _as_numpy(v) for v, u in zip(found, unknown, strict=True)]

    def rows(self) -> list[Rows]:
        if not self._looks_up:
            return [hashed("") if each is None else fingerprint(each) for each in self.values()]
        table = self.layer.lookup_table
        if table not in _of_tables:
            _of_tables[table] = hashed(repr(self._vocabulary()))
        weights = getattr(self.layer, "idf_weights", None)
        return [_of_tables[table], hashed("") if weights is None else fingerprint(weights.numpy())]

    def has_learnt(self) -> bool:
        """Whether the layer has seen data, or the script has set its vocabulary or constants."""
        if self._looks_up:
            return int(self.layer.lookup_table.size().numpy()) > 0
        values = self.values()
        if isinstance(self.layer, keras.layers.Normalization):  # before ``adapt``: 0 and 1
            mean, variance = values
            return mean is not None and bool(mean.any() or (variance != 1).any())
        return all(each is not None and each.size for each in values)  # Keras 3.5: no boundaries

    def derive_again(self) -> None:
        layer, layer_class = self.layer, type(self.layer)
        if self._looks_up or not layer.built:
            return
        if isinstance(layer, keras.layers.Normalization) or _is_users(layer_class, _DERIVES[0]):
            layer.finalize_state()
        if _is_users(layer_class, _DERIVES[1]):
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            layer.load_own_variables(store)

    def take(self, values: list[Any]) -> None:
        if self._looks_up:
            tokens, weights = values
            self.layer.set_vocabulary(tokens, None if weights is None else weights[: len(tokens)])
            return
        for name, value in zip(self._constants, values, strict=True):
            is_tensor = keras.ops.is_tensor(getattr(self.layer, name))
            setattr(self.layer, name, convert_to_tensor(value) if is_tensor else value.tolist())

    @property
    def _looks_up(self) -> bool:
        return isinstance(self.layer, _LOOKUPS)

    @property
    def _constants(self) -> tuple[str, ...]:
        of_classes = _CONSTANTS.items()
        return next((names for each, names in of_classes if isinstance(self.layer, each)), ())

    def _vocabulary(self) -> list[Any]:
        # Keras gives integers of NumPy.
        tokens = self.layer.get_vocabulary() if self.has_learnt() else []
        return [each if isinstance(each, str) else int(each) for each in tokens]


def _adapted_in(model: Any) -> list[_AdaptedLayer]:
    """The layers, in an order that is the same on every rank."""
    names: Counter[str] = Counter()
    found = []
    layers = model._flatten_layers()
    text = keras.layers.TextVectorization
    # The vocabulary of such a layer is in one inside it.
    outer = {id(each._lookup_layer): each.name for each in layers if isinstance(each, text)}
    for layer in layers:
        derives = any(_is_users(type(layer), each) for each in _DERIVES)
        if not (derives or isinstance(layer, (*_LOOKUPS, *_CONSTANTS))):
            continue
        # Keras numbers the layers of a process, which may have made others on some ranks.
        name = re.sub(r"_\d+$", "", outer.get(id(layer), layer.name))
        names[name] += 1
        number = f" number {names[name]}" if names[name] > 1 else ""
        found.append(_AdaptedLayer(layer, f"{name!r}{number}"))
    return found


def compared_in_adapted(model: Any) -> tuple[list[Compared], list[Rows]]:
    """Labels and fingerprints of a model's vocabularies and constants."""
    with outside_graphs():
        found = _adapted_in(model)
        labels = [Compared(label, fix=ADAPT) for each in found for label in each.labels]
        return labels, [row for each in found for row in each.rows()]


class AdaptedLayers:
    """The adapted layers of a model on this rank, before it gets rank 0's weights."""

    def __init__(self, model: Any) -> None:
        with outside_graphs():
            self._layers = _adapted_in(model)
            self._has_learnt = [each.has_learnt() for each in self._layers]
            self._compared, self._rows = compared_in_adapted(model)

    def copy_from_first(self, group: Group) -> None:
        """Take the first rank's vocabularies and constants, after its weights; a collective."""
        labels = [each.label for each in self._compared]
        require_equal("model", labels, "build the same model on every rank", group=group)
        if not self._layers:
            return
        with outside_graphs():
            gathered = collectives.gather("distribute", (self._has_learnt, self._rows), group)
            problem = self._problem([learnt for learnt, _ in gathered], group)
            raise_together(problem, group=group)
            self._warn(gathered, group)
            self._take(group)

    def _problem(self, gathered: list[list[bool]], group: Group) -> Exception | None:
        for each, learnt in zip(self._layers, zip(*gathered, strict=True), strict=True):
            if any(learnt) and not learnt[0]:
                return ValueError(
                    f"layer {each.name} has adapted to data on rank "
                    f"{group.members[learnt.index(True)]}, but not on rank {group.first}: {ADAPT}"
                )
        return None

    def _warn(self, gathered: list[tuple[list[bool], list[Rows]]], group: Group) -> None:
        """Warn if several ranks have adapted a layer, each to other data."""
        owners = [i for i, each in enumerate(self._layers) for _ in each.labels]
        first = gathered[0][1]
        rows = [
            [
                row if learnt[i] else of_first
                for i, row, of_first in zip(owners, of_rank, first, strict=True)
            ]
            for learnt, of_rank in gathered
        ]
        if not first:
            return
        text, differ = describe_differences(np.array(rows), self._compared, False, group.members)
        if differ:
            source = f"all ranks use what rank {group.first}'s layers have learnt"
            warn_once("adapted", f"{source}: {text}", group)

    def _take(self, group: Group) -> None:
        derived = _problem_of(_AdaptedLayer.derive_again, *((each,) for each in self._layers))
        raise_together(derived, group=group)
        local = [[row.tolist() for row in each.rows()] for each in self._layers]
        of_first = collectives.from_rank(group.first, local, group)
        unlike = {i for i, rows in enumerate(local) if rows != of_first[i]}
        sent = sorted(set().union(*collectives.gather("distribute", sorted(unlike), group)))
        values = [self._layers[i].values() for i in sent] if group.rank == 0 else []
        values = collectives.from_rank(group.first, values, group)
        taken = [(self._layers[i], of) for i, of in zip(sent, values, strict=True) if i in unlike]
        raise_together(_problem_of(_AdaptedLayer.take, *taken), group=group)


def _problem_of(function: Callable[..., None], *arguments: tuple[Any, ...]) -> Exception | None:
    """Call a method of layers; return why one of them cannot take over rank 0's state."""
    for layer, *given in arguments:
        try:
            function(layer, *given)
        except Exception as error:  # of any type: all ranks raise together
            return ValueError(
                f"layer {layer.name} cannot take over what that of rank 0 has learnt ({error}): "
                f"{ADAPT}"
            )
    return None


def _as_numpy(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else np.asarray(value)


def _is_users(layer_class: type[Any], method: str) -> bool:
    """Whether a method of a layer's class is not Keras's own."""
    owner = next((each for each in layer_class.__mro__ if method in vars(each)), None)
    return owner is not None and not owner.__module__.startswith("keras.")
