"""PyTorch: what training scripts do, in a pipeline."""

import copy
import functools

import pytest
import torch
from cases import MORE
from mesh_models import GPT, SMALL, Encoder, Masked, PassesTwo, RecomputedGPT, Recurrent
from mesh_training import (
    apart,
    both,
    cross_entropy,
    difference,
    differences,
    distributed,
    tokens,
    train,
    vectors,
    whole_state,
)
from torch import nn

import hvkit

pytestmark = MORE

UNTIED = functools.partial(GPT, layers=4, tied=False)


def test_each_rank_holds_its_part():
    model, optimizer = distributed(SMALL())
    train(model, optimizer, tokens(1))
    mine = [p for p in model.parameters() if not p.is_meta]
    total = sum(p.numel() for p in model.parameters())
    assert 0.4 < sum(p.numel() for p in mine) / total < 0.65
    assert set(optimizer.state) == set(mine)


def layers_here_and_there(model):
    return model.wte, model.h[0], model.h[3].mlp


def first_stage(model):
    return model.wte, model.wpe, *model.h[:3]


@pytest.mark.parametrize(
    ("make", "frozen", "options"),
    [
        (UNTIED, layers_here_and_there, {}),
        (UNTIED, layers_here_and_there, {"schedule": "1F1B"}),
        (UNTIED, first_stage, {"stages": ["h.2"]}),
        (SMALL, lambda model: [model.wte], {}),  # its weight is tied
    ],
)
def test_frozen_layers(make, frozen, options):
    def freeze(model):
        for part in frozen(model):
            part.requires_grad_(False)

    assert max(differences(make, tokens(3), prepare=freeze, **options)) < 1e-11


def test_a_layer_that_is_unfrozen_later():
    def steps(model, optimizer, data):
        model.wpe.requires_grad_(False)
        train(model, optimizer, data[:2])
        model.wpe.requires_grad_(True)
        train(model, optimizer, data[2:])

    assert apart(steps, SMALL, tokens(4)) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_batches_of_other_sizes(schedule):
    sizes = [8, 7, 3, 8, 1]
    data = [(x[:rows], y[:rows]) for (x, y), rows in zip(tokens(5), sizes, strict=True)]
    assert max(differences(SMALL, data, schedule=schedule)) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_an_empty_batch_has_an_empty_result(schedule):
    model, _ = distributed(SMALL(), schedule=schedule)
    for rows in (4, 0, 0):
        assert model(tokens(1)[0][0][:rows]).shape == (rows, 16, 64)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_evaluation_first_and_between(schedule):
    evaluated = []

    def steps(model, optimizer, data):
        for x, y in data:
            with torch.no_grad():
                evaluated.append(model.eval()(x))
            train(model.train(), optimizer, [(x, y)])

    assert apart(steps, SMALL, tokens(3), schedule=schedule) < 1e-11
    assert torch.allclose(torch.cat(evaluated[:3]), torch.cat(evaluated[3:]), atol=1e-12)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_gradients_add_up_over_passes(schedule):
    def steps(model, optimizer, data):
        for step, (x, y) in enumerate(data):
            (cross_entropy(model(x), y) / 2).backward()
            if step % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    assert apart(steps, SMALL, tokens(4), accumulate=2, schedule=schedule) < 1e-11


@pytest.mark.parametrize(
    ("reentrant", "schedule"),
    [(False, "GPipe"), (False, "1F1B"), (False, "Interleaved1F1B"), (True, "1F1B")],
)
def test_gradient_checkpointing(reentrant, schedule):
    make = functools.partial(RecomputedGPT, reentrant, layers=4)
    assert max(differences(make, tokens(3), schedule=schedule)) < 1e-11


def test_compiled_blocks():
    def compile_blocks(model):
        for block in model.h:
            block.compile(backend="eager")

    make = functools.partial(GPT, layers=2)
    assert max(differences(make, tokens(2), prepare=compile_blocks)) < 1e-11


