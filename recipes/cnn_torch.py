"""A residual network in PyTorch: ResNet-20 on CIFAR-10, or throughput of ResNet-50."""

import common
import torch
import torch.nn.functional as F
from common.for_torch import ImageRows, resnet20, resnet50, to_tensors
from torch.utils.data import DataLoader

import hvkit

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(flags):
    make = {"resnet20": resnet20, "resnet50": resnet50}[flags.model]
    model = make(flags.classes if flags.synthetic else 10)
    return model.to(device, memory_format=torch.channels_last)


def make_optimizer(flags, model):
    """SGD with weight decay for kernels only: not for biases and batch norm, which are vectors."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": flags.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=flags.lr, momentum=flags.momentum)


class Step:
    """One training step, in the precision that the flags name."""

    def __init__(self, flags, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.dtype = getattr(torch, flags.precision)
        # Float16 cannot represent small gradients: they are scaled up, and down again.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def forward(self, pixels):
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(pixels).float()

    def __call__(self, pixels, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.forward(pixels), labels)
        self.scaler.scale(loss).backward()  # gradients are averaged here
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def train(model, step, batches, report):
    model.train()
    for pixels, labels in report.batches(batches):
        report.step(step(pixels.to(device), labels.to(device)))


@torch.no_grad()
def evaluate(model, step, batches):
    """Loss and accuracy on all test images; each rank computes its own part of them."""
    model.eval()
    loss_sum = correct = images = 0
    for pixels, labels in batches:
        logits, labels = step.forward(pixels.to(device)), labels.to(device)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
        images += len(labels)
    return common.mean_over_ranks(loss_sum, correct, images)


def train_and_evaluate(flags):
    data = common.load_data(flags)
    train_images = ImageRows(data.train)
    train_loader = hvkit.shard(
        DataLoader(
            train_images,
            batch_size=flags.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=to_tensors,
        ),
        seed=flags.seed,
        mesh=flags.mesh,
    )
    test_loader = hvkit.shard(
        DataLoader(ImageRows(data.test), flags.test_batch_size, collate_fn=to_tensors),
        exact=True,
        mesh=flags.mesh,
    )
    steps = len(train_loader)

    model = make_model(flags)
    optimizer = make_optimizer(flags, model)
    monitor = common.make_monitor(flags, steps)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        lr_scaling="linear",
        warmup_epochs=flags.warmup_epochs,
        steps_per_epoch=steps,
        strategy=flags.strategy,
        compression=flags.compression,
        batch_norm=flags.batch_norm,
        monitor=monitor,
        mesh=flags.mesh,
        microbatches=flags.microbatches,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: common.rate_factor(flags.schedule, epoch, flags.epochs)
    )
    step = Step(flags, model, optimizer)

    first_epoch, steps_done, checkpoint = 0, 0, None
    if flags.checkpoint_dir is not None:
        parts = {"scheduler": schedule, "data": train_loader, "scaler": step.scaler}
        if monitor is not None:
            parts["monitor"] = monitor
        checkpoint = hvkit.Checkpoint(
            flags.checkpoint_dir, keep=flags.keep, model=model, optimizer=optimizer, **parts
        )
        start = checkpoint.restore()
        first_epoch, steps_done = start.epoch, start.step

    with common.Report(flags, data, steps, monitor, first_epoch) as report:
        for epoch in range(first_epoch, flags.epochs):
            report.start_epoch()
            if flags.augment:
                train_images.images = common.augmented(data.train, flags.seed, epoch)
            train(model, step, train_loader, report)
            schedule.step()
            steps_done += steps
            with hvkit.settled(model):
                report.end_epoch(*evaluate(model, step, test_loader))
            # After the test: a run that is killed before this line repeats epoch and test.
            if checkpoint is not None:
                checkpoint.save(epoch=epoch + 1, step=steps_done)


def measure(flags):
    """Images per second of training on random images."""
    model = make_model(flags)
    optimizer = make_optimizer(flags, model)
    model, optimizer = hvkit.distribute(
        model,
        optimizer,
        strategy=flags.strategy,
        compression=flags.compression,
        batch_norm=flags.batch_norm,
    )
    step = Step(flags, model, optimizer)
    pixels, labels = (part.to(device) for part in to_tensors(common.random_batch(flags)))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with common.Throughput(flags, wait) as throughput:
        for _ in range(throughput.steps):
            step(pixels, labels)
            throughput.step()


def main():
    flags = common.parse_cnn_flags(__doc__, meshes=True)
    hvkit.init()
    # distribute copies rank 0's weights to all ranks.
    torch.manual_seed(flags.seed + hvkit.rank())
    if flags.synthetic:
        measure(flags)
    else:
        train_and_evaluate(flags)


if __name__ == "__main__":
    main()
