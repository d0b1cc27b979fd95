"""PyTorch: losses in a pipeline, inside the model and outside, and when values are known."""

import functools
import math

import pytest
import torch
from cases import MORE
from mesh_models import GPT, SMALL, PassesTwo
from mesh_training import (
    both,
    cross_entropy,
    difference,
    differences,
    distributed,
    of_this_rank,
    parts,
    tokens,
    train,
    vectors,
    whole_state,
)
from ranks import error_of
from torch.nn import functional as F

import hvkit


def test_the_model_computes_its_loss_itself():
    (reference, its), (model, own) = both(SMALL)
    data = tokens(6)
    for x, y in data:
        for each, optimizer, batch in ((reference, its, (x, y)), (model, own, None)):
            optimizer.zero_grad()
            logits, loss = each(*(batch or of_this_rank([(x, y)])[0]))
            assert logits.shape[1:] == (16, 64)
            loss.backward()
            optimizer.step()
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


class WithPadding(GPT):
    """Its loss is a mean over some of the positions."""

    def forward(self, ids, targets):
        logits = super().forward(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def padded(steps=3):
    data = [(x, y.clone()) for x, y in tokens(steps)]
    for _, y in data:
        y[: len(y) // 3, 4:] = 0
    return data


@MORE
def test_a_loss_of_padded_samples_inside_the_model_is_refused():
    model, _ = distributed(WithPadding(layers=4))
    x, y = of_this_rank(padded())[0]
    with pytest.raises(ValueError, match="another result than for the whole batch"):
        model(x, y)


class OfTheWholeBatch(GPT):
    """Its logits depend on all samples; some are masked."""

    def forward(self, ids):
        logits = super().forward(ids)
        logits = logits - logits.mean(0)
        return logits.masked_fill(torch.arange(64) < 3, -math.inf)


@MORE
def test_outputs_with_infinities_are_compared_too():
    model, _ = distributed(OfTheWholeBatch(layers=4))
    x, _ = of_this_rank(tokens(1))[0]
    with pytest.raises(ValueError, match="another result than for the whole batch"):
        model(x)


@MORE
def test_a_loss_of_padded_samples_is_right_outside_of_the_model():
    if parts() > 1:
        pytest.skip("the mean over parts of the data is another one, as without a mesh")
    loss_of = functools.partial(cross_entropy_of_some)
    assert max(differences(SMALL, padded(), loss_of=loss_of)) < 1e-11


@MORE
def test_schedules_refuse_a_loss_that_is_no_mean_over_samples():
    model, own = distributed(SMALL(), schedule="1F1B")
    data = of_this_rank(padded())
    train(model, own, data[:1], cross_entropy_of_some)  # takes GPipe
    with pytest.raises(ValueError, match="must be a mean over samples"):
        train(model, own, data[1:2], cross_entropy_of_some)


def cross_entropy_of_some(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=0)


@MORE
def test_values_before_and_after_backward():
    (reference, _), (model, _) = both(SMALL, schedule="1F1B")
    for step, (x, y) in enumerate(tokens(6)):
        mine = of_this_rank([(x, y)])[0]
        total = {}
        for name, each, batch in (("alone", reference, mine), ("pipeline", model, mine)):
            each.zero_grad()
            logits = each(batch[0])
            loss = cross_entropy(logits, batch[1])
            correct = (logits.argmax(-1) == batch[1]).sum()
            running = loss.detach() * 0.5 + 1.0
            early = float(loss) if step == 3 else None  # takes GPipe
            loss.backward()
            total[name] = [float(loss), int(correct), float(running), early or 0.0]
        assert total["pipeline"] == pytest.approx(total["alone"], abs=1e-12)
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
def test_what_a_loss_may_do_with_deferred_outputs(loss_of):
    assert max(differences(PassesTwo, vectors(6), loss_of=loss_of, schedule="1F1B")) < 1e-11


@MORE
def test_evaluation_between_a_deferred_forward_and_its_backward():
    make = functools.partial(GPT, layers=4, dropout=0.3)
    found = []
    for look in (False, True):
        torch.manual_seed(0)
        model, own = distributed(make(), schedule="1F1B")
        for x, y in of_this_rank(tokens(4)):
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
    (reference, its), (model, own) = both(PassesTwo, schedule="1F1B")
    data = vectors(6)
    for (x, y), (v, z) in zip(data[::2], data[1::2], strict=True):
        first, second = of_this_rank([(x, y), (v, z)])
        for each, optimizer, one, two in (
            (reference, its, (x, y), (v, z)),
            (model, own, first, second),
        ):
            optimizer.zero_grad()
            (cross_entropy(each(one[0]), one[1]) + cross_entropy(each(two[0]), two[1])).backward()
            optimizer.step()
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


@MORE
@pytest.mark.parametrize("first", [2, 5])
def test_padding_that_begins_later_is_noticed(first):
    """Inside the model, and outside of it with a schedule of PyTorch's."""
    data = [(x, y.clone()) for x, y in tokens(8)]
    for _, y in data[first:]:
        y[: len(y) // 3, 4:] = -100
    data = of_this_rank(data)

    def loss_inside():
        model, own = distributed(GPT(layers=4))
        for x, y in data:
            _, loss = model(x, y)
            loss.backward()
            own.step()

    def loss_outside():
        model, own = distributed(GPT(layers=4), schedule="1F1B")
        train(model, own, data)

    kind, text = error_of(loss_inside)
    assert kind is ValueError
    assert "another result than for the whole batch" in text
    kind, text = error_of(loss_outside)
    assert kind is ValueError
    assert "must be a mean over samples" in text


@MORE
@pytest.mark.parametrize("options", [{}, {"schedule": "1F1B"}], ids=["GPipe", "1F1B"])
def test_a_mean_over_what_is_not_padded(options):
    def sums(logits, y):
        targets = y.flatten()
        total = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=0, reduction="sum")
        return total, (y != 0).sum()

    (reference, its), (model, own) = both(functools.partial(GPT, layers=4), **options)
    for (x, y), mine in zip(padded(), of_this_rank(padded()), strict=True):
        total, count = sums(reference(x), y)
        losses = total / count, hvkit.mean(*sums(model(mine[0]), mine[1]))
        for loss, optimizer in zip(losses, (its, own), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert abs(losses[0].item() - losses[1].item()) < 1e-12
    assert difference(whole_state(model), reference.state_dict()) < 1e-11
