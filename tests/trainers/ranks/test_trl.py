"""TRL's SFTTrainer with PEFT's adapters on ranks trains as in one process."""

import pytest
import torch
import trl_cases
from datasets import Dataset
from transformers_cases import model_of
from trl import SFTConfig, SFTTrainer
from trl_cases import CASES, tokenizer, train

import hvkit


@pytest.mark.parametrize("case", CASES)
def test_adapters_and_logs_are_those_of_one_process(case, one_process, folder):
    wanted = one_process(trl_cases)[case]
    found = train(case, hvkit.distribute, hvkit.size(), folder / case)
    assert found.weights.keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        # TRL computes the loss in float32.
        assert torch.allclose(found.weights[name], value, rtol=0, atol=1e-5), name
    for entry, expected in zip(found.history, wanted["history"], strict=True):
        assert entry == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_an_evaluation_is_the_mean_over_all_rows(folder):
    """The rows have equally many tokens, and the last step fewer rows on some ranks."""
    torch.set_default_dtype(torch.float64)
    words = torch.randint(3, 64, (2 * hvkit.size() + 1, 12), generator=torch.manual_seed(1))
    model = model_of("plain")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)  # so that rows have different losses
    wanted = model(input_ids=words, labels=words).loss.item()
    args = SFTConfig(
        str(folder), per_device_eval_batch_size=4, use_cpu=True, bf16=False, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": words.tolist()})
    trainer = SFTTrainer(
        model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer()
    )
    found = hvkit.distribute(trainer).evaluate()["eval_loss"]
    assert found == pytest.approx(wanted, rel=1e-5)
