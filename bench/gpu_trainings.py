"""Trainings with and without hvkit, compared: cases of ``bench/gpu.py``."""

import contextlib
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 12
BATCH = 16


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


class KerasCase:
    """``fit`` of Keras on PyTorch, with and without hvkit, in float32.

    Args:
        layers: makes the layers.
        optimizer: makes the optimizer.
        within: the largest difference of weights from one process, with two ranks.
        two: whether two ranks of this host train what one process trains.
        **options: of ``hvkit.distribute``.
    """

    def __init__(self, layers, optimizer, within=2e-6, two=True, **options):
        self.layers, self.optimizer = layers, optimizer
        self.within, self.two, self.options = within, two, options

    def train(self, device, distributed):
        """The weights after some steps."""
        import keras
        import numpy as np

        import hvkit

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8, 8, 3)), *self.layers()])
        optimizer = self.optimizer()
        rank, size = (hvkit.rank(), int(hvkit.size())) if distributed else (0, 1)
        if distributed:
            hvkit.distribute(model, optimizer, **self.options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        chosen = np.random.default_rng(1)
        x = chosen.standard_normal((STEPS, BATCH, 8, 8, 3), np.float32)
        y = chosen.integers(10, size=(STEPS, BATCH))
        mine = x[:, rank::size].reshape(-1, 8, 8, 3), y[:, rank::size].reshape(-1)
        model.fit(*mine, batch_size=BATCH // size, shuffle=False, verbose=0)
        where = next(model.parameters()).device.type
        if where != device.type:
            raise RuntimeError(f"Keras computed on {where}, not on {device.type}")
        values = (weight.numpy().astype(np.float64) for weight in model.weights)
        return {str(number): torch.from_numpy(value) for number, value in enumerate(values)}


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


def keras_cases():
    from keras import layers, optimizers

    import hvkit

    def network():
        return [layers.Conv2D(16, 3, activation="tanh"), layers.Flatten(), layers.Dense(10)]

    def normalised():
        return [
            layers.Conv2D(16, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(10),
        ]

    def momentum():
        return optimizers.SGD(0.05, momentum=0.9)

    def plain():
        return optimizers.SGD(0.05)

    return {
        "Keras, SGD": KerasCase(network, momentum),
        "Keras, Adam": KerasCase(network, lambda: optimizers.Adam(1e-3), within=1e-4),
        "Keras, batch norm": KerasCase(normalised, momentum, two=False),
        "Keras, LocalSGD(1)": KerasCase(network, plain, strategy=hvkit.LocalSGD(1)),
        "Keras, ShardedOptimizer": KerasCase(network, momentum, strategy=hvkit.ShardedOptimizer()),
        "Keras, compression='bf16'": KerasCase(network, momentum, compression="bf16", within=0.02),
    }


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
    "Keras, LocalSGD(1)": 1e-6,
    "Keras, compression='bf16'": 0.02,
    **dict.fromkeys(("batch norm, sync", "sparse rows", "LocalSGD(1)", "DiLoCo(1)"), 1e-12),
    **dict.fromkeys(("ShardedOptimizer", "FullyShard"), 1e-12),
}
"""What even one rank computes in another order, or rounds; everything else is the same bits."""


def averages_sent():
    """How many messages with gradients or weights this rank has started."""
    import hvkit

    return sum(hvkit.traffic().get(what, (0, 0))[1] for what in ("gradients", "weights"))


def compare(device, names):
    """Print each case's largest difference from one process, relative to each tensor's largest."""
    import hvkit

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    alone = int(hvkit.size()) == 1
    trainings = cases(device.type == "cuda") | keras_cases()
    for name, case in trainings.items():
        if (names and name not in names) or not (case.two or alone):
            continue
        within = case.within
        if alone:
            within = ALONE.get(name, 0.0)
        line = {"case": name, "within": within}
        try:
            reference = case.train(device, distributed=False)
            before = averages_sent()
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
            line["sent"] = averages_sent() - before
            by_pytorch = isinstance(case.options.get("strategy"), hvkit.FullyShard)
            line["right"] = line["difference"] <= within and (line["sent"] > 0 or by_pytorch)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:600]
            line["right"] = False
        if hvkit.rank() == 0 or "error" in line:
            print(json.dumps(line), flush=True)
        if "error" in line and not alone:
            os._exit(1)


def means_of_one_rank(device):
    """Print whether Horovod's mean over one rank is the tensor itself, at odd lengths too."""
    import horovod.torch as hvd

    hvd.init()
    for length in (1, 17, 4913, 1_000_003):
        tensor = torch.rand(length, device=device) + 1
        same = torch.equal(hvd.allreduce(tensor, name=f"mean of {length}"), tensor)
        print(
            json.dumps({"case": f"Horovod's mean of {length} numbers", "right": same}), flush=True
        )
