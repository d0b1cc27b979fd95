"""How long a save holds up training: written at once, and in the background.

    python bench/saves.py

Two ranks train 8 layers of 1024x1024 with Adam (101 MB with its state), and save every 40 steps.
Prints how long ``save`` takes, and what a step takes while the thread writes, as a multiple of the
other steps: medians, smallest and largest over saves. Two minutes, with nothing else running.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time

import torch
from speed import run

import hvkit

SAVES, STEPS = 8, 40


def measure(background):
    """Print for each save: its seconds, and the steps after it over those before it."""
    torch.set_num_threads(1)
    hvkit.init("torch")
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    hvkit.distribute(model, optimizer)

    def step():
        # New data: gradients that vanish would become denormal numbers, which are slow.
        x, y = torch.randn(2, 64, 1024)
        begun = time.perf_counter()
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begun

    found = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": model, "optimizer": optimizer, "background": background}
        checkpoint = hvkit.Checkpoint(folder, keep=1, **options)
        for number in range(1, SAVES + 1):
            before = [step() for _ in range(STEPS)]
            begun = time.perf_counter()
            checkpoint.save(epoch=0, step=number)
            took = time.perf_counter() - begun
            after = [step() for _ in range(8)]
            found += [took, statistics.median(after) / statistics.median(before[STEPS // 2 :])]
        checkpoint.wait()
    print(json.dumps(found), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("how", nargs="?", choices=("now", "background"))
    flags = parser.parse_args()
    if flags.how:
        measure(flags.how == "background")
        return
    for how in ("now", "background"):
        first, *_ = run("mpirun", 2, [__file__, how])
        for name, values in (("s in save", first[::2]), ("times a step after it", first[1::2])):
            low, high = min(values), max(values)
            print(f"{how}: {statistics.median(values):.3f} {name} ({low:.3f} to {high:.3f})")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
