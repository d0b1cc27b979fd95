"""What ``bench/strategies.py`` runs on every rank: the workloads, their training and their timing.

Rank 0 prints one JSON record for each run.
"""

import argparse
import json
import math
import os
import pydoc_data.topics
import time
from abc import ABC, abstractmethod
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from common.cifar10 import Cifar10
from common.flags import compression, strategy
from common.mnist import Mnist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hvkit

EVALUATIONS = 8
CONTEXT = 64
# A whole round of the strategies in bench/strategies.py; so many blocks, or for so many seconds.
BLOCK, TIMED_BLOCKS, TIMED_SECONDS = 16, 6, 4


class Rows(Dataset):
    """Inputs and targets in memory; a loader takes a whole batch in one call."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitems__(self, rows):
        return self.inputs[rows], self.targets[rows]


class Workload(ABC):
    """A network, its data, and how it is trained.

    Attributes:
        steps: of each rank.
        batch_size: of each rank.
    """

    steps: int
    batch_size: int

    @abstractmethod
    def data(self):
        """The rows to train on, and those to test on."""

    @abstractmethod
    def model(self):
        """The network, with new weights."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def measure(self, outputs, targets):
        """Points of a batch; the result is their mean over test rows. Accuracy in percent."""
        return 100 * (outputs.argmax(1) == targets).sum()


class MnistWorkload(Workload):
    """MNIST, two thirds of an epoch; 57 thousand weights."""

    steps, batch_size = 640, 16

    def data(self):
        return _images(Mnist())

    def model(self):
        first = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(
            *first, *second, nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10)
        )


class CifarWorkload(Workload):
    """The subset of CIFAR-10; 63 thousand weights, with batch norm."""

    steps, batch_size = 800, 16

    def data(self):
        return _images(Cifar10())

    def model(self):
        layers, channels = [], 3
        for width in (16, 32, 64, 64):
            layers += nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            layers += nn.ReLU(), nn.MaxPool2d(2)
            channels = width
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


class TextWorkload(Workload):
    """Characters of Python's help texts, by a transformer of 0.25 million weights.

    The measure is bits per character.
    """

    steps, batch_size = 640, 8

    def data(self):
        text = "\n".join(pydoc_data.topics.topics.values())
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        numbers = torch.tensor([number[character] for character in text])
        rows = (len(numbers) - 1) // CONTEXT
        inputs, targets = (
            numbers[start : start + rows * CONTEXT].view(rows, CONTEXT) for start in (0, 1)
        )
        train = rows * 9 // 10
        return Rows(inputs[:train], targets[:train]), Rows(inputs[train:], targets[train:])

    def model(self):
        return Characters(len(self.characters), width=96, heads=4, layers=2)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), 2e-3)

    def measure(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum") / CONTEXT / math.log(2)


class Characters(nn.Module):
    """Logits of the next character, for each of a row."""

    def __init__(self, characters, width, heads, layers):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, rows):
        x = self.blocks(self.embedding(rows) + self.positions, mask=self.mask, is_causal=True)
        return self.head(x).transpose(1, 2)


WORKLOADS = {"mnist": MnistWorkload, "cifar": CifarWorkload, "text": TextWorkload}


def _images(source):
    images = source.read(Path(os.environ["HVKIT_DATA_DIR"]))
    return [_rows(part) for part in (images.train, images.test)]


def _rows(images):
    pixels, labels = (torch.from_numpy(part) for part in images.batch(slice(None)))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Rows(pixels, labels)


class TopKWithoutFeedback(hvkit.TopK):
    """``TopK`` that forgets what it has not sent, to see what the error feedback does."""

    own = ()

    def begin(self, shape):
        return {}

    def reduce(self, vector, shapes, state, ops, place):
        nothing = {"residual": [0 * vector]}
        mean, _ = yield from super().reduce(vector, shapes, nothing, ops, place)
        return mean, {}


