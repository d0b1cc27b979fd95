"""All ranks leave at the end of the same step after SIGTERM: what is decided, without sockets."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from hvkit.watch import preemption
from hvkit.watch.preemption import Preemption, StepAgreement


def test_the_ranks_leave_one_step_after_the_last_that_any_has_ended():
    agreement = StepAgreement(3)
    assert agreement.begin()
    assert not agreement.begin()
    for rank, step in enumerate((7, 9, 8)):
        assert not agreement.decided()
        agreement.take(rank, step)
    assert agreement.decided()
    assert agreement.step == 10
    assert not agreement.decided()  # the result is sent once


def test_without_an_answer_of_every_rank_there_is_no_step(monkeypatch):
    agreement = StepAgreement(2)
    agreement.begin()
    agreement.take(0, 7)
    assert not agreement.decided()
    monkeypatch.setattr(StepAgreement, "PATIENCE", 0.0)
    assert agreement.decided()
    assert agreement.step is None


@pytest.fixture
def rank():
    """One of several."""
    rank = Preemption()
    rank.several_ranks()
    return rank


def test_a_rank_holds_until_the_step_is_known_and_goes_on_to_it(rank):
    assert not rank.at_last_step()
    assert rank.hold() == 1
    threading.Timer(0.1, rank.leave_at, [4]).start()
    assert next(steps for steps in range(1, 100) if rank.at_last_step()) == 3
    assert rank._step == 4


def test_a_rank_goes_on_if_there_is_no_agreement_and_may_agree_later(rank):
    rank.hold()
    threading.Timer(0.1, rank.leave_at, [None]).start()
    assert not rank.at_last_step()
    assert not rank.at_last_step()
    rank.hold()
    rank.leave_at(3)
    assert rank.at_last_step()


def test_one_process_leaves_at_the_end_of_its_step_with_status_143():
    rank = Preemption()
    assert not rank.at_last_step()
    assert not rank.take_sigterm()
    assert rank.at_last_step()
    with pytest.raises(SystemExit) as ended:
        rank.leave()
    assert ended.value.code == 143


def test_the_same_sigterm_may_come_several_times_but_a_later_one_ends_the_process(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    rank = Preemption()
    assert [rank.take_sigterm() for _ in range(3)] == [False] * 3
    now[0] += 3
    assert rank.take_sigterm()


def test_sigterm_ends_a_rank_at_once_when_another_has_ended():
    rank = Preemption()
    rank.other_ended()
    assert rank.take_sigterm()


def test_handling_sigterm_again_and_again_takes_no_further_files_and_threads():
    rank, held = Preemption(), []
    for _ in range(23):
        rank.handle_sigterm()
        rank.stop_handling()
        held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert held[3:] == [held[2]] * 20
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("during", [True, False])
def test_sigterm_counts_also_with_an_event_loop_of_the_script(during):
    """A loop takes the wakeup descriptor for its own signals, and leaves none behind."""
    code = f"""
import asyncio, os, signal, time
from hvkit.watch.preemption import PREEMPTION
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    if {during}:
        os.kill(os.getpid(), signal.SIGTERM)
PREEMPTION.handle_sigterm()
asyncio.run(main())
if not {during}:
    os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 20
while not PREEMPTION.requested and time.monotonic() < deadline:
    time.sleep(0.01)
print(PREEMPTION.requested)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True\n", done.stderr
