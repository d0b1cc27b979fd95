"""PyTorch: losses in a pipeline, inside the model and outside, and when values are known."""

import math

import pytest
import torch
from cases import MORE
from mesh_models import GPT, SMALL, PassesTwo
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
from ranks import error_of
from torch.nn import functional as F

import hvkit


def test_the_model_computes_its_loss_itself():
    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            logits, loss = model(x, y)
            assert logits.shape == (16, 16, 64)
            loss.backward()
            optimizer.step()

    assert apart(steps, SMALL, tokens(3)) < 1e-11


def padded(steps=3, first=0, ignored=0):
    """Batches of which a third has padding, from one of them on."""
    data = [(x, y.clone()) for x, y in tokens(steps)]
    for _, y in data[first:]:
        y[: len(y) // 3, 4:] = ignored
    return data


def cross_entropy_of_some(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=0)


class WithPadding(GPT):
    """Its loss is a mean over some of the positions."""

    def forward(self, ids, targets):
        return cross_entropy_of_some(super().forward(ids), targets)


class OfTheWholeBatch(GPT):
    """Its logits depend on all samples; some are infinite."""

    def forward(self, ids, _):
        logits = super().forward(ids)
        logits = logits - logits.mean(0)
        return logits.masked_fill(torch.arange(64) < 3, -math.inf)


@MORE
@pytest.mark.parametrize("kind", [WithPadding, OfTheWholeBatch])
def test_a_result_of_micro_batches_that_is_another_one_is_refused(kind):
    model, _ = distributed(kind(layers=4))
    with pytest.raises(ValueError, match="another result than for the whole batch"):
        model(*padded()[0])


@MORE
def test_a_loss_of_padded_samples_is_right_outside_of_the_model():
    assert max(differences(SMALL, padded(), loss_of=cross_entropy_of_some)) < 1e-11


@MORE
@pytest.mark.parametrize("first", [1, 4])
def test_padding_that_begins_later_is_noticed(first):
    """Inside the model, and outside of it with a schedule of PyTorch's; which begins as GPipe."""
    data = padded(first + 2, first, ignored=-100)

    def loss_inside():
        model, own = distributed(GPT(layers=4))
        for x, y in data:
            _, loss = model(x, y)
            loss.backward()
            own.step()

    for loss, words in (
        (loss_inside, "another result than for the whole batch"),
        (lambda: train(*distributed(SMALL(), schedule="1F1B"), data), "must be a mean over sample"),
    ):
        kind, text = error_of(loss)
        assert kind is ValueError
        assert words in text


@MORE
def test_values_before_and_after_backward():
    models = [each[0] for each in both(SMALL, schedule="1F1B")]
    for step, (x, y) in enumerate(tokens(5)):
        found = []
        for model in models:
            model.zero_grad()
            logits = model(x)
            loss = cross_entropy(logits, y)
            correct = (logits.argmax(-1) == y).sum()
            running = loss.detach() * 0.5 + 1.0
            early = float(loss) if step == 3 else None  # takes GPipe
            loss.backward()
            found.append([float(loss), int(correct), float(running), early or 0.0])
        assert found[1] == pytest.approx(found[0], abs=1e-12)
        if 0 < step != 3:
            with pytest.raises(ValueError, match="was not kept"):
                logits.max(-1).values.tolist()


def in_place(outputs, y):
    outputs[:, 4] = -1e3
    return F.cross_entropy(outputs, y % 4)


def without_gradient(outputs, y):
    with torch.no_grad():
        weights = outputs.softmax(1).max(1).values
    return (F.cross_entropy(outputs, y, reduction="none") * weights).mean()


@MORE
@pytest.mark.parametrize("loss_of", [in_place, without_gradient])
def test_a_loss_may_change_deferred_outputs_in_place_or_without_gradients(loss_of):
    assert max(differences(PassesTwo, vectors(4), loss_of=loss_of, schedule="1F1B")) < 1e-11


@MORE
def test_evaluation_between_a_deferred_forward_and_its_backward():
    found = []
    for look in (False, True):
        torch.manual_seed(0)
        model, own = distributed(GPT(layers=4, dropout=0.3), schedule="1F1B")
        for x, y in tokens(3):
            own.zero_grad()
            loss = cross_entropy(model(x), y)
            if look:
                model.eval()
            (loss * 2).backward(torch.tensor(0.5))
            model.train()
            own.step()
        found.append(whole_state(model))
    assert difference(found[0], found[1]) == 0.0


@MORE
def test_two_forward_passes_before_one_backward():
    def steps(model, optimizer, data):
        for (x, y), (v, z) in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + cross_entropy(model(v), z)).backward()
            optimizer.step()

    assert apart(steps, PassesTwo, vectors(6), schedule="1F1B") < 1e-11


@MORE
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_mean_over_what_is_not_padded(schedule):
    losses, means = [], iter((torch.div, hvkit.mean))

    def steps(model, optimizer, data):
        mean = next(means)
        for x, y in data:
            logits, targets = model(x).flatten(0, 1), y.flatten()
            total = F.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
            loss = mean(total, (y != 0).sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    assert apart(steps, SMALL, padded(), schedule=schedule) < 1e-11
    assert losses[:3] == pytest.approx(losses[3:], abs=1e-12)