class Training:
    """A model under one strategy, its optimizer, and batches without end.

    Attributes:
        steps: taken so far.
        sent: bytes and messages that this rank has sent in them.
    """

    def __init__(self, workload, rows, case, seed):
        self._workload = workload
        torch.manual_seed(seed)
        model = workload.model()
        optimizer = workload.optimizer(model)
        if "sgd" in case:
            optimizer = torch.optim.SGD(model.parameters(), **case["sgd"])
        reduction = compression(case["compression"])
        if not case.get("feedback", True):
            reduction = TopKWithoutFeedback(reduction.ratio)
        self._model, self._optimizer = hvkit.distribute(
            model, optimizer, strategy=strategy(case["strategy"]), compression=reduction
        )
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, workload.steps)
        self._batches = _without_end(hvkit.shard(_loader(rows, workload, shuffle=True), seed=seed))
        self.steps = 0
        self.sent = np.zeros(2)

    def train(self, steps):
        before = _sent()
        self._model.train()
        for inputs, targets in islice(self._batches, steps):
            self._optimizer.zero_grad()
            F.cross_entropy(self._model(inputs), targets).backward()
            self._optimizer.step()
            self._schedule.step()
        self.steps += steps
        self.sent += _sent() - before

    @torch.no_grad()
    def evaluate(self, rows):
        """The mean over the test rows, of which each rank has its part."""
        points = number = 0
        with hvkit.settled(self._model):
            self._model.eval()
            for inputs, targets in hvkit.shard(_loader(rows, self._workload), exact=True):
                points += self._workload.measure(self._model(inputs), targets).item()
                number += len(targets)
        return hvkit.average(points / number, weight=number)


def _loader(rows, workload, **options):
    batch_size = workload.batch_size if options else 250
    return DataLoader(rows, batch_size, drop_last=bool(options), collate_fn=tuple, **options)


def _without_end(loader):
    while True:
        yield from loader


def _sent():
    """Bytes and messages that this rank has sent for training."""
    sent = [
        each for purpose, each in hvkit.traffic().items() if purpose not in ("objects", "start")
    ]
    return np.array([sum(each.bytes for each in sent), sum(each.messages for each in sent)], float)


def sent_per_step(training):
    """Bytes and messages of a rank and step: the mean over ranks, and the most."""
    by_rank = hvkit.allgather(training.sent / training.steps)
    names = ("bytes", "messages", "most_bytes", "most_messages")
    numbers = [*np.mean(by_rank, 0), *np.max(by_rank, 0)]
    return dict(zip(names, map(float, numbers), strict=True))


def learn(workload, data, case, seed):
    """Train to the end, and look at the test rows now and then."""
    rows, test = data
    training = Training(workload, rows, case, seed)
    curve = []
    for _ in range(EVALUATIONS):
        training.train(workload.steps // EVALUATIONS)
        curve.append([training.steps, training.evaluate(test)])
    return {"seed": seed, "curve": curve, **sent_per_step(training)}


def measure_time(workload, data, case):
    """Seconds of a step in each block; the first one, which prepares much, only if it is long."""
    training = Training(workload, data[0], case, seed=0)

    def block():
        hvkit.barrier()
        start = time.perf_counter()
        training.train(BLOCK)
        hvkit.barrier()
        return hvkit.average((time.perf_counter() - start) / BLOCK)  # all ranks stop together

    blocks = [block()]
    if BLOCK * blocks[0] < 2 * TIMED_SECONDS:
        blocks.clear()
    while len(blocks) < TIMED_BLOCKS and BLOCK * sum(blocks) < TIMED_SECONDS:
        blocks.append(block())
    return {"seconds": blocks, **sent_per_step(training)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("cases", type=json.loads, help="a JSON list")
    parser.add_argument("--seeds", type=int, help="train to the end, so many times")
    flags = parser.parse_args()

    torch.set_num_threads(1)
    hvkit.init()
    workload = WORKLOADS[flags.workload]()
    data = workload.data()
    for case in flags.cases:
        if flags.seeds:
            records = (learn(workload, data, case, seed) for seed in range(flags.seeds))
        else:
            records = [measure_time(workload, data, case)]
        for record in records:
            if hvkit.is_main():
                print(json.dumps({"workload": flags.workload, **case, **record}), flush=True)


if __name__ == "__main__":
    main()
