"""A trainer's run whose rank is killed in an epoch resumes its own checkpoint, to the same bits."""

import pytest
from cases import MORE
from test_restarts import COMMON, KILL, restarts, run

pytestmark = MORE

# Four epochs of six steps, saved every four.
LIGHTNING = (
    COMMON
    + """
import lightning as L, torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from hvkit.integrations.lightning import HvkitStrategy


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Steps(Callback):
    def on_train_start(self, trainer, _):
        self.start = trainer.global_step

    def on_train_batch_end(self, trainer, *_):
        after(trainer.global_step)


torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 8), torch.arange(96) % 4)
steps, saves = Steps(), ModelCheckpoint(folder, every_n_train_steps=4, save_last=True)
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", strategy=HvkitStrategy(strategy=strategy),
    callbacks=[saves, steps], logger=False, enable_progress_bar=False, enable_model_summary=False,
)
loader = DataLoader(data, 8, shuffle=True)
trainer.fit(
    Classifier(), loader,
    ckpt_path="last" if (folder / "last.ckpt").exists() else None,
)
weights = trainer.strategy.lightning_module_state_dict()
finish(steps.start, [each.numpy().tobytes() for each in weights.values()])
"""
)
TRANSFORMERS = (
    COMMON
    + """
import torch
from transformers import (
    GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
)


class Steps(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        self.start = state.global_step

    def on_step_end(self, args, state, control, **_):
        after(state.global_step)


set_seed(1)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)  # has dropout
words = torch.randint(0, 64, (96, 12))
args = TrainingArguments(
    str(folder), num_train_epochs=4, per_device_train_batch_size=8, learning_rate=0.01,
    save_steps=4, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
)
steps = Steps()
trainer = Trainer(
    GPT2LMHeadModel(config), args, callbacks=[steps],
    train_dataset=[{"input_ids": row, "labels": row} for row in words],
)
trainer = hvkit.distribute(trainer, strategy=strategy)
trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
trainer.save_model(folder / "end")
if hvkit.is_main():
    finish(steps.start, [(folder / "end" / "model.safetensors").read_bytes()])
"""
)


CASES = {
    "Lightning": (LIGHTNING, "Synchronous()"),
    "Lightning, FullyShard": (LIGHTNING, "FullyShard()"),
    "Transformers": (TRANSFORMERS, "Synchronous()"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_killed_in_an_epoch_changes_no_bit_of_the_weights(case, tmp_path):
    (script, strategy), results = CASES[case], []
    for name, faults in [("undisturbed", []), ("killed", [(17, 1, KILL)])]:
        (tmp_path / name).mkdir()
        status, result, printed = run(script, tmp_path / name, faults, strategy)
        assert status == 0, printed
        results += result
    assert "rank 1 on " in restarts(printed)[0]
    assert "was killed by signal 9" in restarts(printed)[0]
    assert results == [results[0], results[0].replace(" 0 ", " 16 ", 1)]
