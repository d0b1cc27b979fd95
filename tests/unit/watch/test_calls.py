"""What a rank knows of itself: the call that it is in, and the line of the script."""

import gc
import inspect
import json
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

import hvkit
from hvkit.watch import calls
from hvkit.watch.calls import (
    call,
    call_within,
    current_call,
    last_step,
    named,
    resume_at,
    status,
    waiting,
)
from hvkit.watch.script_lines import OWN_FOLDER, inside_tensorflow, line_of_script
from hvkit.watch.spans import observe


@pytest.fixture(autouse=True)
def _no_step(monkeypatch):
    """As in a script that begins; other tests in this process may have resumed."""
    monkeypatch.setattr(calls, "_last_step", 0)
    monkeypatch.setattr(calls, "_resumed", 0)
    monkeypatch.setattr(calls, "_graphs", weakref.WeakKeyDictionary())


@named("hvkit.something")
def something():
    return current_call()


def test_a_call_of_the_script_is_known_while_it_lasts():
    before = status().serial
    with call("backward()", step=11, key="Net"):
        assert current_call() == "backward() of step 11"
        assert status().key == "backward() Net"
    assert current_call() == ""
    assert status().serial == before + 1
    assert status().before == "backward() Net"


class Graph:
    """Collectives in a graph, of which a test says how many have begun and ended."""

    key, name, ranks = "hvkit.0", "optimizer.apply()", ()
    counts = (12, 11)
    runs = True

    def read(self):
        return self.counts


@pytest.fixture
def graph(monkeypatch):
    graph = Graph()
    inside = lambda: threading.get_ident() if graph.runs else None  # noqa: E731
    monkeypatch.setattr(calls, "inside_tensorflow", inside)
    calls.watch_graph(graph)
    return graph


def make_steps(*steps):
    for step in steps:
        with call("backward()", step=step):
            pass


def test_steps_count_on_from_those_of_a_checkpoint():
    make_steps(1, 2, 3)  # before the script resumes
    assert last_step() == 3
    resume_at(10, last_step())
    assert last_step() == 10
    seen = []
    observe(seen.append)
    try:
        with call("backward()", step=4):
            assert current_call() == "backward() of step 11"
    finally:
        observe(seen.append, on=False)
    assert last_step() == 11
    assert [span.step for span in seen] == [11]
    resume_at(2, last_step())  # an older one
    make_steps(5)
    assert last_step() == 3


def test_steps_in_a_graph_count_on_from_those_of_a_checkpoint(graph):
    graph.counts = 3, 3
    assert last_step() == 3
    resume_at(10, last_step())
    assert last_step() == 10
    graph.counts = 8, 8
    assert last_step() == 15


def test_inside_a_call_only_what_a_callback_calls_is_named_itself():
    with call("fit"):
        with call("optimizer.apply()"):  # of hvkit itself
            assert current_call() == "fit"
        assert something() == "hvkit.something"
        assert current_call() == "fit"
        with call_within("evaluate"):  # which not every rank may make
            assert current_call() == "evaluate in fit"
    with call_within("evaluate"):
        assert current_call() == "evaluate"
    with pytest.raises(KeyError), call("fit"):
        raise KeyError
    assert current_call() == ""


@pytest.mark.parametrize(
    "name",
    ["distribute", "shard", "allgather", "mean", "broadcast", "average", "any_rank", "allreduce"],
)
def test_public_functions_are_calls_of_the_script_under_all_their_decorators(name):
    seen = []
    observe(seen.append)
    try:
        with pytest.raises(TypeError):
            getattr(hvkit, name)()
    finally:
        observe(seen.append, on=False)
    assert [span.name for span in seen] == [f"hvkit.{name}"]


def test_a_step_that_fails_does_not_count():
    make_steps(3)
    with pytest.raises(KeyError), call("backward()", 4):
        raise KeyError
    assert last_step() == 3


def test_threads_are_in_calls_of_their_own():
    entered, go_on = threading.Event(), threading.Event()

    def average():
        with call("hvkit.average"), waiting():
            entered.set()
            go_on.wait(20)

    with call("backward()"), ThreadPoolExecutor(1) as pool:
        pool.submit(average)
        entered.wait(20)
        assert current_call() == "backward()"
        now = status()
        assert (now.call, now.waits) == ("hvkit.average", True)
        assert now.where.startswith("tests/unit/watch/test_calls.py:")
        go_on.set()
        pool.shutdown()
        assert (status().call, status().waits) == ("backward()", False)
        for _ in range(2):
            with waiting():
                assert status().waits
            assert not status().waits


def test_the_line_is_the_scripts_and_not_a_librarys():
    lines = []
    json.loads('{"a": 1}', object_hook=lambda _: lines.append(line_of_script()))
    assert lines[0].startswith("tests/unit/watch/test_calls.py:")
    exec("from json import loads", made := {"__name__": "a_library"})
    code = "def run(f):\n    return f()"
    exec(compile(code, "<string>", "exec"), made)
    assert made["run"](line_of_script).startswith("tests/unit/watch/test_calls.py:")


