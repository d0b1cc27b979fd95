"""What ranks return and raise arrives as it was; here from one process to itself."""

import errno
import pickle
import re
import threading
from pathlib import Path

import pytest

from hvkit.errors import HvkitError
from hvkit.functions.outcomes import picklable, results_in, save_result
from hvkit.functions.pickling import call_folder


class InSlots(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__("in slots")
        self.code = code


class SaysHow(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.second = second

    def __reduce__(self):
        return SaysHow, (self.args[0], self.second)


class WithoutText(Exception):
    def __str__(self):
        return self.missing


class Never(Exception):
    def __reduce__(self):
        raise RuntimeError("never")


class OfFullDisk:
    def __reduce__(self):
        raise OSError(errno.ENOSPC, "No space left on device")


class Broken:
    def __reduce__(self):
        return int, ("no number",)


def raises(error):
    raise error


def from_cause():
    try:
        {}["a"]
    except KeyError as error:
        raise SaysHow(1, 2) from error


def with_a_lock():
    error = ValueError("x")
    error.lock, error.step = threading.Lock(), 7
    raise error


@pytest.mark.parametrize(
    ("function", "attributes"),
    [
        (lambda: __import__("no_such_module"), ["name", "msg"]),
        (lambda: no_such_name, ["name"]),  # noqa: F821
        (lambda: "".no_such_attribute, ["name", "obj"]),
        (lambda: Path("/no/such/file").read_bytes(), ["errno", "filename", "filename2"]),
        (lambda: raises(InSlots(3)), ["code"]),
        (from_cause, ["second"]),
        (with_a_lock, ["step"]),
    ],
)
def test_an_exception_keeps_its_attributes_and_its_cause(function, attributes):
    with pytest.raises(Exception) as raised:  # noqa: PT011  # each has another
        function()
    sent = raised.value
    error = pickle.loads(picklable(sent))
    assert type(error) is type(sent)
    assert str(error) == str(sent)
    for name in attributes:
        assert getattr(error, name) == getattr(sent, name), name
    assert repr(error.__cause__) == repr(sent.__cause__)
    assert error.__suppress_context__ is sent.__suppress_context__
    assert not hasattr(error, "lock")


def test_results_that_do_not_arrive_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = [tmp_path / "outcome-0", tmp_path / "outcome-1"]
    for path, value in zip(paths, ("good", Broken()), strict=True):
        save_result(path, value)
    with pytest.raises(HvkitError, match="what rank 1 returned cannot be unpickled") as raised:
        results_in(paths)
    kept = re.search(r"open\('(.*)', 'rb'\)", str(raised.value))[1]
    assert pickle.loads(Path(kept.replace("rank-1", "rank-0")).read_bytes()) == "good"
    with pytest.raises(ValueError, match="no number"):
        pickle.loads(Path(kept).read_bytes())


def test_an_exception_whose_text_raises_keeps_its_class():
    error = pickle.loads(picklable(WithoutText(3)))
    assert type(error) is WithoutText
    assert error.args == (3,)


def test_a_group_stays_one_though_an_exception_in_it_cannot_travel():
    inner = ExceptionGroup("inner", [Never("x"), SaysHow(1, 2)])
    group = pickle.loads(picklable(BaseExceptionGroup("outer", [inner, KeyboardInterrupt()])))
    found = [(type(each), str(each)) for each in group.exceptions[0].exceptions]
    assert found == [(HvkitError, "Never: x"), (SaysHow, "1")]
    assert type(group.exceptions[1]) is KeyboardInterrupt


def test_a_full_disk_is_named_and_what_was_written_makes_room(tmp_path):
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/outcome'") as raised:
        save_result(tmp_path / "outcome", OfFullDisk())
    assert raised.value.__notes__ == ["Set TMPDIR to a folder on a disk with more room."]
    assert not [*tmp_path.iterdir()]
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/call'"),
        call_folder(print, [OfFullDisk()], {}),
    ):
        pass
