"""What hvkit gives and costs on one NVIDIA GPU, in one table.

    python bench/gpu.py                 # everything, some minutes
    python bench/gpu.py one two         # some parts
    python bench/gpu.py one --device cpu

Parts:
    one    one rank through Horovod trains what a script without hvkit trains
    two    two ranks that share the GPU train what one process with twice the batch trains
    sync   what the host waits for in a step
    speed  a step beside plain PyTorch and DDP on NCCL

hvkit itself starts nothing for a single process. A rank here goes through Horovod and NCCL all the
same, so that the one GPU shows what every GPU of a large run pays beside the network.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

PARTS = ("one", "two", "sync", "speed")
STEPS = 12
BATCH = 16
LIMIT_S = 240


class _One(int):
    """A world size of one that hvkit takes for several."""

    def __gt__(self, other):
        return other == 1 or int(self) > other


def start_alone():
    """Start Horovod with one rank, and let hvkit treat it as one of several."""
    from hvkit import runtime
    from hvkit.communication.engines import PyTorchEngine

    os.environ.update({each.variable: each.value for each in runtime.rank_settings(os.environ)})
    engine = PyTorchEngine()
    engine.take_device(0, 1)
    runtime._world = runtime._World(0, _One(1), 0, 1)
    runtime._engines["torch"] = engine


class Case:
    """A training, with and without hvkit.

    Args:
        model: makes the model.
        optimizer: makes the optimizer for parameters.
        dtype: of weights and data.
        within: the largest difference of weights from one process, with two ranks.
        loop: a class whose objects take a step.
        two: whether two ranks of this host train what one process trains.
        compiled: compile the model.
        **options: of ``hvkit.distribute``.
    """

    def __init__(self, model, optimizer, dtype=torch.float64, within=1e-12, **rest):
        self.model, self.optimizer, self.dtype, self.within = model, optimizer, dtype, within
        self.loop, self.two = rest.pop("loop", Plain), rest.pop("two", True)
        self.compiled, self.options = rest.pop("compiled", False), rest

    def train(self, device, distributed):
        """The weights after some steps."""
        import hvkit

        torch.manual_seed(0)
        model = self.model().to(device, self.dtype)
        optimizer = self.optimizer(model.parameters())
        whole = not distributed
        rank, size = (0, 1) if whole else (hvkit.rank(), int(hvkit.size()))
        if distributed:
            hvkit.distribute(model, optimizer, **self.options)
        run = torch.compile(model) if self.compiled else model
        loop = self.loop(run, optimizer, device, self.options.get("accumulate", 1))
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            x = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
            y = torch.randint(10, (BATCH,), generator=generator)
            loop.step(step, x[rank::size].to(device, self.dtype), y[rank::size].to(device))
        with hvkit.settled(model) if distributed else contextlib.nullcontext():
            held = model.state_dict() if not rank else {}  # a part of the weights elsewhere
            return {name: value.detach().double().cpu() for name, value in held.items()}


class Plain:
    """The plain loop; ``accumulate`` takes that many parts of the batch."""

    def __init__(self, model, optimizer, device, accumulate):
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.device = device

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def backward(self, loss):
        loss.backward()

    def step(self, number, x, y):
        self.optimizer.zero_grad()
        for part in range(self.accumulate):
            here = slice(part, None, self.accumulate)
            self.backward(self.loss(x[here], y[here]) / self.accumulate)
        self.update()

    def update(self):
        self.optimizer.step()


class Clipped(Plain):
    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()


class Autocast(Plain):
    def loss(self, x, y):
        with torch.autocast(self.device.type, torch.bfloat16):
            return F.cross_entropy(self.model(x).float(), y)


class Scaled(Plain):
    """Float16; the third step overflows, on the last rank alone."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10)

    def step(self, number, x, y):
        import hvkit

        last = len(x) == BATCH or hvkit.rank() == hvkit.size() - 1
        self.factor = 1e30 if number == 2 and last else 1
        super().step(number, x, y)

    def loss(self, x, y):
        with torch.autocast(self.device.type, torch.float16):
            return F.cross_entropy(self.model(x).float(), y) * self.factor

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def update(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class OnAStream(Plain):
    """Everything on a stream of its own, with a long kernel before each step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream() if on_gpu else None
        self.busy = torch.randn(2048, 2048, device=self.device) if on_gpu else None

    def step(self, number, x, y):
        if self.stream is None:
            super().step(number, x, y)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(5):
                self.busy = torch.tanh(self.busy @ self.busy)
            super().step(number, x, y)
        torch.cuda.current_stream().wait_stream(self.stream)


class NanOnce(Plain):
    """The third batch's loss is NaN; without hvkit, the script leaves the step out."""

    def step(self, number, x, y):
        self.nan = number == 2
        super().step(number, x, y)

    def backward(self, loss):
        (loss * (float("nan") if self.nan else 1)).backward()

    def update(self):
        if self.nan and not self.skips:
            return
        self.optimizer.step()

    @property
    def skips(self):
        from hvkit.sync.port import is_distributed

        return is_distributed(self.optimizer)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Tanh(), nn.Linear(64, 10))


