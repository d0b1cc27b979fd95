"""The cache of wheels, and the lock on it."""

import fcntl
import json
import threading
from pathlib import Path

import pytest

from hvkit.build import wheels
from hvkit.build.key import Key

KEY = Key({"horovod": "0.28.1", "pytorch": "2.13.0"})
OTHER = Key({"horovod": "0.28.1", "pytorch": "2.14.0"})


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / f"horovod-{KEY.version}-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"wheel")
    return path


def test_empty_cache_has_nothing() -> None:
    assert wheels.find(KEY) is None


def test_stored_wheel_is_found_under_its_key_only(wheel: Path) -> None:
    stored = wheels.store(wheel, KEY)
    assert stored.read_bytes() == b"wheel"
    assert wheels.find(KEY) == stored
    assert wheels.find(OTHER) is None


def test_ingredients_stand_beside_the_wheel(wheel: Path) -> None:
    stored = wheels.store(wheel, KEY)
    assert json.loads(stored.with_suffix(".json").read_text()) == KEY.ingredients


def test_nothing_half_written_is_left(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> Path:
        target.write_bytes(b"wh")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(OSError, match="No space"):
        wheels.store(wheel, KEY)
    assert wheels.find(KEY) is None
    assert not list(wheels.wheels_dir().glob("**/*.whl"))


def test_free_lock_does_not_wait() -> None:
    with wheels.lock(KEY, when_waiting=lambda: pytest.fail("waited")):
        pass


def test_held_lock_is_waited_for() -> None:
    waited = []
    held = (wheels.wheels_dir() / f"{KEY.digest}.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def release() -> None:
        waited.append(True)
        held.close()

    # Lets go in any case, so that a fault fails this test instead of hanging it.
    late = threading.Timer(5, held.close)
    late.start()
    with wheels.lock(KEY, when_waiting=release):
        late.cancel()
        assert waited == [True]
    with wheels.lock(OTHER, when_waiting=lambda: pytest.fail("another wheel's lock")):
        pass


def test_lock_is_exclusive_while_held() -> None:
    with (
        wheels.lock(KEY, when_waiting=lambda: pytest.fail("waited")),
        (wheels.wheels_dir() / f"{KEY.digest}.lock").open("w") as second,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
