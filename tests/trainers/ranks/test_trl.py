"""TRL's SFTTrainer with PEFT's adapters on ranks trains as in one process."""

import pytest
import torch
import trl_cases
from trl_cases import CASES, train

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
