"""``hvkit run --max-restarts``: a run that fails goes on, and ends as if it had not failed."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from cases import MORE, cases

# Trains 30 steps, saves every 5, and prints a digest of the weights at the end. Faults are steps,
# each with the rank that suffers and the code that it runs, once.
COMMON = """
import hashlib, os, signal, sys, time
from pathlib import Path
import numpy as np, hvkit

folder, faults, strategy = Path(sys.argv[1]), eval(sys.argv[2]), eval("hvkit." + sys.argv[3])


def after(step):
    for at, rank, code in faults:
        once = folder / f"fault-{at}"
        if (step, hvkit.rank()) == (at, rank) and not once.exists():
            once.touch()
            exec(code, globals())
    if "slow" in sys.argv:
        print("step", step, flush=True)
        time.sleep(0.1)


def finish(start, weights):
    if hvkit.rank() == 0:
        print("result", start, hashlib.sha256(b"".join(weights)).hexdigest()[:8], flush=True)
"""
PYTORCH = (
    COMMON
    + """
import torch

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
hvkit.distribute(model, optimizer, strategy=strategy)
checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
start = checkpoint.restore().step
batches = np.random.default_rng(hvkit.rank()).normal(size=(30, 6, 8)).astype(np.float32)
for step, batch in enumerate(batches[start:], start + 1):
    x = torch.from_numpy(batch)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
    optimizer.step()
    checkpoint.end_step(epoch=0, step=step, every=5)
    after(step)
with hvkit.settled(model):
    finish(start, [p.detach().numpy().tobytes() for p in model.parameters()])
"""
)
KERAS = (
    COMMON
    + """
import keras

keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(16), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
model = keras.Sequential([keras.Input((8,)), *layers])
optimizer = keras.optimizers.Adam(0.01)
hvkit.distribute(model, optimizer, strategy=strategy)
model.compile(optimizer, "mse")
checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
start = checkpoint.restore()


