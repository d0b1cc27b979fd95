"""PyTorch: a run that is stopped and resumed is, bit for bit, the run that was never stopped."""

import random

import numpy as np
import pytest
import torch
from cases import MORE, each_once
from ranks import same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader
from torch_nets import arrays

import hvkit
from hvkit.checkpoint import Checkpoint
from hvkit.data import shard
from hvkit.watch import calls

SAMPLES = torch.randn(53, 8, generator=torch.Generator().manual_seed(0))


class Run:
    """A script run from its start; every run begins with other weights and random states."""

    def __init__(self, folder, optimizer, scheduler, warmup_steps, seed, workers=0):
        torch.manual_seed(seed * 10 + hvkit.rank())
        np.random.seed(seed * 10 + hvkit.rank())
        random.seed(seed * 10 + hvkit.rank())
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)
        self.model = nn.Sequential(*layers)
        self.optimizer = optimizer(self.model.parameters())
        hvkit.distribute(self.model, self.optimizer, lr_scaling="linear", warmup_steps=warmup_steps)
        self.scheduler = scheduler(self.optimizer)
        self.loader = shard(DataLoader(SAMPLES, 6, shuffle=True, num_workers=workers))
        self.checkpoint = Checkpoint(
            folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            data=self.loader,
        )  # fmt: skip

    def train(self, until, save_at=None):
        start = self.checkpoint.restore()
        step = start.step
        epoch = start.epoch
        while step < until:
            for x in self.loader:
                self.step(x)
                step += 1
                if step == save_at:
                    self.checkpoint.save(epoch=epoch, step=step)
                if step == until:
                    break
            epoch += 1
        return self

    def step(self, x):
        x = x + 0.1 * random.random() + 0.1 * float(np.random.normal())
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), x[:, :4]).backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self):
        tensors = list(self.model.state_dict().values())
        for values in self.optimizer.state_dict()["state"].values():
            tensors += [v for v in values.values() if isinstance(v, torch.Tensor)]
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return [*arrays(tensors), np.array(rates), torch.get_rng_state().numpy()]


def chained(optimizer):
    first = LinearLR(optimizer, 0.1, total_iters=4)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, 12)], [4])


CASES = {
    "momentum": (lambda p: SGD(p, 0.05, momentum=0.9), lambda o: StepLR(o, 3, 0.5), 0),
    "adam": (lambda p: Adam(p, 0.01), lambda o: OneCycleLR(o, 0.02, total_steps=20), 0),
    "warm-up": (lambda p: AdamW(p, 0.01), chained, 9),
}


@MORE
@pytest.mark.parametrize(("case", "save_at"), each_once(CASES, [3, 4, 5, 7]))
def test_a_resumed_run_is_the_run_that_was_never_stopped(case, save_at, folder):
    whole = Run(folder, *CASES[case], seed=1).train(until=12, save_at=save_at)
    resumed = Run(folder, *CASES[case], seed=2).train(until=12)
    for mine, theirs in zip(resumed.state(), whole.state(), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    trained = arrays(resumed.model.parameters())
    assert same_on_all_ranks(trained)


def test_a_run_whose_loader_has_workers_is_the_run_that_was_never_stopped(folder):
    whole = Run(folder, *CASES["adam"], seed=1, workers=1).train(until=7, save_at=2)
    resumed = Run(folder, *CASES["adam"], seed=2, workers=1).train(until=7)
    for mine, theirs in zip(resumed.state(), whole.state(), strict=True):
        assert mine.tobytes() == theirs.tobytes()


class Watched(SGD):
    """Remembers the rate of its last update."""

    def _init_group(self, group, *rest):  # called by the update
        self.used = group["lr"]
        return super()._init_group(group, *rest)


def test_each_rank_goes_on_in_its_own_warm_up(folder):
    def run():
        model = nn.Linear(1, 1, bias=False)
        optimizer = Watched(model.parameters(), 0.5)
        server = hvkit.ParameterServer(None)
        hvkit.distribute(model, optimizer, strategy=server, lr_scaling="linear", warmup_steps=20)
        return model, optimizer, Checkpoint(folder, model=model, optimizer=optimizer)

    def rate_of_a_step(model, optimizer):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        return optimizer.used

    first, optimizer, checkpoint = run()
    for _ in range(2 + 3 * hvkit.rank()):
        rate_of_a_step(first, optimizer)
    checkpoint.save(epoch=0, step=2)
    undisturbed = rate_of_a_step(first, optimizer)
    assert len(set(hvkit.allgather(undisturbed))) == hvkit.size()
    second, optimizer, checkpoint = run()
    checkpoint.restore()
    assert rate_of_a_step(second, optimizer) == undisturbed


def test_ranks_that_had_taken_different_numbers_of_steps_count_on_alike(folder):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hvkit.distribute(model, optimizer)
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    checkpoint.save(epoch=0, step=1000)
    with calls.call("a step of rank 1 alone", calls.last_step() + 7 * hvkit.rank()):
        pass
    checkpoint.restore()
    assert calls.last_step() == 1000
    assert len({*hvkit.allgather(calls.of_run(1))}) == 1
