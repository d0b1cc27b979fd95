"""Marks which call of hvkit this rank is in, whether it waits there, and at which line.

A wait that fails raises hvkit's error for it. At every full second the rank reports its call to
``hvkit run``, if that has started it.

Threads of the training script only set a few fields. The watcher's thread reads those fields, and
the stacks only when a wait has lasted long enough to matter.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from hvkit import threads
from hvkit.host.run_reports import listened_to, report, timeline_wanted
from hvkit.log import in_short
from hvkit.watch.rank_errors import is_failure, meaning_of
from hvkit.watch.script_lines import MAIN, OWN_FOLDER, frames, inside_tensorflow, line_of_script
from hvkit.watch.spans import WAITING, Recorder, mark, observers

# The function of ``hvkit.communication.tensors`` that keeps PyTorch's compiler out of a call.
_UNCOMPILED = "_uncompiled"
_INTEGRATIONS = f"{OWN_FOLDER}integrations{os.sep}"
# Seconds between two reports to `hvkit run`; characters of a call, and of a line of the script.
_REPORT_EVERY = 1.0
_TEXT = 200

P = ParamSpec("P")
R = TypeVar("R")


class GraphCounters(Protocol):
    """Collectives inside a TensorFlow graph, where no Python code runs around them."""

    key: str  # the same on every rank
    name: str  # the name of the wait in messages if the script is in no call of hvkit
    ranks: tuple[int, ...]  # those that take part; none for all

    def read(self) -> tuple[int, int]:
        """How often this rank has entered these collectives, and returned from them."""


@dataclass(frozen=True)
class Status:
    """A rank's current call."""

    call: str = ""  # the user's, ``hvkit.average``, ``backward() of step 11``; empty outside of any
    key: str = ""  # ranks in calls with the same key wait for each other
    serial: int = 0  # the number of calls so far, including this one
    before: str = ""  # the key of the previous call
    waits: bool = False  # whether the rank waits there for other ranks
    seconds: float = 0.0  # duration of the wait, or time since the last wait
    where: str = ""  # the line of the script, ``train.py:41``
    handling: str = ""  # the error that the script was handling when it made the call; else empty
    stack: tuple[str, ...] = ()  # of its main thread, innermost last, if others wait for the rank
    ranks: tuple[int, ...] = ()  # those that the call needs, with this one; none for all


class _ScriptCall(NamedTuple):
    """A call that a thread is in."""

    name: str = ""
    step: int | None = None
    key: str = ""
    handling: str = ""

    def __str__(self) -> str:
        return self.name if self.step is None else f"{self.name} of step {self.step}"


_NO_CALL = _ScriptCall()


@dataclass(slots=True)
class _ThreadRecord:
    """The current call of a thread of the script; only that thread writes it."""

    ident: int
    call: _ScriptCall = _NO_CALL
    before: str = ""  # the key of the previous call
    serial: int = 0
    turns: int = 0  # beginnings and ends of calls and waits
    waits: int = 0  # one inside the other
    ranks: tuple[int, ...] = ()
    since: float = field(default_factory=time.monotonic)
    wait_begun: float = 0.0


class _Counts(NamedTuple):
    """The counters of a graph as they were last read.

    A graph that fails does not count its end. But once the script has begun or ended another call
    (``turns``), or is no longer inside TensorFlow, the graph has ended.
    """

    read: tuple[int, int]
    changed_at: float
    turns: int  # at that time


# By thread number. The system reuses numbers: a new thread then continues an ended one's record.
_threads: dict[int, _ThreadRecord] = {MAIN: _ThreadRecord(MAIN)}
_graphs: WeakKeyDictionary[GraphCounters, _Counts] = WeakKeyDictionary()


def _this_thread() -> _ThreadRecord:
    ident = threading.get_ident()
    try:
        return _threads[ident]
    except KeyError:
        return _threads.setdefault(ident, _ThreadRecord(ident))