def convnet():
    convolutions = nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Tanh()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))


def normalised():
    convolution = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Tanh()
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(576, 10))


class Rows(nn.Module):
    """Looks up rows of a table, whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 8, sparse=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        numbers = (x.flatten(1)[:, :8] * 1e4).long() % 1000
        return self.head(self.table(numbers).mean(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, 0.05)


def adam(parameters, **options):
    return torch.optim.Adam(parameters, 1e-3, **options)


def fused(parameters):
    return adam(parameters, fused=True)


def capturable(parameters):
    return adam(parameters, capturable=torch.cuda.is_available())


def cases(on_gpu):
    import hvkit

    single = {"dtype": torch.float32, "within": 2e-6}
    return {
        "SGD": Case(convnet, sgd),
        "Adam, fused": Case(convnet, fused, within=1e-9),
        "Adam, capturable": Case(convnet, capturable, within=1e-9),
        "float32": Case(convnet, sgd, **single),
        "bfloat16 weights": Case(mlp, plain_sgd, torch.bfloat16, within=0.1),
        "autocast to bfloat16": Case(mlp, sgd, torch.float32, loop=Autocast, within=0.02),
        "GradScaler, clipped": Case(mlp, sgd, torch.float32, loop=Scaled, within=0.02),
        "clip_grad_norm_": Case(convnet, sgd, loop=Clipped),
        "accumulate=2": Case(convnet, sgd, accumulate=2),
        "torch.compile": Case(mlp, sgd, compiled=True, **single),
        "on a stream of its own": Case(convnet, sgd, loop=OnAStream),
        "batch norm": Case(normalised, sgd, two=False),
        "batch norm, sync": Case(normalised, sgd, batch_norm="sync", within=1e-10),
        "sparse rows": Case(Rows, plain_sgd),
        'on_nonfinite="skip"': Case(convnet, sgd, loop=NanOnce, on_nonfinite="skip"),
        "LocalSGD(1)": Case(convnet, plain_sgd, strategy=hvkit.LocalSGD(1)),
        "DiLoCo(1)": Case(convnet, plain_sgd, strategy=hvkit.DiLoCo(1, 1.0, 0.0)),
        "ShardedOptimizer": Case(convnet, adam, strategy=hvkit.ShardedOptimizer(), within=1e-9),
        "FullyShard": Case(mlp, adam, strategy=hvkit.FullyShard(), two=not on_gpu),
        "compression='bf16'": Case(
            mlp, sgd, torch.float32, compression="bf16", within=0.02, two=True
        ),
        "compression='int8'": Case(mlp, sgd, torch.float32, compression="int8", within=0.05),
        "PowerSGD": Case(mlp, sgd, torch.float32, compression=hvkit.PowerSGD(rank=64), within=1e-3),
    }


ALONE = {
    # Horovod's buckets begin elsewhere in memory, and CUDA adds up in other groups.
    "GradScaler, clipped": 1e-6,
    "clip_grad_norm_": 1e-12,
    "compression='bf16'": 0.02,
    "compression='int8'": 0.05,
    "PowerSGD": 1e-3,
    **dict.fromkeys(("batch norm, sync", "sparse rows", "LocalSGD(1)", "DiLoCo(1)"), 1e-12),
    **dict.fromkeys(("ShardedOptimizer", "FullyShard"), 1e-12),
}
"""What even one rank computes in another order, or rounds; everything else is the same bits."""


def compare(device, names):
    """Print each case's largest difference from one process, relative to each tensor's largest."""
    import hvkit

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    alone = int(hvkit.size()) == 1
    for name, case in cases(device.type == "cuda").items():
        if (names and name not in names) or not (case.two or alone):
            continue
        within = case.within
        if alone:
            within = ALONE.get(name, 0.0)
        line = {"case": name, "within": within}
        try:
            reference = case.train(device, distributed=False)
            trained = case.train(device, distributed=True)
            line["difference"] = (
                max(
                    float((trained[n] - v).abs().max() / v.abs().max().clamp(min=1e-30))
                    for n, v in reference.items()
                    if v.numel()
                )
                if trained
                else float("nan")
            )
            line["right"] = line["difference"] <= within
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:600]
            line["right"] = False
        if hvkit.rank() == 0 or "error" in line:
            print(json.dumps(line), flush=True)
        if "error" in line and not alone:
            os._exit(1)


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


def with_ddp(model):
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def stepping(peer, workload, device):
    """A function that takes a step, set up with hvkit, DDP or neither."""
    import hvkit

    torch.manual_seed(0)
    model, loss = WORKLOADS[workload](device, device.type == "cpu")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if peer == "hvkit":
        hvkit.distribute(model, optimizer)
    run = with_ddp(model) if peer == "DDP" else model

    def step():
        optimizer.zero_grad()
        loss(run).backward()
        optimizer.step()

    return step


def wait_for(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def speed(device, rounds, seconds):
    """Print the time of a step of each peer, from blocks in turns."""
    for workload in WORKLOADS:
        steps = {peer: stepping(peer, workload, device) for peer in ("plain", "hvkit", "DDP")}
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
        for peer in ("plain", "hvkit", "DDP"):
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


def part(name, flags):
    device = torch.device(flags.device)
    if name == "two":
        compare(device, flags.cases)
        return
    start_alone()
    if name == "one":
        compare(device, flags.cases)
    elif name == "sync":
        host_waits(device)
    else:
        speed(device, flags.rounds, flags.seconds)


def run(name, arguments, environ):
    """Run a part in processes of its own; returns its lines and what else it printed."""
    command = [sys.executable, __file__, *arguments, "--part", name]
    if name == "two":
        command = ["hvkit", "run", "-np", "2", "--", *command[1:]]
    else:
        command = ["mpirun", "-np", "1", *command]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        said, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        status = f"more than {LIMIT_S} s"
    taken = time.monotonic() - begun
    lines, rest = [], []
    for line in said.splitlines():
        text = line[line.find("{") :] if "{" in line else ""
        try:
            lines.append(json.loads(text))
        except ValueError:
            rest.append(line)
    return lines, rest, status, taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block of steps")
    parser.add_argument("--cases", nargs="*", help="some of the cases of `one` and `two`")
    flags = parser.parse_args()
    if flags.part:
        part(flags.part, flags)
        return
    passed = ["--device", flags.device, "--rounds", str(flags.rounds)]
    passed += ["--seconds", str(flags.seconds)]
    passed += ["--cases", *flags.cases] if flags.cases else []
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    rows = []
    for name in flags.parts:
        lines, rest, status, taken = run(name, passed, environ)
        print(f"\n## {name}: exit {status}, {taken:.0f} s", flush=True)
        for line in lines:
            print(json.dumps(line))
        wrong = [line for line in lines if line.get("right") is False]
        print(*(rest[-40:] if status or wrong else rest[:12]), sep="\n", flush=True)
        rows += rows_of(name, lines, status)
    of = torch.cuda.get_device_name() if flags.device == "cuda" else flags.device
    print(f"\n| PyTorch {torch.__version__}, {of} | |\n|---|---|")
    print(*(f"| {what} | {figures} |" for what, figures in rows), sep="\n")


def rows_of(name, lines, status):
    """What the table says of a part: pairs of texts."""
    if name in ("one", "two"):
        right = sum(line["right"] for line in lines if "right" in line)
        ranks = {"one": "one rank", "two": "two ranks that share the GPU"}[name]
        yield f"trainings equal to one process, {ranks}", f"{right} of {len(lines)}, exit {status}"
    for line in lines:
        if "waits of" in line:
            counts = ", ".join(f"{n} {what}" for what, n in line["a step"].items()) or "none"
            what = f"a step of {line['workload']}, {line['waits of']}: what the host waits for"
            host, whole = line["host ms"], line["step ms"]
            yield what, f"{counts}; host {host:.1f} ms of {whole:.1f} ms; {line.get('GiB')} GiB"
        elif "workload" in line:
            for peer in ("hvkit", "DDP"):
                of = line[peer]
                yield (
                    f"speed of {line['workload']} with {peer}, plain PyTorch = 1",
                    f"{of['speed']:.3f} ({of['from']:.3f} to {of['to']:.3f}); {of['ms']:.2f} ms",
                )


if __name__ == "__main__":
    main()
