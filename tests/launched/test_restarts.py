"""``hvkit run --max-restarts``: a run that fails goes on, and ends as if it had not failed."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from cases import cases

# Trains 30 steps, saves every 5, and prints a digest of the weights at the end. At step 12 of the
# first try, rank 1 suffers a fault.
PYTORCH = """
import hashlib, os, signal, sys, time
from pathlib import Path
import numpy as np, torch, hvkit

folder, fault = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
strategy = eval("hvkit." + sys.argv[3])
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
    if step == 12 and hvkit.rank() == 1 and not (folder / "over").exists():
        (folder / "over").touch()
        exec(fault)
    if fault == "wait":
        print("step", step, flush=True)
        time.sleep(0.1)
with hvkit.settled(model):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if hvkit.rank() == 0:
    print("result", start, hashlib.sha256(weights).hexdigest()[:8], flush=True)
"""
KERAS = """
import hashlib, os, signal, sys, time
from pathlib import Path
import keras, numpy as np, hvkit

folder, fault = Path(sys.argv[1]), sys.argv[2]
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(16), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
model = keras.Sequential([keras.Input((8,)), *layers])
optimizer = keras.optimizers.Adam(0.01)
strategy = eval("hvkit." + sys.argv[3])
hvkit.distribute(model, optimizer, strategy=strategy)
model.compile(optimizer, "mse")
checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
start = checkpoint.restore()


class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 11 and hvkit.rank() == 1 and not (folder / "over").exists():
            (folder / "over").touch()
            exec(fault)
        if fault == "wait":
            print("step", batch + 1, flush=True)
            time.sleep(0.1)


