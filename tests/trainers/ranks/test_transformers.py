"""Transformers' Trainer on ranks trains, evaluates and saves as in one process."""

import copy

import pytest
import torch
import transformers_cases
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers_cases import BATCH, CASES, WORDS, train

import hvkit
from hvkit.integrations.ranks import whole_state


def same(found, wanted, tolerance=1e-12):
    weights = whole_state(found.model, found.trainer.accelerator._hvkit.trained)
    for name, value in wanted["weights"].items() if hvkit.is_main() else ():
        assert torch.allclose(weights[name], value, rtol=0, atol=tolerance), name
    for entry, expected in zip(found.history, wanted["history"], strict=True):
        # The order of groups of equal lengths depends on the batch size.
        grouped = found.trainer.args.train_sampling_strategy == "group_by_length"
        left_out = {"eval_first"} if grouped else set()
        shown = {key: value for key, value in expected.items() if key not in left_out}
        assert {key: entry[key] for key in shown} == pytest.approx(shown, rel=1e-5)


def run(case, folder, **options):
    return train(case, lambda trainer: hvkit.distribute(trainer, **options), hvkit.size(), folder)


@pytest.mark.parametrize("case", CASES)
def test_weights_logs_and_metrics_are_those_of_one_process(case, one_process, tmp_path, folder):
    wanted = one_process(transformers_cases)[case, hvkit.size()]
    # Transformers computes its own mean over tokens, and Llama's norms, in float32.
    rounded = case in ("own mean", "Llama")
    same(run(case, folder / case), wanted, tolerance=1e-5 if rounded else 1e-12)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("accumulation", {"strategy": hvkit.ShardedOptimizer()}),
        ("masked, accumulated", {"strategy": hvkit.FullyShard()}),
        ("LoRA", {"strategy": hvkit.ShardedOptimizer()}),
        ("plain", {"mesh": hvkit.Mesh(shard=hvkit.size())}),
    ],
    ids=str,
)
def test_strategies_give_the_weights_of_one_process(case, options, one_process, folder):
    found = run(case, folder / "strategies", **options)
    same(found, one_process(transformers_cases)[case, hvkit.size()])


@pytest.mark.parametrize("case", ["plain", "Llama"])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_mesh_gives_the_weights_of_one_process_with_one_batch(axis, case, one_process, folder):
    if hvkit.size() > 2:
        pytest.skip("two layers and heads are for two ranks")
    microbatches = {"microbatches": 2} if axis == "pipeline" else {}
    found = run(case, folder / axis, mesh=hvkit.Mesh(**{axis: 2}), **microbatches)
    same(found, one_process(transformers_cases)[case, 1], tolerance=1e-5)


def test_rounds_of_one_step_give_the_weights_of_one_process(one_process, folder):
    found = run("SGD", folder / "rounds", strategy=hvkit.LocalSGD(every=1))
    weights = whole_state(found.model, found.trainer.accelerator._hvkit.trained)
    wanted = one_process(transformers_cases)["SGD", hvkit.size()]["weights"]
    for name, value in wanted.items() if hvkit.is_main() else ():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.FullyShard()], ids=str)
def test_files_are_written_once_plain_and_resumed(strategy, folder, capfd):
    where = folder / f"files-{type(strategy).__name__}"
    run("plain", where, strategy=strategy)
    said = hvkit.allgather(capfd.readouterr().out)
    assert "eval_loss" in said[0]
    assert not any("loss" in each for each in said[1:])
    names = sorted(each.name for each in where.iterdir())
    assert names == ["checkpoint-16", "checkpoint-8"]
    saved = AutoModelForCausalLM.from_pretrained(where / "checkpoint-16").state_dict()

    def distributed(trainer):
        return hvkit.distribute(trainer, strategy=strategy)

    resumed = train(
        "plain", distributed, hvkit.size(), where,
        resume_from_checkpoint=str(where / "checkpoint-8"), load_best_model_at_end=False,
    )  # fmt: skip
    again = whole_state(resumed.model, resumed.trainer.accelerator._hvkit.trained)
    assert all(torch.equal(value, saved[name]) for name, value in again.items())


def test_a_trainer_is_distributed_once(folder):
    def twice(trainer):
        return hvkit.distribute(hvkit.distribute(trainer))

    with pytest.raises(ValueError, match=r"passed to hvkit\.distribute before"):
        train("plain", twice, hvkit.size(), folder / "twice")


def test_a_model_that_ignores_the_number_of_tokens_takes_the_step_of_one_process(folder):
    """Its loss is a mean over rows: Transformers multiplies it by the number of processes."""
    torch.set_default_dtype(torch.float32)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    generator = torch.manual_seed(2)
    model, rows = BertForSequenceClassification(config), BATCH * hvkit.size()
    words = torch.randint(0, WORDS, (rows, 6), generator=generator)
    data = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(words)]
    whole = copy.deepcopy(model)
    loss = whole(input_ids=words, labels=torch.arange(rows) % 2).loss
    loss.backward()
    torch.optim.SGD(whole.parameters(), 0.5).step()
    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=BATCH, optim="sgd", report_to=[],
        learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0, use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = hvkit.distribute(Trainer(model, arguments, train_dataset=data))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p, expected, rtol=0, atol=1e-6)


def test_all_of_a_stream_is_seen_once(folder):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            words = torch.arange(BATCH * hvkit.size() * 3)[:, None].expand(-1, 6) % WORDS
            return iter([{"input_ids": row, "labels": row} for row in words])

    seen = []

    def noted(rows):
        seen.extend(int(row["labels"][0]) for row in rows)
        return transformers_cases.padded(rows)

    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        transformers_cases.model_of("plain"), arguments, train_dataset=Stream(), data_collator=noted
    )
    hvkit.distribute(trainer).train()
    every = sorted(each for rank in hvkit.allgather(seen) for each in rank)
    assert every == list(range(BATCH * hvkit.size() * 3))


def test_ranks_evaluate_the_weights_of_rank_0_before_they_train(folder):
    model = transformers_cases.model_of("plain")
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1 + hvkit.rank())
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True)
    rows = transformers_cases.samples("plain", hvkit.size())[1]
    trainer = hvkit.distribute(
        Trainer(model, arguments, eval_dataset=rows, data_collator=transformers_cases.padded)
    )
    trainer.evaluate()
    weights = hvkit.allgather(model.transformer.wte.weight.detach())
    assert all(torch.equal(each, weights[0]) for each in weights)


def test_predictions_of_a_seq2seq_trainer_are_in_the_order_of_the_data(folder):
    """It gathers in a way of its own."""
    arguments = Seq2SeqTrainingArguments(
        str(folder), per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = hvkit.distribute(
        Seq2SeqTrainer(
            transformers_cases.model_of("plain"), arguments, data_collator=transformers_cases.padded
        )
    )
    rows = transformers_cases.samples("plain", hvkit.size())[1]
    labels = trainer.predict(rows).label_ids
    assert labels.tolist() == [row["labels"].tolist() for row in rows]
