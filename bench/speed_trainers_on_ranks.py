"""What ``bench/speed.py`` starts on every rank: a trainer of a library trains a workload in turns.

Turns begin and end in the model, since the trainers own the loop. At the end a rank prints the time
of day.
"""

import argparse
import json
import logging
import tempfile
import time
import warnings

import torch
from speed_on_ranks import BATCH, WORKLOADS, workload
from torch import nn
from torch.nn import functional as F
from turns import Turns

STEPS = 100_000  # more than all turns have


class Data(torch.utils.data.Dataset):
    """The same sample again and again, for as many steps as are wanted."""

    def __init__(self, shape):
        self.sample = {"x": torch.randn(shape), "labels": torch.tensor(3)}

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        return self.sample


class Net(nn.Module):
    """Computes the loss as models of Transformers do; a turn of the bench ends between steps."""

    def __init__(self, net, turns):
        super().__init__()
        self.net, self.turns = net, iter(turns)
        self.ended = False

    def forward(self, x, labels):
        self.ended = next(self.turns, self) is self
        return {"loss": F.cross_entropy(self.net(x), labels)}


def with_lightning(peer, net, data):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            loss = self.net(**batch)["loss"]
            self.trainer.should_stop = net.ended
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=peer,
        devices=2 if peer == "ddp" else 1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, BATCH))


def with_transformers(peer, net, data):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class End(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            control.should_training_stop = net.ended

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            use_cpu=True,
            optim="sgd",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = Trainer(net, arguments, train_dataset=data, callbacks=[End()])
        if peer == "hvkit":
            import hvkit

            hvkit.distribute(trainer)
        trainer.train()


LIBRARIES = {"lightning": with_lightning, "transformers": with_transformers}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("hvkit", "ddp"))
    parser.add_argument(
        "workload",
        help=f"{' or '.join(LIBRARIES)}, and one of {', '.join(WORKLOADS)}: lightning-mnist",
    )
    parser.add_argument("turns", help="the bench's socket")
    flags = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if flags.peer == "hvkit":
        import hvkit

        hvkit.init("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library, name = flags.workload.split("-")
    net, shape = workload(name)
    net = Net(net, Turns(flags.turns))
    LIBRARIES[library](flags.peer, net, Data(shape))
    print("\n" + json.dumps([time.time()]) + "\n", flush=True)


if __name__ == "__main__":
    main()
