"""Errors that end a rank: who shows them, and what the others and ``hvkit run`` hear."""

import functools
import gc
import json
import re
import sys
import threading
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils._pytree import tree_map

import hvkit
from hvkit.errors import LaunchError, RankLostError, RanksDisagreeError
from hvkit.watch import diagnosis, rank_errors, watcher
from hvkit.watch.diagnosis import Limits
from hvkit.watch.watcher import Reporter


@pytest.fixture
def said(monkeypatch):
    """What rank 1 says to ``hvkit run``."""
    said = []
    for module in (watcher, rank_errors):
        monkeypatch.setattr(module, "report", lambda **values: said.append(values))
    monkeypatch.setattr(rank_errors, "_watcher", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    rank_errors.install(Reporter(1, Limits(60.0, 1800.0), shut_down=lambda: None))
    return said


def caught(fails):
    try:
        fails()
    except BaseException as error:
        return error


def interrupts():
    raise KeyboardInterrupt


def shows(error):
    """As Python does with an error that nobody catches."""
    sys.excepthook(type(error), error, error.__traceback__)


def files_of(error):
    return [Path(place.filename).name for place in traceback.extract_tb(error.__traceback__)]


def test_an_error_of_all_ranks_is_each_ones_reason_and_shown_by_one(said, capsys):
    shows(rank_errors.mark_as_shown_by(FloatingPointError("not finite"), 0))
    assert said == [{"cause": "rank 1 failed with FloatingPointError: not finite"}]
    line = "hvkit: rank 1 ends with the same FloatingPointError as rank 0\n"
    assert capsys.readouterr().err == line


def test_the_traceback_of_an_explained_error_ends_at_the_line_of_the_script(said, monkeypatch):
    monkeypatch.setenv("X", "no number")
    seconds = functools.partial(diagnosis._seconds, default=1.0)
    error = caught(lambda: json.loads('{"a": 1}', object_hook=lambda _: tree_map(seconds, ["X"])))
    assert isinstance(error, LaunchError)
    assert {"_pytree.py", "diagnosis.py"} < {*files_of(error)}
    shows(error)
    # A library that calls the script, or is it, stays.
    assert files_of(error)[-2:] == ["decoder.py", "test_rank_errors.py"]


def test_an_argument_that_hvkit_refuses_is_shown_where_the_script_passes_it(said):
    error = caught(lambda: hvkit.LocalSGD(every=0))
    assert isinstance(error, ValueError)
    assert {*files_of(error)} > {"test_rank_errors.py"}
    shows(error)
    assert {*files_of(error)} == {"test_rank_errors.py"}
    assert {"refused": True} in said


def test_a_traceback_is_written_in_one_piece(said, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    shows(caught(lambda: [1, 2][3]))
    first, *rest = written
    assert first.startswith("Traceback (most recent call last):\n")
    assert first.endswith("\nIndexError: list index out of range\n")
    assert rest in ([], [""])


@pytest.mark.parametrize(
    ("fails", "in_file"),
    [
        (lambda: diagnosis._seconds("", None), "diagnosis.py"),
        (lambda: json.loads("["), "decoder.py"),
    ],
)
def test_the_traceback_of_a_bug_stays_whole(said, fails, in_file):
    error = caught(fails)
    shows(error)
    assert files_of(error)[-1] == in_file


@pytest.mark.parametrize("where", [(watcher, "report"), (rank_errors, "_meant")])
def test_an_error_that_a_signal_raises_while_another_is_shown_explains_it(
    said, monkeypatch, capsys, where
):
    function = getattr(*where)

    def interrupted(*args, **values):  # as by PyTorch's handler of SIGCHLD
        monkeypatch.setattr(*where, function)
        raise RuntimeError("worker 7 was killed")

    monkeypatch.setattr(*where, interrupted)
    try:
        raise ConnectionResetError("by peer")
    except ConnectionResetError as error:
        shows(error)
    assert said == [{"cause": "rank 1 failed with RuntimeError: worker 7 was killed"}]
    printed = capsys.readouterr().err
    assert "ConnectionResetError: by peer" in printed
    assert printed.endswith("RuntimeError: worker 7 was killed\n")


def test_after_ctrl_c_each_rank_shows_in_one_line_where_it_was(said, capsys):
    shows(caught(interrupts))
    printed = capsys.readouterr().err
    assert re.fullmatch(r"hvkit: rank 1 was interrupted \(\S*test_rank_errors.py:\d+\)\n", printed)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("rank 0 has ended", "RankLostError: rank 0 has ended\n"),
        (
            "rank 1 waits in fit (a.py:3); rank 0 failed with ValueError: 7",
            "hvkit: rank 1 ends for the error of rank 0: rank 1 waits in fit (a.py:3); rank 0 "
            "failed with ValueError: 7\n",
        ),
    ],
)
def test_a_lost_rank_is_no_reason_of_ones_own_and_an_error_of_another_is_its(
    said, capsys, reason, shown
):
    shows(RankLostError(reason))
    assert said == []
    assert capsys.readouterr().err.endswith(shown)


class RaisedByTensorFlow(Exception):
    __module__ = "tensorflow.python.framework.errors_impl"


def in_graph(error):
    """What TensorFlow raises if a function in a graph raises this."""
    with pytest.raises(type(error)), rank_errors.raised_in_graph():
        raise error
    return RaisedByTensorFlow(f"in a graph: {type(error).__name__}: {error} [Op:PyFunc]")


class OfTwo(RanksDisagreeError):
    """It cannot be made from its arguments."""

    def __new__(cls, rank, text):
        return super().__new__(cls, f"rank {rank}: {text}")

    def __init__(self, rank, text):
        super().__init__(f"rank {rank}: {text}")


@pytest.mark.parametrize("error", [RanksDisagreeError("the rates differ"), OfTwo(1, "no")])
def test_the_error_of_a_function_in_a_graph_is_found_again_once_and_only_behind_tensorflows(error):
    raised = in_graph(error)
    # An error of the script is none of a graph.
    assert rank_errors.meaning_of(RuntimeError(str(raised))) is None
    meant = rank_errors.meaning_of(raised)
    assert (type(meant), str(meant)) == (type(error), str(error))
    # No later error with its text means it, but the same one does.
    assert rank_errors.meaning_of(RaisedByTensorFlow(str(raised))) is None
    assert str(rank_errors.meaning_of(raised)) == str(error)


@pytest.mark.parametrize("again", [False, True])
def test_an_error_in_a_graph_keeps_no_values_of_the_script(again):
    class Value:
        pass

    def fails():
        value = Value()
        held.append(weakref.ref(value))
        if again:
            raise rank_errors.meaning_of(raised)
        with rank_errors.raised_in_graph():
            raise RanksDisagreeError("the rates differ")

    held, raised = [], in_graph(RanksDisagreeError("the rates differ"))
    with pytest.raises(RanksDisagreeError):
        fails()
    gc.collect()
    assert held[0]() is None