def call(
    name: str, step: int | None = None, key: str = "", *, span: str = ""
) -> AbstractContextManager[None]:
    """Wraps a call that all ranks make together; waits inside are reported as waits in this call.

    Inside another call this has no effect: the outer one is the user's. ``step`` is the optimizer's
    since the script began, from 1. Calls wait for each other if name and ``key`` are the same.
    ``span`` is its name in a timeline, if this is only a part of the user's call.
    """
    return nullcontext() if _this_thread().call.name else _Entered(name, step, key, span or name)


def call_within(name: str) -> AbstractContextManager[None]:
    """Wraps a call that another may contain on all ranks or on none: ``evaluate in fit``."""
    outer = _this_thread().call.name
    within = f"{name} in {outer}" if outer else name
    return _Entered(within, None, "", within)


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a public function: a call of it by the script is the call ``name``.

    This also holds inside another call, such as in a callback of ``fit``. But if hvkit itself calls
    the function, the current call stays the script's.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_call(*args: P.args, **kwargs: P.kwargs) -> R:
            caller: Any = sys._getframe(1)
            if caller.f_code.co_name == _UNCOMPILED:
                caller = caller.f_back
            file = caller.f_code.co_filename
            # An integration calls on behalf of a trainer, which the script has started.
            if file.startswith(OWN_FOLDER) and not file.startswith(_INTEGRATIONS):
                return function(*args, **kwargs)
            with _Entered(name, None, "", name):
                return function(*args, **kwargs)

        # TensorFlow's own mark: without, AutoGraph would rewrite the function in a graph, and warn.
        # TensorFlow's decorator for it cannot be used, since that imports TensorFlow.
        in_call.autograph_info__ = None  # type: ignore[attr-defined]
        return in_call

    return decorate


class _Entered:
    """A call under way. A class, as ``waiting``: each step makes some."""

    def __init__(self, name: str, step: int | None, key: str, span: str) -> None:
        self._step = None if step is None else of_run(step)
        self._name, self._key, self._span = name, key, span

    def __enter__(self) -> None:
        now = self._now = _this_thread()
        error = sys.exc_info()[1]
        handling = in_short(error) if error is not None and is_failure(error) else ""
        self._outer = now.call
        now.call = _ScriptCall(self._name, self._step, f"{self._name} {self._key}", handling)
        now.serial += 1
        now.turns += 1
        self._begun = time.monotonic()

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        global _last_step
        now = self._now
        if error is None and self._step is not None:
            _last_step = max(_last_step, self._step)
        now.before = now.call.key
        now.turns += 1
        now.call = self._outer
        if observers:
            mark(self._span, self._begun, time.monotonic(), self._step)


def current_call() -> str:
    """The user's call that this thread is in; empty outside of calls."""
    return str(_this_thread().call)


class waiting:
    """Wraps code that returns only when every rank has entered it; of ``ranks``, if there are any.

    A class, since each step enters some: a generator takes longer to enter than this.
    """

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        now = self._now = _this_thread()
        now.ranks = self._ranks  # before others may see that it waits
        now.waits += 1
        now.turns += 1
        now.since = time.monotonic()
        if now.waits == 1:
            now.wait_begun = now.since

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        now = self._now
        now.waits -= 1
        now.since = time.monotonic()
        if observers and not now.waits:
            mark(WAITING, now.wait_begun, now.since)


@contextmanager
def working() -> Iterator[None]:
    """Wraps work inside of ``waiting`` that is no wait: code of others may wait, work, and wait."""
    now = _this_thread()
    waits, ranks = now.waits, now.ranks
    if not waits:
        yield
        return
    now.waits = 0
    now.turns += 1
    now.since = time.monotonic()
    if observers:
        mark(WAITING, now.wait_begun, now.since)
    try:
        yield
    finally:
        now.ranks = ranks
        now.waits = waits
        now.turns += 1
        now.wait_begun = now.since = time.monotonic()


class Members(Protocol):
    """Some of the ranks, by their numbers."""

    ranks: tuple[int, ...]


