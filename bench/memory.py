"""The peak memory of a rank in training, beyond what it held before the model was made.

    python bench/memory.py

Starts four ranks for each strategy, which train 8 layers of 2048x2048 with AdamW on a batch of 8,
and prints a table. A small model trains before, so that libraries are loaded. Needs Linux, which
counts the peak.
"""

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import hvkit
from hvkit import *  # noqa: F403  # strategies are given as Python writes them

RANKS, LAYERS, WIDTH, STEPS = 4, 8, 2048, 4
STRATEGIES = (
    "Synchronous()",
    "LocalSGD(2)",
    "DiLoCo(2)",
    "ShardedOptimizer()",
    "FullyShard(reshard_after_forward=False)",
    "FullyShard()",
)


def peak_in_training(strategy):
    """Megabytes, on this rank."""
    torch.set_num_threads(1)
    train(strategy, width=64)
    gc.collect()
    before = megabytes("VmRSS")
    train(strategy, WIDTH)
    return megabytes("VmHWM") - before


def train(strategy, width):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = hvkit.distribute(model, optimizer, strategy=eval(strategy))
    x = torch.randn(8, width)
    for step in range(STEPS):
        if step == 1:  # distribute takes a whole model, whatever the strategy
            Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def megabytes(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", nargs="?", help="on the ranks: the one to measure")
    flags = parser.parse_args()
    if flags.strategy:
        found = hvkit.allgather(peak_in_training(flags.strategy))
        if hvkit.is_main():
            print(f"| `{flags.strategy}` | {min(found):.0f} to {max(found):.0f} |", flush=True)
        return
    weights = 4 * LAYERS * (WIDTH + 1) * WIDTH / 1e6
    print(f"| Strategy | Peak of a rank, MB (weights: {weights:.0f}) |\n|---|---|", flush=True)
    launch = ["mpirun", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none", sys.executable]
    # glibc gives freed tensors back at once.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for strategy in STRATEGIES:
        subprocess.run([*launch, __file__, strategy], env=environment, check=True)


if __name__ == "__main__":
    main()
