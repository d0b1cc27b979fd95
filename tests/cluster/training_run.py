"""A run that trains on hosts of this machine, restarted by ``hvkit run``; for ``chaos.py``."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rig import Rig
from rig.host import Process

ROOT = Path(__file__).parents[2]
NODES = ("node1", "node2", "node3")
# Seconds: for a fault to be survived, until a wait is a stall, and until a silent host is lost.
SURVIVED, STALL, LOST = 90.0, 12, 4
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
HVKIT = [
    sys.executable, "-m", "hvkit", "run", "-np", "2", "-H", "node1:1,node2:1,node3:1",
    "--max-restarts", "4", "--stall", str(STALL), "--lost-after", str(LOST), "--grace", "5",
]  # fmt: skip

# Both scripts take steps until the file ``end`` names the last one. Data depends on step and rank.
# Rank 0 prints each step. A file ``raise-1`` or ``leave-1`` makes rank 1 do that, once.
COMMON = """
import hashlib, json, os, sys, time
from pathlib import Path
import numpy as np, hvkit

folder, strategy, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def batch(step):
    numbers = np.random.default_rng([seed, step, hvkit.rank()]).normal(size=(6, 8))
    return numbers.astype(np.float32)


def begin(start):
    if hvkit.rank() == 0:
        print("started", start, flush=True)


def after(step):
    '''Whether this was the last step; the same on all ranks.'''
    for name in ("raise", "leave"):
        order = folder / f"{name}-{hvkit.rank()}"
        if order.exists():
            order.unlink()
            if name == "raise":
                raise ValueError("a fault")
            sys.exit(0)
    if not (folder / "calm").exists():
        time.sleep(0.05)
    if hvkit.rank() == 0:
        print("step", step, flush=True)
    return hvkit.any_rank((folder / "end").exists() and step >= int((folder / "end").read_text()))


def finish(step, weights):
    digest = hashlib.sha256(b"".join(weights)).hexdigest()[:12]
    if hvkit.rank() == 0:
        print("result", step, digest, flush=True)
"""
SCRIPTS = {
    "torch": COMMON
    + """
import torch

torch.manual_seed(seed)
layers = torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
hvkit.distribute(model, optimizer, strategy=eval("hvkit." + strategy))
checkpoint = hvkit.Checkpoint(folder / "saved", replicas=1, model=model, optimizer=optimizer)
step = checkpoint.restore().step
begin(step)
while True:
    step += 1
    x = torch.from_numpy(batch(step))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
    optimizer.step()
    checkpoint.end_step(epoch=0, step=step, every=5)
    if after(step):
        break
with hvkit.settled(model):
    finish(step, [p.detach().numpy().tobytes() for p in model.parameters()])
""",
    "keras": COMMON
    + """
import keras, tensorflow as tf

keras.utils.set_random_seed(seed)
layers = [keras.layers.Dense(64), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
model = keras.Sequential([keras.Input((8,)), *layers])
optimizer = keras.optimizers.Adam(0.01)
hvkit.distribute(model, optimizer, strategy=eval("hvkit." + strategy))
checkpoint = hvkit.Checkpoint(
    folder / "saved", replicas=1, background=True, model=model, optimizer=optimizer
)
step = checkpoint.restore().step


@tf.function
def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - x[:, :4]) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)


begin(step)
while True:
    step += 1
    train(tf.constant(batch(step)))
    checkpoint.end_step(epoch=0, step=step, every=5)
    if after(step):
        break
with hvkit.settled(model):
    finish(step, [w.numpy().tobytes() for w in model.trainable_weights])
""",
}
STRATEGIES = ("Synchronous()", "LocalSGD(3)", "DiLoCo(4)")


@dataclass
class Run:
    """A run under ``hvkit run`` on the rig, and what it has printed."""

    rig: Rig
    folder: Path
    framework: str
    strategy: str
    seed: int
    began: list[int] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    step: int = 0
    result: str | None = None
    unfinished: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = (self.folder / "log").open("w+")
        words = [str(self.folder), self.strategy, str(self.seed)]
        self.process = self.rig.host("node1").popen(
            [*HVKIT, sys.executable, "-c", SCRIPTS[self.framework], *words],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.reader = (self.folder / "log").open()

    def look(self) -> bool:
        """Read what was printed; return whether the run goes on."""
        for part in self.reader:
            self.unfinished += part
            if not part.endswith("\n"):
                continue
            line, self.unfinished = self.unfinished, ""
            self.printed.append(line)
            # Indented are last lines, in the report of a failure.
            match line.split() if line[0].isalpha() else []:
                case ["step", number]:
                    self.step = int(number)
                case ["started", number]:
                    self.began.append(int(number))
                case ["result", *words]:
                    self.result = " ".join(words)
        return self.process.poll() is None

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = SURVIVED) -> None:
        """Wait for something; an error if it does not come, or the run ends before."""
        deadline = time.monotonic() + seconds
        while True:
            goes_on = self.look()
            if condition():
                return
            if not goes_on or time.monotonic() > deadline:
                how = f"no end after {seconds:g} s" if goes_on else f"{self.process.returncode}"
                raise AssertionError(f"{what}: {how}\n{''.join(self.printed[-60:])}")
            time.sleep(0.02)

    def ranks(self) -> dict[int, tuple[str, Process]]:
        """The processes that train, by rank, with their hosts."""
        found = {}
        for host in self.rig.hosts:
            for process in host.processes():
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                    values = dict(line.partition(b"=")[::2] for line in text)
                    command = process.command
                    trains = str(self.folder) in command and "-m hvkit" not in command
                    if trains and b"HVKIT_REPORTS" in values:
                        found[int(values[b"OMPI_COMM_WORLD_RANK"])] = host.name, process
        return found

    def newest(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        saved = (self.folder / "saved").glob("step-*/manifest.json")
        return max((int(path.parent.name[5:].removesuffix(".old")) for path in saved), default=0)
