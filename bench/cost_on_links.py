"""What ``bench/cost.py links`` starts on each host: means, and steps, compressed or compiled.

Rank 0 prints a line of JSON for each size, compression or way to compile.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from speed_on_ranks import BATCH, large
from torch import nn
from torch.nn import functional as F

import hvkit
from hvkit.frameworks.pytorch.wire import Wire

SIZES = (64 << 10, 1 << 20, 4 << 20, 32 << 20)
CALLS, STEPS = 10, 3


def sent():
    """The bytes that this host's interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = [line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:")]
    return int(fields[8])


def means():
    wire = Wire("gradients")
    for size in SIZES:
        x, taken = torch.ones(size // 4), []
        for number in range(CALLS + 2):
            if number == 2:
                hvkit.barrier()
                before = sent()
            start = time.perf_counter()
            wire.wait(wire.start_mean(x, f"{size} bytes"))
            taken.append(time.perf_counter() - start)
        hvkit.barrier()
        most = max(hvkit.allgather(sent() - before))
        show(bytes=size, sent=most / CALLS, ms=1e3 * sorted(taken[2:])[CALLS // 10])


def compression():
    for name in ("none", "fp16", "int8"):
        torch.manual_seed(0)
        model, shape = large()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        hvkit.distribute(model, optimizer, compression=name)
        inputs, targets = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
        show(compression=name, ms=step(model, optimizer, inputs, targets))


def compiled():
    for name in ("no", "whole", "layers"):
        torch.manual_seed(0)
        hidden = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)]
        model = nn.Sequential(*hidden, nn.Linear(1024, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        hvkit.distribute(model, optimizer)
        for each in {"no": [], "whole": [model], "layers": model}[name]:
            each.compile()
        inputs, targets = torch.randn(8 * BATCH, 1024), torch.randint(10, (8 * BATCH,))
        show(compiled=name, ms=step(model, optimizer, inputs, targets))


def step(model, optimizer, inputs, targets):
    """What a step takes, in milliseconds: the median of some after the first."""
    taken = []
    for _ in range(1 + STEPS):
        hvkit.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    return 1e3 * sorted(taken[1:])[STEPS // 2]


def show(**record):
    if hvkit.rank() == 0:
        print(json.dumps(record), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = {each.__name__: each for each in (means, compression, compiled)}
    parser.add_argument("command", choices=commands)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    hvkit.init("torch")
    commands[flags.command]()


if __name__ == "__main__":
    main()
