"""Errors that end a rank: who shows them, and what the others and ``hvkit run`` hear."""

import sys
import threading

import pytest

from hvkit.errors import RankLostError
from hvkit.watch import rank_errors, watcher
from hvkit.watch.verdict import Limits
from hvkit.watch.watcher import Reporter


@pytest.fixture
def said(monkeypatch):
    """What rank 1 says to ``hvkit run``."""
    said = []
    monkeypatch.setattr(watcher, "report", lambda **values: said.append(values))
    monkeypatch.setattr(rank_errors, "_witness", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    rank_errors.install(Reporter(1, Limits(60.0, 1800.0), shut_down=lambda: None))
    return said


def test_an_error_of_all_ranks_is_each_ones_reason_and_shown_by_one(said, capsys):
    error = rank_errors.mark_as_shown_by(FloatingPointError("not finite"), 0)
    sys.excepthook(type(error), error, None)
    assert said == [{"cause": "rank 1 failed with FloatingPointError: not finite"}]
    assert capsys.readouterr().err == (
        "hvkit: rank 1 ends with the same FloatingPointError as rank 0\n"
    )


def test_a_lost_rank_is_no_reason_of_ones_own(said, capsys):
    error = RankLostError("rank 0 has ended")
    sys.excepthook(type(error), error, None)
    assert said == []
    assert "RankLostError: rank 0 has ended" in capsys.readouterr().err
