"""PyTorch: what training scripts do, in a pipeline."""

import copy
import functools

import pytest
import torch
from cases import MORE
from mesh_models import CNN, GPT, SMALL, Encoder, Masked, PassesTwo, Recurrent
from mesh_training import (
    InMicroBatches,
    adamw,
    both,
    cross_entropy,
    difference,
    differences,
    distributed,
    images,
    of_this_rank,
    parts,
    tokens,
    train,
    vectors,
    whole_state,
    with_gradients,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvkit

pytestmark = MORE


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def test_each_rank_holds_its_part():
    model, optimizer = distributed(SMALL())
    train(model, optimizer, of_this_rank(tokens(1)))
    mine = [p for p in model.parameters() if not p.is_meta]
    total = sum(p.numel() for p in model.parameters())
    assert 0.4 < sum(p.numel() for p in mine) / total < 0.65
    assert set(optimizer.state) == set(mine)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_frozen_layers(schedule):
    def freeze(model):
        model.wte.requires_grad_(False)
        model.h[0].requires_grad_(False)
        model.h[3].mlp.requires_grad_(False)

    make = functools.partial(GPT, layers=4, tied=False)
    found = differences(make, tokens(), prepare=freeze, schedule=schedule)
    assert max(found) < 1e-11


def test_a_frozen_first_stage():
    def freeze(model):
        for part in (model.wte, model.wpe, *model.h[:3]):
            part.requires_grad_(False)

    make = functools.partial(GPT, layers=4, tied=False)
    assert max(differences(make, tokens(), prepare=freeze, stages=["h.2"])) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_batches_of_other_sizes(schedule):
    data = [
        (x[: rows * parts()], y[: rows * parts()])
        for (x, y), rows in zip(tokens(8), [8, 8, 7, 3, 8, 1, 2, 8], strict=True)
    ]
    assert max(differences(SMALL, data, schedule=schedule)) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_evaluation_first_and_between(schedule):
    (reference, its), (model, own) = both(SMALL, schedule=schedule)
    data = tokens(4)
    for x, y in data:
        for each in (reference, model):
            each.eval()
        mine = of_this_rank([(x, y)])[0]
        with torch.no_grad():
            expected, found = reference(mine[0]), model(mine[0])
        assert float((found - expected).abs().max()) < 1e-13
        for each in (reference, model):
            each.train()
        train(reference, its, [(x, y)])
        train(model, own, [mine])
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_batch_norm_of_micro_batches():
    if parts() > 1:
        return
    (reference, its), (model, own) = both(CNN)
    data = images(6)
    train(InMicroBatches(reference), its, data)
    train(model, own, of_this_rank(data))
    assert difference(whole_state(model), reference.state_dict()) < 1e-11
    reference.eval()
    model.eval()
    with torch.no_grad():
        assert float((model(data[0][0]) - reference(data[0][0])).abs().max()) < 1e-11


def test_gradients_add_up_over_passes():
    for schedule in ("GPipe", "1F1B"):
        (reference, its), (model, own) = both(SMALL, accumulate=2, schedule=schedule)
        data = tokens(8)
        for each, optimizer, batches in ((reference, its, data), (model, own, of_this_rank(data))):
            for step, (x, y) in enumerate(batches):
                (cross_entropy(each(x), y) / 2).backward()
                if step % 2:
                    nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        assert difference(whole_state(model), reference.state_dict()) < 1e-11


class WithCheckpoints(GPT):
    """Computes its blocks a second time in backward, instead of keeping what they compute."""

    reentrant = False

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.lm_head(self.ln_f(x))


class WithReentrantCheckpoints(WithCheckpoints):
    """PyTorch hides what is inside of its blocks, so it can be cut around all of them only."""

    reentrant = True


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("kind", [WithCheckpoints, WithReentrantCheckpoints])
def test_gradient_checkpointing(kind, schedule):
    make = functools.partial(kind, layers=4)
    assert max(differences(make, tokens(6), schedule=schedule)) < 1e-11


def test_compiled_blocks():
    def make():
        model = SMALL()
        for block in model.h:
            block.compile(backend="eager")
        return model

    model = make()
    reference = SMALL()
    reference.load_state_dict(model.state_dict())
    its = adamw(reference)
    model, own = distributed(model)
    data = tokens(3)
    train(reference, its, data)
    train(model, own, of_this_rank(data))
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_recurrent_layers():
    """Their states begin as zeros of the type of a weight, which other stages do not have."""
    assert max(differences(Recurrent, tokens(6), stages=["between"])) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("make", [SMALL, Encoder])
def test_autocast(make, schedule):
    """Each gradient is compared: AdamW would hide the size of a wrong one."""
    reference = make().float()
    model = copy.deepcopy(reference)
    its = sgd(reference)
    model, own = distributed(model, sgd, schedule=schedule)
    data = tokens(4) if make is SMALL else [(x.float(), y) for x, y in vectors(4, shape=(6, 20))]
    for (x, y), mine in zip(data, of_this_rank(data), strict=True):
        for each, optimizer, batch in ((reference, its, (x, y)), (model, own, mine)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(each(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
        theirs = dict(reference.named_parameters())
        for name, p in model.named_parameters():
            if not p.is_meta:
                expected = theirs[name].grad
                assert float((p.grad - expected).norm() / expected.norm()) < 0.1, name
    assert 0 < difference(whole_state(model), reference.state_dict()) < 1e-2


def test_a_scaler_skips_a_step_on_all_ranks():
    (reference, its), (model, own) = both(SMALL)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    data = tokens(4)
    for each, optimizer, scaler, batches in (
        (reference, its, scalers[0], data),
        (model, own, scalers[1], of_this_rank(data)),
    ):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(each(x), y)).backward()
            last = each.ln_f.weight
            if step == 2 and last.grad is not None:  # on one stage alone
                last.grad[0] = float("inf")
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_dropout_trains():
    model, own = distributed(functools.partial(GPT, layers=4, dropout=0.1)())
    data = of_this_rank(tokens(1)) * 30
    losses = [loss for loss, _ in train(model, own, data)]
    assert losses[-1] < losses[0]


def test_bytes_between_stages():
    rows, length, width = 16 // parts(), 16, 32
    model, own = distributed(SMALL())
    data = of_this_rank(tokens(3))
    train(model, own, data[:2])
    before = hvkit.traffic()["activations"].bytes
    x, y = data[2]
    outputs = model(x)
    cross_entropy(outputs, y).backward()
    sent = hvkit.traffic()["activations"].bytes - before
    cut = rows * length * width * 8
    logits = rows * length * 64 * 8
    # The first stage sends results, the second gradients and the outputs of the model.
    assert sent == cut + (hvkit.rank() % 2) * logits


class Denoiser(PassesTwo):
    """Predicts the noise that it has added: all stages must have the same."""

    def forward(self, x):
        noise = torch.randn(x.shape)
        h = super().forward(x + noise)
        return ((h - noise[:, :10]) ** 2).mean(1)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_noise_of_the_forward_is_the_same_on_all_stages(schedule):
    torch.manual_seed(hvkit.rank())
    model, own = distributed(
        Denoiser(), lambda m: torch.optim.Adam(m.parameters(), 1e-2), schedule=schedule
    )
    x = of_this_rank(vectors(1))[0][0]
    losses = []
    for _ in range(60):
        own.zero_grad()
        loss = model(x).mean()
        loss.backward()
        own.step()
        losses.append(float(loss))
    # Other noise on the last stage would leave a loss of one.
    assert losses[-1] < 0.6


class Timed(PassesTwo):
    """Takes and returns values that are no tensors."""

    def forward(self, x, scale=1.0, hidden=False):
        h = super().forward(x) * scale
        return {"logits": h, "scale": scale, "hidden": h * 2 if hidden else None}


def test_values_that_are_no_tensors_may_change():
    (reference, its), (model, own) = both(Timed)
    for step, (x, y) in enumerate(vectors(6)):
        mine = of_this_rank([(x, y)])[0]
        named = {"scale": 1.0 + step % 3, "hidden": step % 2 == 1}
        for each, optimizer, batch in ((reference, its, (x, y)), (model, own, mine)):
            optimizer.zero_grad()
            result = each(batch[0], **named)
            assert result["scale"] == named["scale"]
            loss = cross_entropy(result["logits"] / result["scale"], batch[1])
            loss = loss if result["hidden"] is None else loss + result["hidden"].mean()
            loss.backward()
            optimizer.step()
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_a_frozen_tied_weight_stays():
    def freeze(model):
        model.wte.weight.requires_grad_(False)

    assert max(differences(SMALL, tokens(6), prepare=freeze)) < 1e-11


class CheckpointedParts(nn.Module):
    """Checkpoints around more than one module, with places to cut inside."""

    def __init__(self, width=20):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(4)
        )

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_checkpoints_with_places_to_cut_inside(schedule):
    assert max(differences(CheckpointedParts, vectors(6), schedule=schedule)) < 1e-11


def test_a_layer_that_is_unfrozen_later():
    (reference, its), (model, own) = both(SMALL)
    data = tokens(6)
    for each, optimizer, batches in ((reference, its, data), (model, own, of_this_rank(data))):
        each.wpe.requires_grad_(False)
        train(each, optimizer, batches[:3])
        each.wpe.requires_grad_(True)
        train(each, optimizer, batches[3:])
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_an_input_that_is_as_long_as_the_batch_by_chance(schedule):
    (reference, its), (model, own) = both(Masked, schedule=schedule)
    matrix = torch.randn(10, 10)
    for rows in (16, 10 * parts(), 16):
        for x, y in vectors(2, rows):
            mine = of_this_rank([(x, y)])[0]
            for each, optimizer, batch in ((reference, its, (x, y)), (model, own, mine)):
                optimizer.zero_grad()
                cross_entropy(each(batch[0], matrix), batch[1]).backward()
                optimizer.step()
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


class Transposes(PassesTwo):
    """Passes on a tensor that is not contiguous."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, both):
            return self.linear(both[0]).t().clone().t(), both[1]


def test_tensors_that_are_not_contiguous():
    assert max(differences(Transposes, vectors(4), schedule="1F1B")) < 1e-11


class Remembers(PassesTwo):
    """Its own buffer is changed at the end of forward, and another at the beginning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first_mean", torch.zeros(()))
        self.register_buffer("last_mean", torch.zeros(10))

    def forward(self, x):
        self.first_mean.mul_(0.5).add_(x.mean())
        result = super().forward(x)
        self.last_mean.mul_(0.5).add_(result.detach().mean(0))
        return result


def test_buffers_are_those_of_the_stage_that_changes_them():
    if parts() > 1:
        pytest.skip("statistics of several parts differ")
    (reference, its), (model, own) = both(Remembers)
    data = vectors(5)
    train(InMicroBatches(reference), its, data)
    train(model, own, data)
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_the_total_norm_is_that_of_all_stages():
    (reference, _), (model, _) = both(SMALL)
    x, y = tokens(1)[0]
    cross_entropy(reference(x), y).backward()
    x, y = of_this_rank([(x, y)])[0]
    cross_entropy(model(x), y).backward()
    norms = [
        nn.utils.get_total_norm([p.grad for p in each.parameters() if p.grad is not None])
        for each in (reference, model)
    ]
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
    one, (model, optimizer) = both(functools.partial(WithAuxiliaryHead, after), **options)
    data = tokens(6)

    def evaluate(model):
        with torch.no_grad():
            found = model.eval()(of_this_rank(data)[0][0])
        model.train()
        return found

    if evaluates_first:
        assert float((evaluate(model) - evaluate(one[0])).abs().max()) < 1e-11
    train(model, optimizer, of_this_rank(data))
    train(*one, data)
    assert float((evaluate(model) - evaluate(one[0])).abs().max()) < 1e-11
    counted = with_gradients(*one)
    assert difference(whole_state(model), one[0].state_dict(), counted) < 1e-11
