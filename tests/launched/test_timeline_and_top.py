"""``hvkit run --timeline`` and ``hvkit top`` with ranks that train."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from cases import MORE
from rich.text import Text

from hvkit.cli import top
from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status
from hvkit.watch.spans import REDUCTION

pytestmark = MORE

PYTORCH = """
import sys, time
from pathlib import Path
import torch, hvkit
folder, fault = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
hvkit.distribute(model, optimizer)
with hvkit.Monitor(folder / "seen", every=5) as monitor:
    for x in monitor.batches(torch.randn(20, 6, 8)):
        output = model(x)
        output.register_hook(lambda _: time.sleep(0.005))
        output.square().mean().backward()
        optimizer.step()
        monitor.step()
        if fault == "kill" and hvkit.rank() == 1 and not (folder / "over").exists():
            time.sleep(2)
            (folder / "over").touch()
            os.kill(os.getpid(), 9)
    if fault == "wait":
        if hvkit.rank() == 1:
            print("trained", flush=True)
            while not (folder / "go").exists():
                time.sleep(0.05)
        hvkit.barrier()
""".replace("import sys", "import os, sys")
KERAS = """
import sys
import keras, numpy as np, hvkit
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
optimizer = keras.optimizers.SGD(0.1)
hvkit.distribute(model, optimizer)
model.compile(optimizer, "mse")
x = np.ones((120, 8), "f")
model.fit(x, x[:, :4], batch_size=6, verbose=0, shuffle=False)
"""

# Saves every fifth step. At step 12 of the first try rank 1 is killed; the next try waits after
# step 17 until the file "go" is there.
RESUMED = """
import os, sys, time
from pathlib import Path
import torch, hvkit
folder, strategy = Path(sys.argv[1]), eval("hvkit." + sys.argv[2])
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
hvkit.distribute(model, optimizer, strategy=strategy)
checkpoint = hvkit.Checkpoint(folder / "saved", model=model, optimizer=optimizer)
start = checkpoint.restore().step
for step in range(start + 1, 18):
    model(torch.ones(6, 8)).square().mean().backward()
    optimizer.step()
    checkpoint.end_step(epoch=0, step=step, every=5)
    if step == 12 and hvkit.rank() == 1 and not start:
        os.kill(os.getpid(), 9)
while not (folder / "go").exists():
    time.sleep(0.05)
hvkit.barrier()
"""
# `hvkit run` with pauses that last until the file "again" is there.
PAUSING = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from hvkit import cli
from hvkit.launching import start

def pause(seconds):
    while not (Path(sys.argv[-2]) / "again").exists():
        time.sleep(0.05)

start.time = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
sys.exit(cli.main(sys.argv[1:]))
"""
TOP = [sys.executable, "-m", "hvkit", "top"]
ON_TERMINAL = "import sys; sys.stdout.isatty = lambda: True; from hvkit.cli import main; main()"
LIVE = [sys.executable, "-c", ON_TERMINAL, "top"]


def command(script, folder, fault, *options):
    path = folder / "train.py"
    path.write_text(script)
    return [
        *(sys.executable, "-m", "hvkit", "run", "-np", "2", *options),
        *(sys.executable, str(path), str(folder), fault),
    ]


def trace(folder, script, fault="", *options):
    file = folder / "trace.json"
    run = command(script, folder, fault, "--timeline", str(file), *options)
    ended = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(file.read_text())


def drawn(events, name, rank):
    return [e for e in events if (e["ph"], e["name"], e["pid"]) == ("X", name, rank)]


@pytest.mark.parametrize(
    ("script", "names"),
    [(PYTORCH, ("backward()", "step")), (KERAS, ["step"])],
    ids=["torch", "keras"],
)
def test_a_trace_shows_the_steps_of_all_ranks_on_one_clock(tmp_path, script, names):
    events = trace(tmp_path, script)
    for name in names:
        steps = [{e["args"]["step"]: e for e in drawn(events, name, rank)} for rank in range(2)]
        assert list(steps[0]) == list(steps[1]) == list(range(1, 21))
        for mine, other in zip(*(each.values() for each in steps), strict=True):
            # Neither rank leaves a step before the other has begun it.
            assert mine["ts"] <= other["ts"] + other["dur"]
            assert other["ts"] <= mine["ts"] + mine["dur"]
    for rank in range(2):
        assert drawn(events, "waiting", rank)
        if script == PYTORCH:
            steps_with_all_that_is_in_them(events, rank)


