"""The per-user cache of built wheels."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvkit.build.key import Key
from hvkit.host.cache import cache_dir


def wheels_dir() -> Path:
    """The folder of the cache; made if it is not there."""
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find(key: Key) -> Path | None:
    """The wheel built from exactly these ingredients, if the cache has it."""
    return next(wheels_dir().glob(f"horovod-{key.version}-*.whl"), None)


def store(wheel: Path, key: Key) -> Path:
    """Copy a wheel into the cache, its ingredients beside it; it appears whole or not at all."""
    target = wheels_dir() / wheel.name
    ingredients = target.with_suffix(".json")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        text = Path(folder, ingredients.name)
        text.write_text(key.text)
        os.replace(text, ingredients)
        os.replace(shutil.copyfile(wheel, Path(folder, wheel.name)), target)
    return target


@contextmanager
def lock(key: Key, when_waiting: Callable[[], None]) -> Iterator[None]:
    """Keep other processes of this user from building and installing the same wheel.

    Args:
        key: the wheel.
        when_waiting: called once if another process holds the lock.
    """
    with (wheels_dir() / f"{key.digest}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
