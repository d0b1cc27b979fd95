"""Trainings with Lightning, on N ranks or in one process with batches of N ranks.

``python lightning_cases.py N FILE`` runs all in one process.
"""

import sys
import warnings
from types import SimpleNamespace

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

BATCH = 4
CASES = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.1},
    "clipping what is accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "accumulation by a schedule": {
        "gradient_clip_val": 0.1,
        "callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})],
    },
    "uneven last batch": {},
    "several optimizers": {},
    "SGD": {},
    "reduced rate": {},
    "early stopping": {"callbacks": lambda: [EarlyStopping("val", patience=1, min_delta=0.2)]},
    "mixed precision": {"precision": "bf16-mixed"},
}


class Logged(Callback):
    """Keeps the metrics of each epoch."""

    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append({name: float(each) for name, each in trainer.callback_metrics.items()})


class Classifier(L.LightningModule):
    def __init__(self, case):
        super().__init__()
        self.case, self.automatic_optimization = case, case != "several optimizers"
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if self.automatic_optimization:
            return loss
        for each in self.optimizers():
            self.manual_backward(F.cross_entropy(self.net(x), y))
            each.step()
            for other in self.optimizers():
                other.zero_grad()
        return None

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        self.log("val", F.cross_entropy(logits, y))

    def configure_optimizers(self):
        if self.case == "several optimizers":
            first = torch.optim.SGD(self.net[0].parameters(), 0.1)
            return [first, torch.optim.AdamW(self.net[2].parameters(), 0.01)]
        if self.case == "SGD":
            return torch.optim.SGD(self.parameters(), 0.1)
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        if self.case != "reduced rate":
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


def loaders(case, batches, ranks):
    """Of training and evaluation; the last batches are shorter ones."""
    generator = torch.Generator().manual_seed(1)
    rows = 12 * ranks * BATCH + (ranks * 3 if case == "uneven last batch" else 0)
    x, y = torch.randn(rows + 31, 8, generator=generator), torch.arange(rows + 31) % 4
    size = batches * BATCH
    shuffled = DataLoader(
        TensorDataset(x[:rows], y[:rows]), size, shuffle=True, generator=generator
    )
    return shuffled, DataLoader(TensorDataset(x[rows:], y[rows:]), size)


def train(case, strategy, ranks, batches=1, **options):
    """Train a case with a strategy; ``batches`` of a rank are one batch."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module, logged = Classifier(case), Logged()
    arguments = {"max_epochs": 3, **CASES[case], **options}
    callbacks = [logged, *arguments.pop("callbacks", list)()]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=callbacks,
        **{"enable_checkpointing": False, **quiet, **arguments},
    )  # fmt: skip
    train_loader, val_loader = loaders(case, batches, ranks)
    trainer.fit(module, train_loader, val_loader)
    rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
    weights = trainer.strategy.lightning_module_state_dict()
    return SimpleNamespace(
        weights=weights, epochs=logged.epochs, rates=rates, trainer=trainer, module=module,
        test=trainer.validate(module, val_loader, verbose=False)[0],
    )  # fmt: skip


if __name__ == "__main__":
    size, found = int(sys.argv[1]), {}
    for name in CASES:
        for batches in (1, size):
            done = train(name, "auto", size, batches)
            found[name, batches] = {
                key: getattr(done, key) for key in ("weights", "epochs", "rates", "test")
            }
    torch.save(found, sys.argv[2])
