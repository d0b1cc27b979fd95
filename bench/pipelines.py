"""What a pipeline of two ranks saves in memory, and what it takes in time.

    python bench/pipelines.py memory
    python bench/pipelines.py time

``memory`` trains a GPT of 1.0e9 weights with momentum, which no rank ever holds as a whole, for two
steps, under a limit of 8.5 GB for the data of each process (``RLIMIT_DATA``: private memory that it
may write, whether used or not). First one process tries it, then two ranks. For each rank it prints
the peak of resident memory, beyond what the process held before the model was made, and what hvkit
has predicted. Needs Linux, 14 GB of free memory, and four minutes on two cores.

``time`` trains a small GPT with AdamW, each process with one thread: in one process with whole
batches, in one process in micro-batches, and in a pipeline of two stages. Rounds follow each other,
each with all three. Prints the best decile of each round's steps: the median over rounds of its
ratio to one process, smallest and largest, and how long each rank waits for the other. Five
minutes on two cores, with nothing else running. Meanwhile each core is kept awake by a process of
idle priority, which takes no time from others: on virtual machines a core that has slept for the
0.1 s that a rank waits computes some 15% slower afterwards, with and without a pipeline.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hvkit
from hvkit.frameworks.pytorch.model_parallel import memory_forecast

RANKS, MICROBATCHES = 2, 4
LIMIT = 8_500_000_000
LARGE = {"vocab": 1024, "length": 64, "layers": 20, "width": 2048}
SMALL = {"vocab": 512, "length": 128, "layers": 8, "width": 256}
BATCH, ROUNDS, STEPS = 16, 5, 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        shape = rows, length, 3, self.heads, width // self.heads
        q, k, v = self.qkv(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    def __init__(self, vocab, length, layers, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def batch_of(sizes, rows):
    return torch.randint(0, sizes["vocab"], (2, rows, sizes["length"]))


def train(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()


def in_pipeline(model, optimizer):
    options = {"mesh": hvkit.Mesh(pipeline=RANKS), "microbatches": MICROBATCHES, "stages": "bytes"}
    return hvkit.distribute(model, optimizer, **(options if hvkit.size() > 1 else {}))


def memory_on_ranks():
    """Train under the limit; rank 0 prints each rank's peak and what was predicted, in bytes."""
    predicted = []
    predict = memory_forecast.forecast
    memory_forecast.forecast = lambda *args: predicted.extend(predict(*args)) or predicted
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    hvkit.init("torch")
    # Libraries are loaded, and their buffers there, before the model that is measured.
    _train_some({"vocab": 64, "length": 8, "layers": 2, "width": 64})
    predicted.clear()
    before = memory("VmRSS")
    _train_some(LARGE)
    peaks = hvkit.allgather(memory("VmHWM") - before)
    if hvkit.is_main():
        print(json.dumps([(peak, each.total) for peak, each in zip(peaks, predicted, strict=True)]))


def _train_some(sizes):
    torch.manual_seed(0)
    with hvkit.deferred_init():
        model = GPT(**sizes)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    model, optimizer = in_pipeline(model, optimizer)
    for _ in range(2):
        train(model, optimizer, *batch_of(sizes, MICROBATCHES))


def memory(name):
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def times_on_ranks(microbatches):
    """Print the best decile of the seconds of steps, and of each rank the share that it waits."""
    torch.manual_seed(0)
    model = GPT(**SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = batch_of(SMALL, BATCH)
    if hvkit.size() > 1:
        model, optimizer = in_pipeline(model, optimizer)
        run = model
    else:
        run = lambda x: torch.cat([model(part) for part in x.chunk(microbatches)])  # noqa: E731
    seconds = []
    for step in range(2 + STEPS):
        begun = time.perf_counter()
        train(run, optimizer, x, y)
        if step >= 2:
            seconds.append(time.perf_counter() - begun)
    # The first passes are not in it.
    waits = model.forward.__self__._groups.pipeline.times.bubble if hvkit.size() > 1 else 0.0
    waits = hvkit.allgather(waits)
    if hvkit.is_main():
        print(json.dumps((statistics.quantiles(seconds, n=10)[0], waits)))


def start(ranks, *arguments):
    """What rank 0 prints last; None and what is said to be wrong if a rank fails."""
    launch = ["mpirun", "-np", str(ranks), "--bind-to", "none"] if ranks > 1 else []
    # glibc gives freed tensors back at once.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if arguments[0] == "memory":
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [*launch, sys.executable, __file__, *arguments, "--on-ranks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def show_memory():
    print(f"each process may have {LIMIT / 1e9:.3g} GB of data", flush=True)
    for ranks in (1, RANKS):
        found, said = start(ranks, "memory")
        if found is None:
            reasons = [line for line in said.splitlines() if "can't allocate memory" in line]
            print(f"{ranks} process(es): failed: {(reasons or [said])[-1]}", flush=True)
            continue
        for rank, (peak, predicted) in enumerate(found):
            print(
                f"rank {rank} of {ranks}: peak {peak / 1e9:.3f} GB, predicted "
                f"{predicted / 1e9:.3f} GB ({predicted / peak - 1:+.1%})"
            )


@contextlib.contextmanager
def cores_awake():
    """Keep each core busy with a process that runs only when no other wants to."""
    idle = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile 1: pass"
    busy = [subprocess.Popen([sys.executable, "-c", idle]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def show_time():
    kinds = {
        "one process": (1, "1"),
        "one process in micro-batches": (1, str(MICROBATCHES)),
        "two stages": (RANKS, str(MICROBATCHES)),
    }
    rounds, waits = [], []
    for _ in range(ROUNDS):
        taken = {}
        for name, (ranks, microbatches) in kinds.items():
            with cores_awake():
                found, said = start(ranks, "time", microbatches)
            if found is None:
                sys.exit(said)
            taken[name], waited = found
        waits.append(waited)
        rounds.append(taken)
    for name in kinds:
        for other in kinds:
            if name == other:
                print(f"{name}: {statistics.median(r[name] for r in rounds):.3f} s a step")
            else:
                ratios = [each[name] / each[other] for each in rounds]
                print(f"{name} / {other}: {spread(ratios)}")
    for rank, each in enumerate(zip(*waits, strict=True)):
        predicted = memory_forecast.bubble(RANKS, 1, MICROBATCHES)
        print(f"rank {rank} waits {spread(each)} of its passes, predicted {predicted:.2f}")


def spread(values):
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("memory", "time"))
    parser.add_argument("microbatches", nargs="?", type=int, default=1, help="on the ranks")
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.on_ranks:
        memory_on_ranks() if flags.what == "memory" else times_on_ranks(flags.microbatches)
    else:
        show_memory() if flags.what == "memory" else show_time()


if __name__ == "__main__":
    main()