class translated:
    """Wraps collectives of Horovod and graphs of TensorFlow, and translates their errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            meaning = meaning_of(error, current_call())
            if meaning is not None:
                raise meaning from None


class waiting_for_all_ranks(waiting, translated):
    """Wraps a collective of Horovod's, which returns when every rank has called it."""

    def __init__(self, within: Members | None = None) -> None:
        super().__init__(within.ranks if within else ())

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        waiting.__exit__(self, error_type, error, trace)
        translated.__exit__(self, error_type, error, trace)


_last_step = 0
# Steps before the checkpoint that this process has resumed, minus those that it had made itself.
_resumed = 0


def last_step() -> int:
    """The last optimizer step of this rank, counted from 1 over all resumptions; 0 for none.

    In graphs, steps are counted by the collectives that are entered most often.
    """
    return max(_last_step, *(of_run(graph.read()[0]) for graph in _living_graphs()), 0)


def of_run(step: int) -> int:
    """The number of a step over all resumptions, from its number since the script began."""
    return step + _resumed


def resume_at(step: int, done: int) -> None:
    """Continue to count steps from this one, whose state was loaded.

    ``done`` is rank 0's ``last_step()``, on every rank: ranks may have taken different numbers of
    steps, but the numbers in the names of their calls must be the same.
    """
    global _last_step, _resumed
    _resumed += step - done
    _last_step = step


def watch_graph(graph: GraphCounters) -> None:
    """Count waits in these collectives of a graph as waits of this rank, while the graph exists."""
    _graphs[graph] = _Counts((0, 0), time.monotonic(), -1)


def _living_graphs() -> list[GraphCounters]:
    # Other threads may add and delete some meanwhile.
    return [graph for ref in _graphs.keyrefs() if (graph := ref()) is not None]


def status() -> Status:
    """This rank's current call, as the watcher's thread reads it."""
    moment = time.monotonic()
    records = list(_threads.values())
    serial, turns = sum(each.serial for each in records), sum(each.turns for each in records)
    now = _thread_that_counts(records)
    call, waits, since, thread = now.call, now.waits > 0, now.since, now.ident
    name, key, ranks = str(call), call.key, now.ranks if waits else ()
    for graph in _living_graphs():
        entered, left = found = graph.read()
        counts = _graphs.get(graph)
        if counts is None or counts.read != found:
            counts = _graphs[graph] = _Counts(found, moment, turns)
        serial += entered
        since = max(since, counts.changed_at)
        if entered > left and not waits and turns == counts.turns:
            inside = inside_tensorflow()
            if inside is not None:
                waits, thread, ranks = True, inside, graph.ranks
                whose = call.name or graph.name
                name, key = f"{whose}, step {of_run(entered)}", f"{whose} {graph.key}"
    where, seconds = line_of_script(thread), moment - since
    return Status(name, key, serial, now.before, waits, seconds, where, call.handling, (), ranks)


def _thread_that_counts(records: list[_ThreadRecord]) -> _ThreadRecord:
    """The thread that has waited longest; if none waits, the one that called hvkit last."""
    with frames() as now:
        running = set(now)
    alive = [each for each in records if each.ident in running] or records
    if waiting := [each for each in alive if each.waits]:
        return min(waiting, key=lambda each: each.since)
    return max(alive, key=lambda each: (bool(each.call.name), each.since))


def report_every_second() -> None:
    """Report from now on, in a thread, if ``hvkit run`` has started this rank.

    ``hvkit top`` shows where ranks are, ``hvkit run --timeline`` their spans.
    """
    if not listened_to():
        return
    recorder = Recorder() if timeline_wanted() else None

    def report_always() -> None:
        while True:
            time.sleep(_until_next(time.time()))
            report_now(status())
            if recorder is not None:
                recorder.send()

    threads.start("hvkit-heartbeat", report_always)


def _until_next(now: float) -> float:
    """Seconds until the clock's next full second, at which all ranks report."""
    return _REPORT_EVERY - now % _REPORT_EVERY


def report_now(now: Status) -> None:
    """Report where this rank is; also called before it ends, so that the last step is known."""
    report(
        now={
            "call": now.call[:_TEXT],
            "waits": round(now.seconds, 1) if now.waits else 0,
            "where": now.where[-_TEXT:],
            "step": last_step(),
            "made": round(time.time(), 3),
        }
    )
