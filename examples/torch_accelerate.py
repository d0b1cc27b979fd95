"""Handwritten digits in a loop with Accelerate: accumulation, clipping, gathered metrics."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the trained weights")
args = parser.parse_args()

set_seed(args.seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train_loader = DataLoader(
    TensorDataset(images[:1440], labels[:1440]), batch_size=args.batch_size, shuffle=True
)
test_loader = DataLoader(TensorDataset(images[1440:], labels[1440:]), batch_size=100)

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
accelerator = hvkit.distribute(accelerator)  # added
model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
model, optimizer, train_loader, test_loader = accelerator.prepare(
    model, optimizer, train_loader, test_loader
)

for epoch in range(args.epochs):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test_loader:
            hits = accelerator.gather_for_metrics(model(x).argmax(1) == y)
            correct += hits.sum().item()
    accelerator.print(f"epoch {epoch + 1}: test accuracy {correct / len(test_loader.dataset):.4f}")

if args.save and accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), args.save)
