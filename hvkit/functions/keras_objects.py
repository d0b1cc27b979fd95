"""Keras models between processes: their archive, with the classes and functions that it only names.

Keras pickles a model as the archive of ``model.save``, which has names in place of classes. The
process that unpickles it finds Keras's own classes by them, and no class of a script or of cells.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from hvkit.errors import HvkitError
from hvkit.log import in_short

_KERAS = "keras"
_CONFIG = "config.json"
_DEFAULT = "float32"
_SIMPLE = (bool, int, float, str, type(None))
_NAMES = {"class_name", "registered_name"}


def is_saveable(thing: object) -> bool:
    """Whether this is a model or another object of Keras's that pickles as an archive."""
    if _KERAS not in sys.modules:
        return False
    from keras.src.saving.keras_saveable import KerasSaveable

    return isinstance(thing, KerasSaveable)


def reduced(thing: Any) -> tuple[Callable[..., object], tuple[object, ...]]:
    """How such an object is pickled.

    Raises ``TypeError`` if Keras cannot make it again from its configuration.
    """
    try:
        function, (archive,) = thing.__reduce__()
        content = archive.getvalue()
        texts = {each for each in _in_json(_config_in(content)) if isinstance(each, str)}
        named = _own_objects(thing, texts)
        content = _accepted(content, named)
        _require_arguments(thing, _restored(function, content, named))
    except HvkitError:
        raise
    except Exception as problem:
        raise TypeError(
            f"Keras cannot make this {type(thing).__qualname__} again from its configuration "
            f"({in_short(problem)}): give its class, and those of its layers, a get_config() with "
            "all arguments of __init__, or send get_weights() and make it anew"
        ) from problem
    return _restored, (function, content, named)


def _require_arguments(thing: Any, made: Any) -> None:
    """Raise unless the attributes that are named as arguments of ``__init__`` arrived.

    Keras puts the defaults of a subclassed model into its configuration, whatever it was made with.
    """
    parts = getattr(thing, "_flatten_layers", lambda: [thing])()
    others = getattr(made, "_flatten_layers", lambda: [made])()
    for before, after in zip(parts, others, strict=False):
        for name in inspect.signature(type(before)).parameters:
            sent, arrived = vars(before).get(name), vars(after).get(name)
            simple = all(isinstance(each, _SIMPLE) for each in (sent, arrived))
            if simple and sent != arrived and repr(sent) != repr(arrived):  # NaN is not equal
                raise ValueError(f"{type(before).__qualname__}: {name}={sent!r} became {arrived!r}")


def _restored(
    function: Callable[[io.BytesIO], Any], content: bytes, named: dict[str, object]
) -> Any:
    import keras

    with keras.saving.custom_object_scope(named):
        return function(io.BytesIO(content))


def _config_in(content: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return json.loads(archive.read(_CONFIG))


def _accepted(content: bytes, named: Mapping[str, object]) -> bytes:
    """The archive, without the usual settings that an ``__init__`` of the script does not accept.

    Keras adds them to the configuration of every layer and model. Many have an ``__init__(self)``.
    """
    config = _config_in(content)
    dicts = (each for each in _in_json(config) if isinstance(each, dict))
    left_out = [_leave_out(each, named) for each in dicts if each.keys() >= _NAMES]
    if not any(left_out):
        return content
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(changed, "w") as after:
        for name in before.namelist():
            after.writestr(name, json.dumps(config) if name == _CONFIG else before.read(name))
    return changed.getvalue()


def _leave_out(entry: dict[str, Any], named: Mapping[str, object]) -> bool:
    """Remove such settings from an object's configuration; whether there were any."""
    keras_class = named.get(entry["registered_name"] or "", named.get(entry["class_name"]))
    config = entry.get("config")
    if not isinstance(keras_class, type) or not isinstance(config, dict):
        return False
    parameters = inspect.signature(keras_class).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return False
    usual = {
        "name": True,
        "trainable": config.get("trainable") is True,
        "dtype": _DEFAULT in _in_json(config.get("dtype")),
    }
    names = [name for name in usual if usual[name] and name in config and name not in parameters]
    for name in names:
        del config[name]
    return bool(names)


def _in_json(value: Any) -> Iterator[Any]:
    """A value of JSON, and all values in it."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _in_json(each)


def _own_objects(thing: object, names: set[str]) -> dict[str, object]:
    """By name, the classes and functions in a Keras object that are not Keras's, of these names."""
    import keras

    found: dict[str, object] = {}
    seen: dict[int, object] = {}  # which keeps them, so that no two have one id
    rest: list[Any] = [thing]
    while rest:
        each = rest.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        definition: Any = each if isinstance(each, FunctionType | type) else type(each)
        if isinstance(each, Mapping):
            rest += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            rest += each
        elif definition is each or _is_of_keras(definition) or hasattr(definition, "get_config"):
            rest += getattr(each, "__dict__", {}).values() if definition is not each else ()
            if not _is_of_keras(definition):
                for name in (definition.__name__, keras.saving.get_registered_name(definition)):
                    if name in names:
                        found[name] = definition
    return found


def _is_of_keras(definition: Any) -> bool:
    return str(definition.__module__).partition(".")[0] == _KERAS
