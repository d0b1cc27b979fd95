"""MNIST in PyTorch: a convolutional network, trained on any number of ranks."""

import common
import torch
import torch.nn.functional as F
from common.for_torch import ImageRows, to_tensors
from torch import nn
from torch.utils.data import DataLoader

import hvkit

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


def train(model, optimizer, batches, report):
    model.train()
    for pixels, labels in report.batches(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixels.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        report.step(loss.detach())


@torch.no_grad()
def evaluate(model, batches):
    """Loss and accuracy on all test images; each rank computes its own part of them."""
    model.eval()
    loss_sum = correct = images = 0
    for pixels, labels in batches:
        logits, labels = model(pixels.to(device)), labels.to(device)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
        images += len(labels)
    return common.mean_over_ranks(loss_sum, correct, images)


def main():
    flags = common.parse_flags(__doc__, meshes=True)
    hvkit.init()
    data = common.load_data(flags)
    train_loader = DataLoader(
        ImageRows(data.train),
        batch_size=flags.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=to_tensors,
    )
    train_loader = hvkit.shard(train_loader, seed=flags.seed, mesh=flags.mesh)
    test_loader = DataLoader(
        ImageRows(data.test), batch_size=flags.test_batch_size, collate_fn=to_tensors
    )
    test_loader = hvkit.shard(test_loader, exact=True, mesh=flags.mesh)

    # Each rank draws its own dropout; distribute copies rank 0's weights to all ranks.
    torch.manual_seed(flags.seed + hvkit.rank())
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=flags.lr, momentum=flags.momentum)
    monitor = common.make_monitor(flags, len(train_loader))
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        lr_scaling="linear",
        monitor=monitor,
        mesh=flags.mesh,
        microbatches=flags.microbatches,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=common.MNIST_DECAY)

    with common.Report(flags, data, len(train_loader), monitor) as report:
        for _ in range(flags.epochs):
            report.start_epoch()
            train(model, optimizer, train_loader, report)
            schedule.step()
            with hvkit.settled(model):
                report.end_epoch(*evaluate(model, test_loader))


if __name__ == "__main__":
    main()
