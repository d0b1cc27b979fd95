"""What ranks of a divided model will hold and how long they wait: arithmetic, and optimizers."""

import pytest
import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel import memory_forecast as forecasts
from hvkit.frameworks.pytorch.model_parallel.memory_forecast import (
    Memory,
    ParameterBytes,
    RankForecast,
    bubble,
    forecast,
    kept_at_once,
    parameter_bytes,
    state_bytes,
    table,
    too_large,
)
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import (
    ModuleStages,
    dry_run,
    plan_stages,
)


def stages(rank_of, of_weight, saved, output_bytes):
    empty = {"cuts": (), "of_buffer": {}, "of_module": {}, "flops": (), "nbytes": ()}
    return ModuleStages(
        rank_of=rank_of, of_weight=of_weight, saved=saved, output_bytes=output_bytes, **empty
    )


@pytest.mark.parametrize(
    ("ranks", "per_rank", "microbatches", "share"),
    [(2, 1, 4, 1 / 5), (4, 1, 8, 3 / 11), (4, 2, 8, 3 / 19), (1, 1, 1, 0)],
)
def test_the_bubble(ranks, per_rank, microbatches, share):
    assert bubble(ranks, per_rank, microbatches) == pytest.approx(share)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "microbatches", "by_rank"),
    [
        ("GPipe", 1, 8, [8, 8, 8, 8]),
        ("1F1B", 1, 8, [4, 3, 2, 1]),
        ("1F1B", 1, 2, [2, 2, 2, 1]),
        ("Interleaved1F1B", 2, 8, [11, 9, 7, 5]),
        ("Interleaved1F1B", 2, 4, [8, 8, 7, 5]),
        ("LoopedBFS", 2, 8, [16, 16, 16, 16]),
        ("ZBVZeroBubble", 2, 8, [18, 18, 18, 18]),
    ],
)
def test_micro_batches_that_are_under_way_at_once(schedule, per_rank, microbatches, by_rank):
    found = [kept_at_once(schedule, 4, rank, per_rank, microbatches) for rank in range(4)]
    assert found == by_rank


def test_a_rank_holds_its_parameters_and_what_micro_batches_leave():
    found = forecast(
        stages((0, 1), {"first": (0,), "tied": (0, 1), "last": (1,)}, (100, 50), (10, 7)),
        {
            "first": ParameterBytes(1000, 1000, 2000),
            "tied": ParameterBytes(400, 400, 800),
            "last": ParameterBytes(30, 0, 0),
        },
        "GPipe",
        4,
    )
    # Outputs: those that are sent with their gradients; the whole result with its gradient.
    assert found[0] == RankForecast((0,), 1400, 1400, 2800, 400, 4 * 20 + 2 * 4 * 7)
    assert found[1] == RankForecast((1,), 430, 400, 800, 200, 4 * 7 + 2 * 4 * 7)
    assert found[0].total == 1400 + 1400 + 2800 + 400 + 136


def test_of_several_stages_the_largest_count_first():
    found = forecast(stages((0, 1, 0, 1), {}, (5, 3, 9, 7), (1, 1, 1, 1)), {}, "Interleaved1F1B", 2)
    # The first rank keeps all four, the second one three of its four.
    assert [each.activations for each in found] == [2 * 5 + 2 * 9, 2 * 7 + 3]


class LooksAtValues(torch.optim.Adam):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                assert float(p.grad.norm()) < 1e9
        super().step(closure)


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AMSGrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "several tensors at once": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "looks at values": LooksAtValues,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_what_a_step_makes(name):
    held = [nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(7))]
    optimizer = OPTIMIZERS[name](held)
    before = torch.get_rng_state()
    found = state_bytes(optimizer, {p: p.shape for p in held})
    assert not any(len(state.get("exp_avg", [])) for state in optimizer.state.values())
    assert torch.equal(torch.get_rng_state(), before)
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in held:
        state = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        assert found[p] == sum(t.nbytes for t in state)


