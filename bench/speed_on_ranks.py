"""What ``bench/speed.py`` starts on every rank: a peer trains a workload in turns.

Each peer is set up as its own documentation says. At the end a rank prints the time of day.
"""

import argparse
import itertools
import json
import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from turns import Turns, horovod_as_published

BATCH = 64


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.around = nn.Conv2d(channels, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        inside = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inside)) + self.around(x))


def mnist():
    """The recipe's network: 1.2 million weights."""
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    head = nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *head), (1, 28, 28)


def resnet20():
    """0.27 million weights, with batch norm, on images of 32x32."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for number in range(3):
            layers.append(Block(channels, width, 2 if width > 16 and number == 0 else 1))
            channels = width
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*layers, *pool), (3, 32, 32)


def large():
    """25 million weights in eight tensors."""
    widths = 784, 3000, 4000, 2600, 10
    pairs = itertools.pairwise(widths)
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairs]
    return nn.Sequential(nn.Flatten(), *layers), (1, 28, 28)


def small():
    """0.26 million weights in 500 tensors."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(249)]
    return nn.Sequential(*layers, nn.Linear(32, 10)), (32,)


def transformer():
    """Two blocks, 0.4 million weights, on sequences of 32 vectors."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(blocks, nn.Flatten(), nn.Linear(32 * 128, 10)), (32, 128)


class Weights(nn.Module):
    """Weights that are added up, so that a step computes next to nothing."""

    def __init__(self, tensors, weights):
        super().__init__()
        each = (nn.Parameter(torch.zeros(weights)) for _ in range(tensors))
        self.weights = nn.ParameterList(each)

    def forward(self, x):
        return x + torch.stack([each.sum() for each in self.weights]).sum()


WORKLOADS = {each.__name__: each for each in (mnist, resnet20, large, small, transformer)}


def workload(name):
    """A network, and the shape of one of its inputs."""
    if name in WORKLOADS:
        return WORKLOADS[name]()
    unit, number = name.split("-")
    if unit == "tensors":
        return Weights(int(number), 64), (10,)
    return Weights(8, int(number) * 1_000_000 // 4 // 8), (10,)


def alone(model, optimizer):
    return model, optimizer, torch.Tensor.backward


def alone_with_memory_kept(model, optimizer):
    """The limit for hvkit, whose ranks keep the memory that they free."""
    from hvkit.host.rank_variables import keep_freed_memory, rank_settings

    keep_freed_memory({each.variable: each.value for each in rank_settings({})})
    return alone(model, optimizer)


def with_hvkit(model, optimizer):
    import hvkit

    return *hvkit.distribute(model, optimizer), torch.Tensor.backward


def with_ddp(model, optimizer):
    torch.distributed.init_process_group("nccl" if next(model.parameters()).is_cuda else "gloo")
    return nn.parallel.DistributedDataParallel(model), optimizer, torch.Tensor.backward


def with_horovod_as_published(model, optimizer):
    horovod_as_published()
    return with_horovod(model, optimizer)


def with_horovod(model, optimizer):
    import horovod.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return model, optimizer, torch.Tensor.backward


def with_accelerate(model, optimizer):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return *accelerator.prepare(model, optimizer), accelerator.backward


def with_fabric(model, optimizer):
    from lightning.fabric import Fabric

    fabric = Fabric()  # `fabric run` has the settings
    return *fabric.setup(model, optimizer), fabric.backward


PEERS = {
    "alone": alone,
    "alone, memory kept": alone_with_memory_kept,
    "hvkit": with_hvkit,
    "ddp": with_ddp,
    "horovod": with_horovod_as_published,
    "horovod's names": with_horovod,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("workload", help=", ".join(WORKLOADS) + ", tensors-N, megabytes-N")
    parser.add_argument("turns", nargs="?", help="the bench's socket; without: one step")
    parser.add_argument("--gpu", action="store_true", help="train on the GPU of the local rank")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.gpu:
        local_rank = os.environ.get("LOCAL_RANK") or os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
        torch.set_default_device(f"cuda:{local_rank}")
        torch.cuda.set_device(int(local_rank))
    torch.manual_seed(0)
    model, shape = workload(flags.workload)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, backward = PEERS[flags.peer](model, optimizer)
    inputs, targets = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
    finish = torch.cuda.synchronize if flags.gpu else lambda: None
    for _ in Turns(flags.turns, finish) if flags.turns else range(1):
        optimizer.zero_grad()
        backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
    print("\n" + json.dumps([time.time()]) + "\n", flush=True)


if __name__ == "__main__":
    main()
