"""A training with Accelerate, on N ranks or in one process with batches of N ranks."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4


def train(distribute, ranks, batches=1, save=None, load=None):
    """Train after ``distribute(accelerator)``; the model, the accelerator and what was gathered.

    Its state is saved after four of the second epoch's eight batches, or loaded to go on there.
    """
    torch.set_default_dtype(torch.float64)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # the same in one process
    accelerator = distribute(
        Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    rows, size = 8 * ranks * BATCH, batches * BATCH
    x, y = torch.randn(rows + 21, 8), torch.arange(rows + 21) % 4
    loader = DataLoader(TensorDataset(x[:rows], y[:rows]), size, shuffle=True)
    test = DataLoader(TensorDataset(x[rows:], y[rows:]), size)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    if load is not None:
        accelerator.load_state(load)
    for epoch in range(2) if load is None else [1]:
        loader.set_epoch(epoch)
        rest = loader if load is None else accelerator.skip_first_batches(loader, 4)
        for batch, (inputs, labels) in enumerate(rest, 1):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            if save is not None and (epoch, batch) == (1, 4):
                accelerator.save_state(save)
    with torch.no_grad():
        found = [
            accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
            for inputs, labels in test
        ]
    return model, accelerator, [torch.cat(each) for each in zip(*found, strict=True)]


if __name__ == "__main__":
    done, _, gathered = train(lambda accelerator: accelerator, int(sys.argv[1]), int(sys.argv[1]))
    torch.save({"weights": done.state_dict(), "gathered": gathered}, sys.argv[2])
