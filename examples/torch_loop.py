"""Handwritten digits in a plain PyTorch loop: argparse, DataLoader, Adadelta, StepLR."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--gamma", type=float, default=0.7)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the trained weights")
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train_loader = DataLoader(
    TensorDataset(images[:1440], labels[:1440]), batch_size=args.batch_size, shuffle=True
)
test_loader = DataLoader(TensorDataset(images[1440:], labels[1440:]), batch_size=100)
train_loader = hvkit.shard(train_loader, seed=args.seed)  # added

torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
model, optimizer = hvkit.distribute(model, optimizer)  # added
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)

for epoch in range(args.epochs):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    scheduler.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test_loader:
            correct += (model(x).argmax(1) == y).sum().item()
    print(f"epoch {epoch + 1}: test accuracy {correct / len(test_loader.dataset):.4f}")

args.save = args.save if hvkit.is_main() else None  # added
if args.save:
    torch.save(model.state_dict(), args.save)
