"""The recorded trainings in PyTorch."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from trainings import STEPS, data, start

import hvkit
from hvkit.frameworks.pytorch import torch_distributed


class Training:
    """A model and its optimizer, distributed, after no step or where a checkpoint stands."""

    def __init__(self, case, mode, folder=None):
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
        with torch.no_grad():
            for layer, weights in zip(self.model[::3], start(), strict=True):
                layer.weight.copy_(torch.from_numpy(weights.T))
                layer.bias.zero_()
        momentum = 0.0 if case.strategy == "DeMo" else 0.75
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.25, momentum)
        hvkit.distribute(self.model, self.optimizer, **case.arguments())
        self.done = 0
        if folder:
            parts = {"model": self.model, "optimizer": self.optimizer}
            self.checkpoint = hvkit.Checkpoint(folder, **parts)
            self.done = self.checkpoint.restore().step

    def train(self, until=STEPS):
        for x, y in data()[self.done : until]:
            self._step(x, y)
        self.done = until
        return self

    def _step(self, x, y):
        self.optimizer.zero_grad()
        F.mse_loss(self.model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        self.optimizer.step()

    def weights(self):
        """What this rank holds: with ``FullyShard`` its part. Not the numbers of batches."""
        values = [*self.model.parameters(), *self.model.buffers()]
        own = [v.to_local() if isinstance(v, DTensor) else v for v in values]
        return [v.detach().clone().numpy() for v in own if v.is_floating_point()]


def clean_up():
    """Leave no ``torch.distributed``, which other strategies would count as another library's."""
    torch_distributed.stop()
