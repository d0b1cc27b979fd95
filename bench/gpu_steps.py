"""The time of a step, and what the host waits for in it: workloads of ``bench/gpu.py``."""

import json
import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F
from turns import horovod_as_published


def mnist():
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    head = nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *head)


class GPT(nn.Module):
    """124 million weights: 12 blocks of width 768 on 50,257 tokens."""

    def __init__(self, tokens=50257, width=768, heads=12, blocks=12, length=1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.tokens(x) + self.places(torch.arange(length, device=x.device))
        h = self.norm(self.blocks(h, mask=mask, is_causal=True))
        return F.linear(h, self.tokens.weight)


def of_mnist(device, small):
    x, y = torch.randn(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)
    return mnist(), lambda model: F.cross_entropy(model(x), y)


def of_resnet50(device, small):
    from torchvision.models import resnet50

    rows = 2 if small else 128
    x = torch.randn(rows, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (rows,), device=device)

    def loss(model):
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return resnet50().to(memory_format=torch.channels_last), loss


def of_gpt(device, small):
    rows, length = (1, 64) if small else (8, 1024)
    model = GPT(blocks=1, width=96) if small else GPT()
    x = torch.randint(50257, (rows, length + 1), device=device)

    def loss(model):
        with torch.autocast(device.type, torch.bfloat16):
            predicted = model(x[:, :-1])
            return F.cross_entropy(predicted.flatten(0, 1), x[:, 1:].flatten())

    return model, loss


# Ranks compare weights and gradients after 1, 2, 4, 8, ... steps; the next time after 128.
AFTER_COMPARISONS = 66
WORKLOADS = {"MNIST": of_mnist, "ResNet-50": of_resnet50, "GPT": of_gpt}
PEERS = ("plain", "hvkit", "DDP", "hvkit, check_every=1")
# In a process of its own, with its own settings.
PEERS_OF_HOROVOD = ("plain", "Horovod")


def with_ddp(model):
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def with_horovod(model, optimizer):
    """Horovod's own wrapper, whose hooks it leaves out for a single rank that is not elastic."""
    import horovod.torch as hvd

    horovod_as_published()
    hvd.init()
    os.environ["HOROVOD_ELASTIC"] = "1"
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def stepping(peer, workload, device):
    """A function that takes a step, set up as one of the peers."""
    torch.manual_seed(0)
    model, loss = WORKLOADS[workload](device, device.type == "cpu")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if peer == "Horovod":
        optimizer = with_horovod(model, optimizer)
    if peer.startswith("hvkit"):
        import hvkit

        hvkit.distribute(model, optimizer, check_every=1 if peer.endswith("=1") else None)
    run = with_ddp(model) if peer == "DDP" else model

    def step():
        optimizer.zero_grad()
        loss(run).backward()
        optimizer.step()

    return step


def wait_for(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def speed(device, peers, rounds, seconds):
    """Print the time of a step of each peer, from blocks in turns."""
    for workload in WORKLOADS:
        steps = {peer: stepping(peer, workload, device) for peer in peers}
        taken = {peer: [] for peer in steps}
        for step in steps.values():
            for _ in range(AFTER_COMPARISONS):
                step()
        wait_for(device)
        begun = time.perf_counter()
        next(iter(steps.values()))()
        wait_for(device)
        number = max(1, int(seconds / (time.perf_counter() - begun)))
        for _ in range(rounds):
            for peer, step in steps.items():
                wait_for(device)
                begun = time.perf_counter()
                for _ in range(number):
                    step()
                wait_for(device)
                taken[peer].append(1e3 * (time.perf_counter() - begun) / number)
        line = {"workload": workload, "steps of a block": number}
        for peer in steps:
            ratios = [p / t for p, t in zip(taken["plain"], taken[peer], strict=True)]
            line[peer] = {
                "ms": round(statistics.median(taken[peer]), 3),
                "speed": round(statistics.median(ratios), 4),
                "from": round(min(ratios), 3),
                "to": round(max(ratios), 3),
            }
        print(json.dumps(line), flush=True)
        del steps
        if device.type == "cuda":
            torch.cuda.empty_cache()


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def host_waits(device):
    """Print how often the host waits for the GPU in a step, and how far it runs ahead."""
    from torch.profiler import ProfilerActivity, profile

    number = 5
    for workload in WORKLOADS:
        for peer in PEERS[:3]:
            step = stepping(peer, workload, device)
            for _ in range(AFTER_COMPARISONS):
                step()
            wait_for(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            for _ in range(number):
                step()
            host = time.perf_counter() - begun
            wait_for(device)
            whole = time.perf_counter() - begun
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                for _ in range(number):
                    step()
            # The profiler itself waits once at its end.
            counts = dict.fromkeys((*WAITS, "copies to the host"), 0)
            counts["cudaDeviceSynchronize"] = -1
            for event in seen.events():
                if event.name in WAITS:
                    counts[event.name] += 1
                elif "Memcpy DtoH" in event.name:
                    counts["copies to the host"] += 1
            each = {name: round(n / number, 1) for name, n in counts.items() if n > 0}
            line = {"waits of": peer, "workload": workload, "a step": each}
            line |= {"host ms": 1e3 * host / number, "step ms": 1e3 * whole / number}
            if device.type == "cuda":
                line["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            print(json.dumps(line), flush=True)