def test_the_state_of_an_optimizer_that_needs_a_closure_is_taken_to_be_that_of_adam():
    held = [nn.Parameter(torch.randn(60, 80))]
    found = state_bytes(torch.optim.LBFGS(held), {p: p.shape for p in held})
    assert found[held[0]] == 2 * held[0].nbytes


def test_parts_of_parameters_and_frozen_ones():
    model = nn.Linear(6, 4)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shapes = {model.weight: (2, 6), model.bias: model.bias.shape}
    found = parameter_bytes(model, [optimizer], shapes)
    assert found == {"weight": ParameterBytes(48, 48, 48), "bias": ParameterBytes(16, 0, 0)}


def test_activations_that_both_sides_of_a_cut_keep_count_on_both():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    found = dry_run(model, (x,), {}, torch.device("cpu"))
    cut = plan_stages(model, found, (0, 1), ["1"])
    # Stage 0 keeps its input and what tanh gives, which is also the input of stage 1.
    assert cut.saved == (5 * 4 * 4 + 5 * 8 * 4, 5 * 8 * 4)
    assert cut.output_bytes == (5 * 8 * 4, 5 * 2 * 4)


def test_ranks_on_one_gpu_share_it():
    found = [Memory(1, 80), Memory(1, 70), Memory(2, 60)]
    assert forecasts.divided_memory(found) == [Memory(1, 40), Memory(1, 35), Memory(2, 60)]


RANKS = [RankForecast((0,), 412_000_000, 412_000_000, 824_000_000, 96_000_000, 0)] * 2


def test_a_line_for_each_rank_of_different_stages():
    memories = [Memory(1, 24_000_000_000)] * 2
    sums = "412 MB weights + 412 gradients + 824 AdamW + 96 activations = 1.74 GB of 24 GB"
    lines = [f"stage 0 on rank {rank}: {sums}" for rank in range(2)]
    assert table(RANKS, memories, (0, 1), "AdamW") == "\n    ".join(lines)
    found = RankForecast((0,), 2_020_400_000, 20_240_000, 0, 412, 0).described("SGD")
    assert found == "2020 MB weights + 20.2 gradients + 0.000412 activations = 2.04 GB"


def test_ranks_that_divide_layers_share_a_line():
    memories = [Memory(1, size * 1_000_000_000) for size in (24, 24, 24, 12)]
    first, second = table(RANKS, memories, (4, 5, 6, 7), "AdamW").splitlines()
    assert first.startswith("stage 0 on ranks 4-5: ")
    assert first.endswith(" of 24 GB")
    assert second.endswith(" of 12 GB")


@pytest.mark.parametrize(
    ("places", "sizes", "warned"),
    [
        ((1, 1), (2.0, 2.0), ""),
        # One host has enough for both, although not in equal shares.
        ((1, 1), (1.0, 3.0), ""),
        ((1, 2), (1.0, 3.0), "rank 4 needs 1.74 GB, but there are 1 GB"),
        ((1, 1), (1.5, 1.5), "ranks 4-5 needs 3.49 GB, but there are 3 GB"),
    ],
)
def test_ranks_that_do_not_fit_into_memory_are_named(places, sizes, warned):
    memories = [Memory(p, int(s * 1e9)) for p, s in zip(places, sizes, strict=True)]
    found = too_large(RANKS, memories, (4, 5))
    assert warned in found
    assert bool(found) == bool(warned)


def test_ranks_of_a_host_share_what_is_free(monkeypatch):
    monkeypatch.setattr(forecasts, "free_memory", lambda: 1000)
    monkeypatch.setattr(forecasts.runtime, "local_size", lambda: 4)
    model = nn.Linear(2, 3)
    assert forecasts.memory_of_rank(torch.device("cpu"), model).nbytes == 250 + 4 * 9
    meta = nn.Linear(2, 3, device="meta")
    assert forecasts.memory_of_rank(torch.device("cpu"), meta).nbytes == 250
