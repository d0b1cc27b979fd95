"""Handwritten digits with Lightning: a LightningModule, metrics, validation, a checkpoint."""

import argparse

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import hvkit  # noqa: F401  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--folder", help="folder for checkpoints, from which a second run resumes")
parser.add_argument("--save", help="file for the trained weights")
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), args.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


lightning.seed_everything(args.seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train_loader = DataLoader(
    TensorDataset(images[:1440], labels[:1440]), batch_size=args.batch_size, shuffle=True
)
test_loader = DataLoader(TensorDataset(images[1440:], labels[1440:]), batch_size=100)

model = Classifier()
trainer = lightning.Trainer(
    strategy="hvkit",  # added
    accelerator="cpu",
    max_epochs=args.epochs,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(args.folder, save_last=True)] if args.folder else None,
    enable_checkpointing=bool(args.folder),
)
trainer.fit(model, train_loader, test_loader, ckpt_path="last" if args.folder else None)
trainer.print(f"test accuracy {trainer.callback_metrics['accuracy']:.4f}")

if args.save and trainer.is_global_zero:
    torch.save(model.state_dict(), args.save)
