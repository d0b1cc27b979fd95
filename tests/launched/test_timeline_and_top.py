"""``hvkit run --timeline`` and ``hvkit top`` with ranks that train."""

import json
import subprocess
import sys

import pytest

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
        model(x).square().mean().backward()
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


def command(script, folder, fault, *options):
    path = folder / "train.py"
    path.write_text(script)
    return [
        *(sys.executable, "-m", "hvkit.cli", "run", "-np", "2", *options),
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


@pytest.mark.parametrize(("script", "name"), [(PYTORCH, "backward()"), (KERAS, "step")])
def test_a_trace_shows_the_steps_of_all_ranks_on_one_clock(tmp_path, script, name):
    events = trace(tmp_path, script)
    steps = [{e["args"]["step"]: e for e in drawn(events, name, rank)} for rank in range(2)]
    assert list(steps[0]) == list(steps[1]) == list(range(1, 21))
    for mine, other in zip(*(each.values() for each in steps), strict=True):
        # Neither rank leaves a step before the other has begun it.
        assert mine["ts"] <= other["ts"] + other["dur"]
        assert other["ts"] <= mine["ts"] + mine["dur"]
    for rank in range(2):
        assert drawn(events, "waiting", rank)


def test_a_trace_holds_what_a_killed_rank_did_and_the_restart(tmp_path):
    events = trace(tmp_path, PYTORCH, "kill", "--max-restarts", "1")
    (note,) = [each["name"] for each in events if each["ph"] == "i"]
    assert "rank 1" in note
    assert "SIGKILL" in note
    # The first try of rank 0: its first spans were sent before the end.
    assert len(drawn(events, "hvkit.distribute", 0)) == 2
    assert len(drawn(events, "backward()", 1)) >= 20


def test_top_shows_ranks_their_steps_and_who_waits(tmp_path):
    with subprocess.Popen(
        command(PYTORCH, tmp_path, "wait"), stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout.readline() == "trained\n"
            for _ in range(100):
                top = [sys.executable, "-m", "hvkit.cli", "top", "--once", str(run.pid)]
                shown = subprocess.run(top, capture_output=True, text=True, check=True).stdout
                if "hvkit.barrier" in shown and "20" in shown:
                    break
            title, _, first, second = shown.splitlines()
            assert title.startswith(f"hvkit run {run.pid}: 2 of 2 ranks")
            assert "samples a second" in title
            assert first.split()[:2] == ["0", "20"]
            assert "hvkit.barrier" in first
            assert "in the script" in second
        finally:
            (tmp_path / "go").touch()
    assert run.returncode == 0