def test_collectives_in_a_graph_count_as_waits(graph):
    with call("fit"):
        assert status().waits
        assert status().call == "fit, step 12"
        graph.counts = (12, 12)
        assert not status().waits


def test_a_graph_that_has_failed_waits_no_more(graph):
    assert status().call == "optimizer.apply(), step 12"
    with call("Checkpoint.save"):
        assert not status().waits
    assert not status().waits
    graph.counts = (13, 11)
    assert status().waits
    graph.runs = False
    assert not status().waits


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("/lib/tensorflow/python/eager/execute.py", True),
        (f"{OWN_FOLDER}frameworks/keras/tensorflow/local_updates.py", False),
    ],
)
def test_hvkits_own_code_for_tensorflow_runs_no_graph(file, counts):
    queue = SimpleQueue()
    wait = eval(compile("lambda get: get()", file, "eval"))
    thread = threading.Thread(target=wait, args=[queue.get])
    thread.start()
    while sys._current_frames()[thread.ident].f_code is not wait.__code__:
        time.sleep(0.01)
    found = inside_tensorflow()
    queue.put(None)
    thread.join()
    assert (found == thread.ident) == counts


def test_a_graph_that_nobody_holds_any_more_is_forgotten(graph):
    gone = Graph()
    gone.counts = (1, 0)
    calls.watch_graph(gone)
    del gone
    gc.collect()
    graph.counts = (12, 12)
    assert not status().waits
    assert len(calls._graphs) == 1


def test_threads_may_look_while_graphs_come_and_go(graph):
    kept = []

    class Other(Graph):
        """While one thread reads this, the next graph goes, and another thread looks, too."""

        def read(self):
            while kept:
                kept.pop()
                status()
            return (1, 1)

    others = [Other(), Other()]
    for each in others:
        calls.watch_graph(each)
    kept.append(others.pop())
    del each
    assert status().serial >= 1
    assert len(calls._graphs) == 2


@pytest.mark.parametrize("look", [line_of_script, status])
def test_looking_at_the_stack_keeps_no_variable_of_the_script(look):
    class Batch:
        pass

    def step():
        batch = Batch()
        look()
        return weakref.ref(batch)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


LOOK_WHILE_GARBAGE_WAITS = """
import faulthandler, gc, sys, threading
sys.path.insert(0, "REPOSITORY")
from hvkit.watch import script_lines

faulthandler.dump_traceback_later(20, exit=True)
stop = threading.Event()
gc.disable()
for allocations in range(12):
    # Threads whose frames nobody has looked at.
    started = [threading.Event() for _ in range(5)]
    for each in started:
        threading.Thread(target=lambda e=each: (e.set(), stop.wait()), daemon=True).start()
    for each in started:
        each.wait()
    own = [threading.local()]
    own.append(own)
    del own
    gc.set_threshold(gc.get_count()[0] + allocations)
    gc.enable()
    script_lines.stack_of_script()
    assert gc.isenabled()
    gc.disable()
script_lines.stack_of_script()
assert not gc.isenabled()
"""


# Threads take turns often, and everything collects garbage whose destructors let others run.
LOOK_AT_A_BUSY_THREAD = """
import faulthandler, gc, sys, threading, time
sys.path.insert(0, "REPOSITORY")
from hvkit.watch import script_lines

faulthandler.dump_traceback_later(60, exit=True)
gc.set_threshold(3)
sys.setswitchinterval(1e-4)
looks = []

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)

def look():
    for _ in range(500):
        Garbage()
        looks.append(script_lines.line_of_script(threading.main_thread().ident))

def nested(depth, text=""):
    longer = text + "x"
    more = [longer, longer + "y"]
    if depth:
        sorted("a", key=lambda _: nested(depth - 1, longer))
    return len(more)

looker = threading.Thread(target=look)
looker.start()
while looker.is_alive():
    nested(8)
assert len(looks) == 500 and all(each.startswith("<string>:") for each in looks), set(looks)
"""


@pytest.mark.parametrize("script", [LOOK_WHILE_GARBAGE_WAITS, LOOK_AT_A_BUSY_THREAD])
def test_looking_at_threads_beside_garbage_collections_is_safe(script):
    script = script.replace("REPOSITORY", str(Path(calls.__file__).parents[2]))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_error_that_a_call_is_made_after_is_known():
    try:
        raise KeyError("label 17")
    except KeyError:
        with call("hvkit.barrier"):
            assert status().handling == "KeyError: 'label 17'"
    with call("hvkit.barrier"):
        assert status().handling == ""


def test_a_working_directory_that_is_gone_hides_no_line(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert line_of_script().endswith(f"test_calls.py:{inspect.currentframe().f_lineno}")


@pytest.mark.parametrize(("now", "left"), [(1e9 + 0.25, 0.75), (1e9, 1.0), (1e9 + 0.999, 0.001)])
def test_ranks_report_at_the_full_seconds_of_the_clock(now, left):
    assert calls._until_next(now) == pytest.approx(left, abs=1e-6)
