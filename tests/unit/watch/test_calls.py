"""What a rank knows of itself: the call that it is in, and the line of the script."""

import json
import threading

import pytest

from hvkit.watch import calls
from hvkit.watch.calls import call, current_call, line_of_script, named, status, waiting


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


def test_inside_a_call_the_steps_of_hvkit_itself_count_as_that_call():
    with call("fit"), call("optimizer.apply()"):
        assert current_call() == "fit"


def test_what_a_callback_calls_is_named_itself():
    with call("fit"):
        assert something() == "hvkit.something"
        assert current_call() == "fit"


def test_a_call_that_raises_is_over():
    with pytest.raises(KeyError), call("fit"):
        raise KeyError
    assert current_call() == ""


def test_a_wait_is_seen_from_another_thread_with_its_line():
    seen = []
    with call("hvkit.average"), waiting():
        thread = threading.Thread(target=lambda: seen.append(status()))
        thread.start()
        thread.join()
    assert seen[0].waits
    assert seen[0].call == "hvkit.average"
    assert seen[0].where.startswith("tests/unit/watch/test_calls.py:")
    assert not status().waits


def test_the_line_is_the_scripts_and_not_a_librarys():
    lines = []
    json.loads('{"a": 1}', object_hook=lambda _: lines.append(line_of_script()))
    assert lines[0].startswith("tests/unit/watch/test_calls.py:")
    exec("from json import loads", made := {"__name__": "a_library"})
    code = "def run(f):\n    return f()"
    exec(compile(code, "<string>", "exec"), made)
    assert made["run"](line_of_script).startswith("tests/unit/watch/test_calls.py:")


@pytest.fixture
def graph(monkeypatch):
    class Graph:
        key, name = "hvkit.0", "optimizer.apply()"
        counts = (12, 11)
        runs = True

        def read(self):
            return self.counts

    graph = Graph()
    monkeypatch.setattr(calls, "_graph_waits", [])
    monkeypatch.setattr(calls, "_graph_seen", {})
    monkeypatch.setattr(calls, "_inside_tensorflow", lambda: graph.runs)
    calls.watch_graph(graph)
    return graph


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
