"""Fine-tuning with TRL and PEFT, on N ranks or in one process with batches of N ranks.

``python trl_cases.py N FILE`` runs all in one process.
"""

import random
import sys
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers_cases import BATCH, WORDS, model_of
from trl import SFTConfig, SFTTrainer

CASES = {
    "texts": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
    "completions": {"gradient_accumulation_steps": 2},
    "packed": {"packing": True, "dataloader_drop_last": True},
}


def tokenizer():
    words = ["<pad>", "<unk>", "<eos>", *(f"w{i}" for i in range(3, WORDS))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def samples(case, ranks):
    """Texts of 2 to 14 words; of completions, whose tokens alone count, another part each."""
    source = random.Random(1)
    rows = [
        [f"w{source.randint(3, WORDS - 1)}" for _ in range(source.randint(2, 14))]
        for _ in range(8 * ranks * BATCH)
    ]
    if case != "completions":
        return Dataset.from_dict({"text": [" ".join(row) for row in rows]})
    ends = [source.randint(1, len(row) - 1) for row in rows]
    parts = [(row[:end], [" ", *row[end:]]) for row, end in zip(rows, ends, strict=True)]
    names = ("prompt", "completion")
    return Dataset.from_list([dict(zip(names, map(" ".join, part), strict=True)) for part in parts])


def train(case, distribute, ranks, folder, batches=1):
    """Train a case after ``distribute(trainer)``; ``batches`` of a rank are one batch."""
    torch.set_default_dtype(torch.float64)
    size = batches * BATCH
    arguments = {
        "num_train_epochs": 2, "learning_rate": 0.01, "logging_steps": 2, "max_length": 16,
        "save_strategy": "no", "use_cpu": True, "bf16": False,
        "report_to": [], "disable_tqdm": True, "seed": 1,
        "per_device_train_batch_size": size,
    }  # fmt: skip
    trainer = distribute(
        SFTTrainer(
            model_of("plain"), SFTConfig(str(folder), **(arguments | CASES[case])),
            train_dataset=samples(case, ranks), processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"),
        )
    )  # fmt: skip
    trainer.train()
    told = ("loss", "grad_norm", "num_tokens")
    history = [{k: v for k, v in each.items() if k in told} for each in trainer.state.log_history]
    weights = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return SimpleNamespace(weights=weights, history=history)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name in CASES:
        done = train(name, lambda trainer: trainer, int(sys.argv[1]), "one", int(sys.argv[1]))
        found[name] = {"weights": done.weights, "history": done.history}
    torch.save(found, sys.argv[2])