def test_recurrent_layers():
    """Their states begin as zeros of the type of a weight, which other stages do not have."""
    assert max(differences(Recurrent, tokens(3), stages=["between"])) < 1e-11


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("make", "data", "schedule"),
    [(SMALL, tokens(3), "GPipe"), (Encoder, vectors(3, shape=(6, 20)), "1F1B")],
)
def test_autocast(make, data, schedule):
    """Each gradient is compared: AdamW would hide the size of a wrong one."""
    reference = make().float()
    model = copy.deepcopy(reference)
    its = sgd(reference)
    model, own = distributed(model, sgd, schedule=schedule)
    for x, y in data:
        x = x if make is SMALL else x.float()
        for each, optimizer in ((reference, its), (model, own)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(each(x), y)
            loss.backward()
            optimizer.step()
        theirs = dict(reference.named_parameters())
        for name, p in model.named_parameters():
            if not p.is_meta:
                expected = theirs[name].grad
                assert float((p.grad - expected).norm() / expected.norm()) < 0.1, name
    assert 0 < difference(whole_state(model), reference.state_dict()) < 1e-2


def test_a_scaler_skips_a_step_on_all_ranks():
    scales = []

    def steps(model, optimizer, data):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(x), y)).backward()
            last = model.ln_f.weight
            if step == 2 and last.grad is not None:  # on one stage alone
                last.grad[0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    assert apart(steps, SMALL, tokens(4)) < 1e-11
    assert scales == [2.0**9] * 2


def test_bytes_between_stages():
    rows, length, width = 16, 16, 32
    model, own = distributed(SMALL())
    data = tokens(3, rows, length)
    train(model, own, data[:2])
    before = hvkit.traffic()["activations"].bytes
    x, y = data[2]
    cross_entropy(model(x), y).backward()
    sent = hvkit.traffic()["activations"].bytes - before
    cut, logits = rows * length * width * 8, rows * length * 64 * 8
    # The first stage sends results, the second gradients and the outputs of the model.
    assert sent == cut + hvkit.rank() * logits


class AddsNoise(nn.Sequential):
    """Takes the noise away at the end: all stages must have the same."""

    def __init__(self):
        super().__init__(*(nn.Linear(20, 20) for _ in range(4)))
        for layer in self:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        noise = torch.randn(x.shape)
        return super().forward(x + noise) - noise


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_noise_of_the_forward_is_the_same_on_all_stages(schedule):
    torch.manual_seed(hvkit.rank())
    model, _ = distributed(AddsNoise(), schedule=schedule)
    for x, _ in vectors(3):
        loss = (model(x) - x).square().mean()
        loss.backward()
        assert float(loss) < 1e-24


class Timed(PassesTwo):
    """Takes and returns values that are no tensors."""

    def forward(self, x, scale=1.0, hidden=False):
        h = super().forward(x) * scale
        return {"logits": h, "scale": scale, "hidden": h * 2 if hidden else None}


def test_values_that_are_no_tensors_may_change():
    def steps(model, optimizer, data):
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            scale = 1.0 + step % 3
            result = model(x, scale=scale, hidden=step % 2 == 1)
            assert result["scale"] == scale
            loss = cross_entropy(result["logits"] / scale, y)
            loss = loss if result["hidden"] is None else loss + result["hidden"].mean()
            loss.backward()
            optimizer.step()

    assert apart(steps, Timed, vectors(6)) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_an_input_that_is_as_long_as_the_batch_by_chance(schedule):
    matrix = torch.randn(10, 10)

    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x, matrix), y).backward()
            optimizer.step()

    data = [*vectors(2, 16), *vectors(2, 10), *vectors(2, 16)]
    assert apart(steps, Masked, data, schedule=schedule) < 1e-11


def test_the_total_norm_is_that_of_all_stages():
    (reference, _), (model, _) = both(SMALL)
    x, y = tokens(1)[0]
    norms = []
    for each in (reference, model):
        cross_entropy(each(x), y).backward()
        gradients = [p.grad for p in each.parameters() if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients))
    assert abs(norms[0] - norms[1]) < 1e-12


class WithAuxiliaryHead(GPT):
    """As Inception and GoogLeNet: a second head, in the middle, in training only.

    Args:
        after: which block it follows.
    """

    def __init__(self, after):
        super().__init__(layers=4)
        self.after = after
        self.auxiliary = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for number, block in enumerate(self.h):
            x = block(x)
            if number == self.after and self.training:
                auxiliary = self.auxiliary(x)
        logits = self.lm_head(self.ln_f(x))
        return logits + 0.3 * auxiliary if self.training else logits


@pytest.mark.parametrize(
    ("after", "evaluates_first", "options"),
    [
        (2, True, {}),
        (0, True, {}),
        (0, False, {}),
        (2, True, {"mesh": hvkit.Mesh(tensor=2), "microbatches": None}),
    ],
)
def test_a_head_that_only_training_uses(after, evaluates_first, options):
    """Before the place where FLOPs would have the model cut, after it, and along a tensor axis."""
    evaluated = []

    def steps(model, optimizer, data):
        for evaluate in (evaluates_first, True):
            if evaluate:
                with torch.no_grad():
                    evaluated.append(model.eval()(data[0][0]))
            train(model.train(), optimizer, data)

    make = functools.partial(WithAuxiliaryHead, after)
    assert apart(steps, make, tokens(2), **options) < 1e-11
    half = len(evaluated) // 2
    assert torch.allclose(torch.cat(evaluated[:half]), torch.cat(evaluated[half:]), atol=1e-11)