x = np.random.default_rng(hvkit.rank()).normal(size=(180, 8)).astype(np.float32)
callbacks = [Fault(), checkpoint.callback(every=5)]
model.fit(x, x[:, :4], batch_size=6, shuffle=False, verbose=0, callbacks=callbacks)
if hvkit.rank() == 0:
    weights = b"".join(w.numpy().tobytes() for w in model.weights)
    print("result", start.step, hashlib.sha256(weights).hexdigest()[:8], flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('a fault')"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
LEAVE = "sys.exit(0)"
TERMINATE = "os.kill(os.getpid(), signal.SIGTERM)"
NONE = "pass"
HVKIT = [sys.executable, "-m", "hvkit.cli", "run"]
OPTIONS = ["--max-restarts", "1"]


def words(script, folder, fault, strategy="Synchronous()", options=OPTIONS):
    command = [sys.executable, "-c", script, str(folder), fault, strategy]
    return [*HVKIT, "-np", "2", *options, *command]


def run(*args, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        words(*args, **more), capture_output=True, text=True, env=environment, timeout=200
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return done.returncode, results, done.stderr


CASES = [
    (PYTORCH, KILL, "Synchronous()"),
    (KERAS, TERMINATE, "Synchronous()"),
    (PYTORCH, TERMINATE, "DiLoCo(4)"),
    (PYTORCH, RAISE, "Synchronous()"),
    (PYTORCH, LEAVE, "Synchronous()"),
    (KERAS, KILL, "LocalSGD(3)"),
]


@pytest.mark.parametrize(("script", "fault", "strategy"), cases(CASES, 3))
def test_a_run_that_fails_goes_on_as_if_nothing_had_happened(script, fault, strategy, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    status, undisturbed, printed = run(script, tmp_path / "a", NONE, strategy)
    assert status == 0, printed
    status, result, printed = run(script, tmp_path / "b", fault, strategy)
    assert status == 0, printed
    # SIGTERM: at the end of the step in which it comes, or of one of the next.
    resumed = int(result[0].split()[1])
    assert resumed >= 12 if fault == TERMINATE else resumed == 10
    assert result == [undisturbed[0].replace(" 0 ", f" {resumed} ", 1)]
    assert printed.count("hvkit: restart 1 ") == 1


def test_without_restarts_a_failure_ends_the_run(tmp_path):
    status, result, printed = run(PYTORCH, tmp_path, RAISE, options=[])
    assert status == 1, printed
    assert result == []
    assert "restart" not in printed


def test_a_script_that_always_fails_stops_with_its_error(tmp_path):
    status, _, printed = run("raise SystemExit(7)", tmp_path, NONE)
    assert status == 7, printed
    assert "gives up after restart 1 (1 of at most 1 without a newer checkpoint)" in printed


def test_the_reason_for_a_restart_names_the_error(tmp_path):
    status, _, printed = run(PYTORCH, tmp_path, RAISE)
    assert status == 0, printed
    (line,) = (line for line in printed.splitlines() if line.startswith("hvkit: restart"))
    assert "from step 10: rank 1 on " in line
    assert line.endswith("ended with exit status 1: ValueError: a fault")


def test_a_rank_that_ends_early_is_named_and_not_those_that_wait_for_it(tmp_path):
    status, _, printed = run(PYTORCH, tmp_path, LEAVE)
    assert status == 0, printed
    (line,) = (line for line in printed.splitlines() if line.startswith("hvkit: restart"))
    assert "rank 1 has ended its script" in line


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


@pytest.mark.parametrize("number", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("script", "first"),
    cases([(WORKERS, 7), (KERAS, 7), (PYTORCH, 1)], name=lambda case: f"step-{case[1]}"),
)
def test_a_run_that_gets_sigterm_saves_and_leaves(script, first, number, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        words(script, tmp_path, "wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
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


def test_sigterm_during_a_long_step_is_counted_once(tmp_path):
    """Python's handler runs when the main thread is back from C code, seconds later."""
    slow = "import hashlib\n" + PYTORCH.replace(
        "time.sleep(0.1)", "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 12_000_000)"
    )
    process = subprocess.Popen(
        words(slow, tmp_path, "wait", options=["--grace", "50"]),
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


def test_a_signal_while_a_failed_run_ends_is_not_followed_by_a_restart(tmp_path):
    script = (
        "import os, signal, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0': sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('got it', flush=True))\n"
        "while True: time.sleep(0.1)"
    )
    process = subprocess.Popen(
        words(script, tmp_path, NONE), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "got it\n"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "hvkit: restart" not in printed


@pytest.mark.parametrize("rank", cases([1, 0]))
def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on(rank, tmp_path):
    script = PYTORCH.replace("hvkit.rank() == 1", f"hvkit.rank() == {rank}")
    options = [*OPTIONS, "--stall", "15"]
    status, result, printed = run(script, tmp_path, STOP, options=options)
    assert status == 0, printed
    assert result[0].startswith("result 10 ")
    assert f"rank {rank} " in next(line for line in printed.splitlines() if "RankLost" in line)
    assert printed.count("hvkit: restart 1 ") == 1


def test_a_rank_that_sleeps_is_shown_where_it_is(tmp_path):
    options = ["--stall", "12"]
    status, _, printed = run(PYTORCH, tmp_path, "time.sleep(1000)", options=options)
    assert status == 1, printed
    assert "rank 1 is here:\n    <string>:" in printed
    assert "rank 1 has not reached" in printed


# Fails once more before it resumes.
FAILS_EARLY = PYTORCH.replace(
    "start = checkpoint.restore().step",
    "from hvkit.host.run_reports import restart_of_this_run\n"
    "if restart_of_this_run().get('restart') == 1: sys.exit(5)\n"
    "start = checkpoint.restore().step",
)


@pytest.mark.parametrize(
    ("lost", "resumed"), [("10", "step 5"), ("", "the beginning")], ids=["newest", "all"]
)
def test_a_restart_from_an_older_checkpoint_is_a_warning(lost, resumed, tmp_path):
    lose = f"import shutil; [shutil.rmtree(each) for each in folder.glob('step-*{lost}')]; {RAISE}"
    status, result, printed = run(FAILS_EARLY, tmp_path, lose, options=["--max-restarts", "2"])
    assert status == 0, printed
    assert result[0].split()[1] == ("5" if lost else "0")
    lines = [line for line in printed.splitlines() if "go on from" in line]
    assert lines == [
        f"hvkit: the ranks go on from {resumed}, although step 10 was saved: no host that has "
        "ranks now has that checkpoint, complete, on disk or in memory"
    ]
    restarts = [line for line in printed.splitlines() if line.startswith("hvkit: restart")]
    assert ["from step 10" in line for line in restarts] == [True, True]
