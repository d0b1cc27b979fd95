"""What rank 0 does first, or alone."""

import os
import time

import pytest
from ranks import error_of

import hvkit
from hvkit import main_rank, runtime


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks."""
    return hvkit.broadcast(str(tmp_path))


def arrive(folder):
    """Leave a file; the ranks that had done so before."""
    before = sorted(os.listdir(folder))
    with open(os.path.join(folder, str(hvkit.rank())), "w"):
        pass
    return before


def test_rank_0_is_the_main_one():
    assert hvkit.allgather(hvkit.is_main()) == [rank == 0 for rank in range(hvkit.size())]


def test_rank_0_runs_the_body_before_the_others(folder):
    with hvkit.main_first():
        if hvkit.is_main():
            time.sleep(0.5)
        before = arrive(folder)
    assert before == [] if hvkit.is_main() else "0" in before
    # All have run it when it is over.
    assert sorted(os.listdir(folder)) == [str(rank) for rank in range(hvkit.size())]


def test_then_comes_one_rank_of_every_other_host(folder, monkeypatch):
    """As if the last rank were alone on a second host."""
    last = hvkit.size() - 1
    monkeypatch.setattr(runtime, "local_size", lambda: 1 if hvkit.rank() == last else last)
    monkeypatch.setattr(runtime, "local_rank", lambda: 0 if hvkit.rank() == last else hvkit.rank())
    with hvkit.main_first():
        if hvkit.rank() in (0, last):
            time.sleep(0.5)
        before = arrive(folder)
    if hvkit.rank() == 0:
        assert before == []
    elif hvkit.rank() == last:
        assert before == ["0"]
    else:
        assert {"0", str(last)} <= set(before)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_the_body_reaches_all_ranks(failing):
    ran = []

    def body():
        with hvkit.main_first():
            ran.append(hvkit.rank())
            if hvkit.rank() == failing:
                raise OSError(28, "No space left on device", "cache")

    error, text = error_of(body)
    assert error is OSError
    assert text == "[Errno 28] No space left on device: 'cache'"
    # Those whose turn comes later do not run it.
    assert ran == ([] if failing < hvkit.rank() and failing == 0 else [hvkit.rank()])
    assert not main_rank._inside


def test_an_error_of_another_kind_names_its_rank():
    def body():
        with hvkit.main_first():
            raise KeyError("x")

    error, text = error_of(body)
    assert error is (KeyError if hvkit.is_main() else hvkit.HvkitError)
    assert hvkit.is_main() or text == "on rank 0: KeyError: 'x'"


def test_inside_another_it_changes_nothing(folder):
    with hvkit.main_first():
        with hvkit.main_first():
            inner = arrive(folder)
        assert hvkit.is_main() or "0" in inner
    assert hvkit.allgather(hvkit.rank()) == list(range(hvkit.size()))


def test_a_collective_in_the_body_is_an_error():
    def body():
        with hvkit.main_first():
            hvkit.barrier()

    error, text = error_of(body)
    assert error is hvkit.RanksDisagreeError
    assert "hvkit.barrier" in text
    assert "hvkit.main_first" in text


def test_it_decorates_a_function(folder):
    @hvkit.main_first()
    def load():
        return arrive(folder)

    assert load() == [] if hvkit.is_main() else "0" in load()
