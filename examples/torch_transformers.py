"""A small GPT-2 with Transformers' Trainer, on generated tokens: training and evaluation."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import hvkit  # added

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--save", help="file for the trained weights")
args = parser.parse_args()


class Counting(Dataset):
    """Sequences that count upwards from a random token in steps of 1 to 3."""

    def __init__(self, sequences):
        start, step = torch.randint(0, 32, (sequences, 1)), torch.randint(1, 4, (sequences, 1))
        self.tokens = (start + step * torch.arange(16)) % 32

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


set_seed(args.seed)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
)  # fmt: skip
trainer = Trainer(
    model,
    TrainingArguments(
        "runs/gpt2",
        use_cpu=True,
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        optim="sgd",
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    ),
    train_dataset=Counting(1440),
    eval_dataset=Counting(101),
)
trainer = hvkit.distribute(trainer)  # added
trainer.train()
loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"loss of all {len(trainer.eval_dataset)} sequences {loss:.4f}")
    if args.save:
        torch.save(model.state_dict(), args.save)
