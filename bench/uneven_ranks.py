"""How long a step takes where ranks are not equally fast: each sleeps instead of computing.

    mpirun -np 4 python bench/uneven_ranks.py "ParameterServer:staleness=3" in-turn

Cases: ``alike`` (all sleep 10 ms), ``in-turn`` (each sleeps 50 ms in 1 of 20 steps), and
``for-good`` (the last rank always sleeps 50 ms). Rank 0 prints its own milliseconds for a step.
"""

import argparse
import random
import time

import torch
from torch.nn import functional as F

import hvkit
from hvkit import strategies

STEPS = 100


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", help="NAME[:staleness=S]")
    parser.add_argument("case", choices=["alike", "in-turn", "for-good"])
    given = parser.parse_args()
    name, _, staleness = given.strategy.partition(":staleness=")
    options = {"staleness": None if staleness == "None" else int(staleness)} if staleness else {}
    strategy = getattr(strategies, name)(**options)

    torch.set_num_threads(1)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hvkit.distribute(model, optimizer, strategy=strategy)
    rank = hvkit.rank()
    x, chance = torch.randn(8, 100), random.Random(rank)

    def step(slow):
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        time.sleep(0.05 if slow else 0.01)
        optimizer.step()

    for _ in range(3):
        step(slow=False)
    hvkit.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        slow = {"alike": False, "in-turn": chance.random() < 0.05}
        step(slow.get(given.case, rank == hvkit.size() - 1))
    mine = 1000 * (time.perf_counter() - start) / STEPS
    hvkit.barrier()
    if hvkit.is_main():
        print(f"{given.case}: {strategy}: {mine:.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
