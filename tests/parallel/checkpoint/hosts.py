"""A run that can be started again, on one machine whose ranks play hosts."""

import numpy as np
import torch

import hvkit
from hvkit import runtime
from hvkit.host import run_reports

RUN = "0123456789abcdef"


def as_if_on(host, monkeypatch):
    """Make this rank the first of a host, in a run that can be started again.

    Args:
        host: a folder of this rank alone, for its memory.
        monkeypatch: of the test.

    Returns:
        The run's folder in the memory, which need not exist.
    """
    monkeypatch.setenv(run_reports.RUN_NAME, RUN)
    monkeypatch.setattr(run_reports, "_MEMORY", host)
    monkeypatch.setattr(runtime, "local_rank", lambda: 0)
    return host / f"hvkit-run-{RUN}"


def begin(folder, **options):
    torch.manual_seed(3 + hvkit.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.Adam(model.parameters())
    hvkit.distribute(model, optimizer)
    return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer, **options)


def train(model, optimizer, step):
    numbers = np.random.default_rng([step, hvkit.rank()]).normal(size=(6, 8))
    optimizer.zero_grad()
    model(torch.from_numpy(numbers.astype(np.float32))).square().mean().backward()
    optimizer.step()


def state(model):
    return [value.clone() for value in model.state_dict().values()]
