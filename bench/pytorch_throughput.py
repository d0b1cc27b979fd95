"""Training throughput on CPU ranks: hvkit, PyTorch's DDP, Horovod's own optimizer wrapper.

    mpirun -np 2 python bench/pytorch_throughput.py

All three train the MNIST recipe's network in one process each, in turns, so that a noisy machine
slows all of them; what is reported is each one's speed relative to DDP in the same round: the
median over rounds, and the quartiles.
"""

import argparse
import os
import socket
import statistics
import time

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hvkit


def network() -> nn.Module:
    """Images of 1x28x28 in, ten logits out; 1.2 million weights."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    head = nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *head)


def with_hvkit():
    model = network()
    return hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))


def with_ddp():
    model = DistributedDataParallel(network())
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def with_horovod():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def seconds(model, optimizer, batch, steps):
    """Wall-clock time of so many training steps, begun by all ranks together."""
    images, labels = batch
    hvkit.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    hvkit.barrier()
    return time.perf_counter() - start


def start_gloo():
    """Join the ranks in a process group of PyTorch's own, for DDP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = hvkit.broadcast(probe.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=hvkit.rank(), world_size=hvkit.size())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--steps", type=int, default=20, help="in each round")
    parser.add_argument("--rounds", type=int, default=15)
    flags = parser.parse_args()
    hvkit.init("torch")
    start_gloo()
    trained = {"DDP": with_ddp(), "hvkit": with_hvkit(), "Horovod's wrapper": with_horovod()}
    batch = torch.rand(flags.batch_size, 1, 28, 28), torch.randint(10, (flags.batch_size,))
    for model, optimizer in trained.values():
        seconds(model, optimizer, batch, 3)
    rounds = [
        {name: seconds(*pair, batch, flags.steps) for name, pair in trained.items()}
        for _ in range(flags.rounds)
    ]
    dist.destroy_process_group()
    if hvkit.rank() != 0:
        return
    images = flags.batch_size * hvkit.size() * flags.steps
    for name in trained:
        speed = statistics.median(images / times[name] for times in rounds)
        low, middle, high = statistics.quantiles([t["DDP"] / t[name] for t in rounds])
        print(f"{name:18} {speed:7.0f} images/s, {middle:.2f} of DDP ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