class After(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        after(batch + 1)


x = np.random.default_rng(hvkit.rank()).normal(size=(180, 8)).astype(np.float32)
callbacks = [After(), checkpoint.callback(every=5)]
model.fit(x, x[:, :4], batch_size=6, shuffle=False, verbose=0, callbacks=callbacks)
finish(start.step, [w.numpy().tobytes() for w in model.weights])
"""
)
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('a fault')"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
LEAVE = "sys.exit(0)"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"
HVKIT = [sys.executable, "-m", "hvkit", "run"]
OPTIONS = ["--max-restarts", "1"]


def words(script, folder, faults=(), strategy="Synchronous()", *more, options=OPTIONS):
    command = [sys.executable, "-c", script, str(folder), repr(faults), strategy, *more]
    return [*HVKIT, "-np", "2", *options, *command]


def run(*args, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        words(*args, **more), capture_output=True, text=True, env=environment, timeout=200
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return done.returncode, results, done.stderr


def restarts(printed):
    return [line for line in printed.splitlines() if line.startswith("hvkit: restart")]


# Each fault, and what the restart after it says.
CASES = {
    "torch": (
        *(PYTORCH, "DiLoCo(4)"),
        [(7, TERMINATE), (12, KILL), (17, LEAVE)],
        [
            "rank 1 on .* got SIGTERM",
            "from step 10: rank 1 on .* was killed by signal 9",
            "from step 15: rank 1 has ended its script",
        ],
    ),
    "keras": (*(KERAS, "LocalSGD(3)"), [(12, TERMINATE)], ["rank 1 on .* got SIGTERM"]),
}


@pytest.mark.parametrize("case", cases(CASES))
def test_a_run_with_faults_goes_on_as_if_nothing_had_happened(case, tmp_path):
    script, strategy, faults, reasons = CASES[case]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    status, undisturbed, printed = run(script, tmp_path / "a", [], strategy)
    assert status == 0, printed
    suffered = [(step, 1, fault) for step, fault in faults]
    status, result, printed = run(script, tmp_path / "b", suffered, strategy)
    assert status == 0, printed
    last, fault = faults[-1]
    # SIGTERM: at the end of the step in which it comes, or of one of the next.
    resumed = int(result[0].split()[1])
    assert resumed >= last if fault == TERMINATE else resumed == last - 2
    assert result == [undisturbed[0].replace(" 0 ", f" {resumed} ", 1)]
    for number, (line, reason) in enumerate(zip(restarts(printed), reasons, strict=True), 1):
        assert line.startswith(f"hvkit: restart {number} ")
        assert re.search(reason, line), line


@MORE
def test_a_script_that_always_fails_stops_with_its_error(tmp_path):
    status, _, printed = run("raise SystemExit(7)", tmp_path)
    assert status == 7, printed
    assert "gives up after restart 1 (1 of at most 1 without a newer checkpoint)" in printed


@MORE
def test_status_143_of_a_shell_is_no_checkpoint(tmp_path):
    command = [*HVKIT, "-np", "1", *OPTIONS, "bash", "-c", "exit 143"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 143
    assert done.stderr.count("hvkit: restart") == 1
    assert "saved" not in done.stderr.replace("has saved nothing", "")


# A data loader's workers, which the ranks need until they have saved.
WORKERS = PYTORCH.replace(
    "for step, batch in enumerate(batches[start:], start + 1):",
    "loader = torch.utils.data.DataLoader(batches[start:], batch_size=None, num_workers=1)\n"
    "for step, batch in enumerate(map(np.asarray, loader), start + 1):",
)


@pytest.mark.parametrize(
    ("script", "first", "number"),
    cases(
        [(WORKERS, 7, 2), (PYTORCH, 1, 1)],
        name=lambda case: f"step {case[1]}, {case[2]} signals",
    ),
)
def test_a_run_that_gets_sigterm_saves_and_leaves(script, first, number, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        words(script, tmp_path, [], "Synchronous()", "slow"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    # A rank handles SIGTERM from the end of its first step on: of both ranks.
    reached = (line for line in process.stdout if line.startswith(f"step {first}"))
    for _ in range(2):
        next(reached)
    if number == 2:  # a batch system signals ranks as well, and launchers pass that on
        for each in psutil.Process(process.pid).children(recursive=True):
            if "-m" in each.parent().cmdline() and "-m" not in each.cmdline():
                each.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert printed.count("after SIGTERM: all ranks leave") == 1  # not ended by force
    saved = sorted(path.name for path in tmp_path.glob("step-*"))
    assert int(saved[-1].removeprefix("step-")) >= first
    assert "restart" not in printed


@MORE
def test_sigterm_during_a_long_step_is_counted_once(tmp_path):
    """Python's handler runs when the main thread is back from C code, seconds later."""
    slow = "import hashlib\n" + PYTORCH.replace(
        "time.sleep(0.1)", "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 6_000_000)"
    )
    process = subprocess.Popen(
        words(slow, tmp_path, [], "Synchronous()", "slow", options=["--grace", "50"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step 2"):
            break
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert printed.count("after SIGTERM: all ranks leave") == 1


@MORE
def test_a_signal_while_a_failed_run_ends_is_not_followed_by_a_restart(tmp_path):
    script = (
        "import os, signal, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0': sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('got it', flush=True))\n"
        "while True: time.sleep(0.1)"
    )
    process = subprocess.Popen(
        words(script, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "got it\n"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "hvkit: restart" not in printed


@MORE
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on(rank, tmp_path):
    options = [*OPTIONS, "--stall", "15"]
    status, result, printed = run(PYTORCH, tmp_path, [(12, rank, STOP)], options=options)
    assert status == 0, printed
    assert result[0].startswith("result 10 ")
    assert f"rank {rank} " in next(line for line in printed.splitlines() if "RankLost" in line)
    assert printed.count("hvkit: restart 1 ") == 1


@MORE
def test_without_restarts_a_rank_that_sleeps_is_shown_where_it_is_and_ends_the_run(tmp_path):
    faults = [(12, 1, "time.sleep(1000)")]
    status, result, printed = run(PYTORCH, tmp_path, faults, options=["--stall", "12"])
    assert status == 1, printed
    assert result == []
    assert "restart" not in printed
    assert "rank 1 is here:\n    <string>:" in printed
    assert "rank 1 has not reached" in printed


# Fails once more before it resumes.
FAILS_EARLY = (
    "import sys\n"
    "from hvkit.host.run_reports import restart_of_this_run\n"
    "if restart_of_this_run().get('restart') == 1: sys.exit(5)\n" + PYTORCH
)


@MORE
@pytest.mark.parametrize(("lost", "resumed"), [("10", "step 5"), ("", "the beginning")])
def test_a_restart_from_an_older_checkpoint_is_a_warning(lost, resumed, tmp_path):
    lose = f"import shutil; [shutil.rmtree(each) for each in folder.glob('step-*{lost}')]; {RAISE}"
    options = ["--max-restarts", "2"]
    status, result, printed = run(FAILS_EARLY, tmp_path, [(12, 1, lose)], options=options)
    assert status == 0, printed
    assert result[0].split()[1] == ("5" if lost else "0")
    lines = [line for line in printed.splitlines() if "go on from" in line]
    assert lines == [
        f"hvkit: the ranks go on from {resumed}, although step 10 was saved: no host that has "
        "ranks now has that checkpoint, complete, on disk or in memory"
    ]
    assert ["from step 10" in line for line in restarts(printed)] == [True, True]
    # Its end is seen before or after what it says itself.
    fault = (
        r"from step 10: rank 1 (on .* ended with exit status 1:|failed with) ValueError: a fault$"
    )
    assert re.search(fault, restarts(printed)[0])
