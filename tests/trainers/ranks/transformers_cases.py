"""Trainings with Transformers' Trainer, on N ranks or in one process with batches of N ranks.

``python transformers_cases.py N FILE`` runs all in one process.
"""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

BATCH, WORDS = 4, 64
CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
    "uneven last batch": {},
    "masked": {},
    "masked, accumulated": {"gradient_accumulation_steps": 3},
    "grouped by length": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 1},
    "LoRA": {},
    "SGD": {"optim": "sgd", "max_grad_norm": 0},
    "Llama": {},
    "own mean": {},
}


def model_of(case):
    torch.manual_seed(0)
    if case == "Llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads)).double()
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    if case == "LoRA":
        return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"])).double()
    return model


def samples(case, ranks):
    """Of training and evaluation; the last batches are shorter ones."""
    generator = torch.Generator().manual_seed(1)
    rows = 8 * ranks * BATCH + (ranks if case == "uneven last batch" else 0)
    words = torch.randint(0, WORDS, (rows + 21, 12), generator=generator)
    found = [{"input_ids": row, "labels": row.clone()} for row in words]
    for i, each in enumerate(found[:rows]):
        if case.startswith("masked"):
            each["labels"][12 - 9 * (i % 2) :] = -100
        if case == "grouped by length":
            found[i] = {key: value[: 4 + i % 8] for key, value in each.items()}
    return found[:rows], found[rows:]


def padded(rows):
    def together(key, filling):
        values = [row[key] for row in rows]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filling)

    return {"input_ids": together("input_ids", 0), "labels": together("labels", -100)}


def loss_in_float64(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count


def metrics(found):
    guesses, labels = found.predictions, found.label_ids
    in_order = int(labels[:, 0] @ range(len(labels)))
    return {"n": len(labels), "first": in_order, "right": int((guesses == labels).sum())}


def train(case, distribute, ranks, folder, batches=1, **options):
    """Train a case after ``distribute(trainer)``; ``batches`` of a rank are one batch."""
    model, (train_set, test_set) = model_of(case), samples(case, ranks)
    size = batches * BATCH
    arguments = {
        "max_grad_norm": 0.5, "num_train_epochs": 2, "learning_rate": 0.01, "logging_steps": 4,
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
        "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "per_device_train_batch_size": size, "per_device_eval_batch_size": size,
    }  # fmt: skip
    trainer = distribute(
        Trainer(
            model, TrainingArguments(str(folder), **(arguments | CASES[case] | options)),
            train_dataset=train_set, eval_dataset=test_set, data_collator=padded,
            compute_metrics=metrics,
            compute_loss_func=None if case == "own mean" else loss_in_float64,
            preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        )
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    told = ("loss", "grad_norm", "eval_loss", "eval_n", "eval_first", "eval_right", "learning_rate")
    history = [{k: v for k, v in each.items() if k in told} for each in trainer.state.log_history]
    return SimpleNamespace(model=model, trainer=trainer, history=history)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name in CASES:
        for together in (1, int(sys.argv[1])):
            done = train(name, lambda trainer: trainer, int(sys.argv[1]), "one", together)
            found[name, together] = {"weights": done.model.state_dict(), "history": done.history}
    torch.save(found, sys.argv[2])
