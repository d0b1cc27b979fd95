"""MNIST in PyTorch: a convolutional network, trained on any number of ranks."""

import common
import torch
import torch.nn.functional as F
from torch import nn

import hvkit

hvkit.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model() -> nn.Module:
    """Images of 28x28 in, ten logits out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    ).to(device)


def to_tensors(images, rows):
    pixels, labels = images.batch(rows)
    return torch.from_numpy(pixels)[:, None].to(device), torch.from_numpy(labels).to(device)


def train(model, optimizer, images, batches, report):
    model.train()
    for rows in batches:
        pixels, labels = to_tensors(images, rows)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        optimizer.step()
        report.step(loss.detach())


@torch.no_grad()
def evaluate(model, images, batch_size):
    """Loss and accuracy on all test images, each rank working on its own part of them."""
    model.eval()
    images = common.own_part(images)
    loss_sum = correct = 0
    for start in range(0, len(images), batch_size):
        pixels, labels = to_tensors(images, slice(start, start + batch_size))
        logits = model(pixels)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
    return common.over_all_ranks(loss_sum, correct, len(images))


def main():
    flags = common.parse_flags(__doc__)
    data = common.load_data(flags)

    # Rank 0's weights go to all ranks; dropout is drawn by each rank for itself.
    torch.manual_seed(flags.seed + hvkit.rank())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=flags.lr, momentum=flags.momentum)
    model, optimizer = hvkit.distribute(model, optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=common.LR_DECAY)

    with common.Report(flags, data) as report:
        for epoch in range(flags.epochs):
            report.start_epoch()
            batches = common.train_batches(flags, data.train, epoch)
            train(model, optimizer, data.train, batches, report)
            schedule.step()
            report.end_epoch(*evaluate(model, data.test, flags.test_batch_size))


if __name__ == "__main__":
    main()
