"""A GAN on handwritten digits in PyTorch: two networks, two optimizers."""

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
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the trained weights")
args = parser.parse_args()

torch.manual_seed(args.seed)
real = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
noise = torch.randn(len(real), 16)  # each image is paired with a noise vector
pairs = TensorDataset(real, noise)
loader = DataLoader(pairs, batch_size=args.batch_size, shuffle=True, drop_last=True)
loader = hvkit.shard(loader, seed=args.seed)  # added

generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
g_optimizer = torch.optim.SGD(generator.parameters(), lr=args.lr, momentum=0.5)
d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=args.lr, momentum=0.5)
hvkit.distribute(generator, g_optimizer)  # added
hvkit.distribute(discriminator, d_optimizer)  # added


def verdict(logits, truth):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


for epoch in range(args.epochs):
    for images, z in loader:
        fakes = generator(z)
        d_optimizer.zero_grad()
        d_loss = verdict(discriminator(images), 1.0) + verdict(discriminator(fakes.detach()), 0.0)
        d_loss.backward()
        d_optimizer.step()

        g_optimizer.zero_grad()
        g_loss = verdict(discriminator(fakes), 1.0)
        g_loss.backward()
        g_optimizer.step()
    print(f"epoch {epoch + 1}: discriminator {d_loss:.4f}, generator {g_loss:.4f}")

args.save = args.save if hvkit.is_main() else None  # added
if args.save:
    torch.save(
        {"generator": generator.state_dict(), "critic": discriminator.state_dict()}, args.save
    )