def steps_with_all_that_is_in_them(events, rank):
    """A step holds its batch and the whole of backward(), which ends with averaging."""
    kinds = [drawn(events, name, rank) for name in ("step", "data", "backward()", REDUCTION)]
    for step, data, backward, reduction in zip(*kinds, strict=True):
        assert step["ts"] == data["ts"] <= backward["ts"]
        assert backward["ts"] + 5000 <= reduction["ts"]  # the script's own part of it takes 5 ms
        for inner, outer in ((reduction, backward), (backward, step)):
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_a_trace_holds_what_a_killed_rank_did_and_the_restart(tmp_path):
    events = trace(tmp_path, PYTORCH, "kill", "--max-restarts", "1")
    (note,) = [each["name"] for each in events if each["ph"] == "i"]
    assert "rank 1" in note
    assert "SIGKILL" in note
    # The first try of rank 0: its first spans were sent before the end.
    assert len(drawn(events, "hvkit.distribute", 0)) == 2
    assert len(drawn(events, "backward()", 1)) >= 20


def until(run, reached):
    """Wait until a run that is under way has reached a state."""
    deadline = time.monotonic() + 100
    seen = None
    while seen is None or not reached(seen):
        time.sleep(0.05)
        try:
            seen = run_status.read(run.pid)
        except HvkitError:
            assert run.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, seen


def all_at(step):
    """Whether both ranks have reported this step."""
    return lambda state: [each.get("step") for each in state["ranks"]] == [step] * 2


def looked(run):
    """The lines that ``hvkit top --once`` prints."""
    top = [*TOP, "--once", str(run.pid)]
    return subprocess.run(top, capture_output=True, text=True, check=True).stdout.splitlines()


@contextmanager
def running(words, *files):
    """A process that ends by itself once these files are there."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            for each in files:
                each.touch()
    assert process.returncode == 0


def test_top_shows_who_waits_and_that_a_stopped_rank_does_not_answer(tmp_path):
    def waits(state):
        first, *_ = state["ranks"] or [{}]
        return all_at(20)(state) and first["call"] == "hvkit.barrier" and "speed" in first

    with running(command(PYTORCH, tmp_path, "wait"), tmp_path / "go") as run:
        assert run.stdout.readline() == "trained\n"
        until(run, waits)
        title, _, first, second = looked(run)
        assert title.startswith(f"hvkit run {run.pid} (python train.py ")
        assert "), begun " in title
        assert " ago: 2 of 2 ranks, 0 restarts, newest checkpoint: none; " in title
        assert title.endswith(" samples a second")
        assert first.split()[:2] == ["0", "20"]
        assert "hvkit.barrier" in first
        assert "in the script" in second

        ranks = [
            each
            for each in psutil.Process(run.pid).children(recursive=True)
            if each.cmdline()[1:2] == [str(tmp_path / "train.py")]
        ]
        stopped = ranks[0]
        stopped.suspend()
        try:
            silent = top._PACE_OVER + 1
            until(run, lambda state: any(age(each) > silent for each in state["ranks"]))
            rows = looked(run)[2:]
            moved = [each["moved"] for each in run_status.read(run.pid)["ranks"]]
        finally:
            stopped.resume()
        assert sum("not answering for " in each for each in rows) == 1
        until(run, lambda state: all(age(each) < silent for each in state["ranks"]))
        # Neither has made a step meanwhile.
        assert [each["moved"] for each in run_status.read(run.pid)["ranks"]] == moved


def age(rank):
    """Seconds since a rank's last report."""
    return time.monotonic() - rank["at"]


def test_top_shows_a_run_between_two_tries_and_counts_its_steps_on(tmp_path):
    words = command(RESUMED, tmp_path, "LocalSGD(4)", "--max-restarts", "1")
    last = 16  # the end of the last round
    words[1:3] = ["-c", PAUSING]
    again, go = tmp_path / "again", tmp_path / "go"
    with running(words, again, go) as run:
        until(run, lambda state: state["restarts"] == 0 and state["phase"].startswith("begins"))
        with running([*LIVE, str(run.pid)]) as live:
            title, ended, phase = looked(run)
            assert title.startswith(f"hvkit run {run.pid} (")
            assert title.endswith(" ago: no ranks, 0 restarts, newest checkpoint: step 10")
            assert ended.startswith("the ranks have ended: rank 1 on ")
            assert "SIGKILL" in ended
            assert phase == "begins restart 1 after a pause of 1 s"
            again.touch()
            until(run, all_at(last))
            title, ended, _, *ranks = looked(run)
            assert title.endswith(" ago: 2 of 2 ranks, 1 restart, newest checkpoint: step 15")
            assert ended.startswith("last restart: rank 1 on ")
            assert [each.split()[:2] for each in ranks] == [["0", str(last)], ["1", str(last)]]
            assert live.poll() is None
            go.touch()
            last = Text.from_ansi(live.stdout.read()).plain.splitlines()[-1]
            assert last.endswith(f"hvkit run {run.pid} has ended")


def test_top_counts_on_the_steps_of_an_earlier_run(tmp_path):
    words = command(RESUMED, tmp_path, "Synchronous()")
    assert subprocess.run(words, capture_output=True, timeout=120).returncode != 0  # killed
    with running(words, tmp_path / "go") as run:
        until(run, all_at(17))
