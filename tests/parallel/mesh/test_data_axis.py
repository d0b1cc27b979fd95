"""PyTorch: pipelines beside each other are kept in step by a strategy, as single ranks are."""

import copy

import pytest
import torch
from cases import MORE
from mesh_models import SMALL
from mesh_training import (
    adamw,
    cross_entropy,
    difference,
    distributed,
    of_this_rank,
    tokens,
    train,
    whole_state,
)
from ranks import same_on_all_ranks
from torch import nn

import hvkit
from hvkit.mesh import divide

pytestmark = [MORE, pytest.mark.skipif(hvkit.size() < 4, reason="two pipelines are four ranks")]


def by_hand(start, data, strategy):
    """The weights that DiLoCo of two processes agrees on, by name."""
    models = [copy.deepcopy(start) for _ in range(2)]
    optimizers = list(map(adamw, models))
    anchor = {n: p.detach().clone() for n, p in start.named_parameters()}
    velocity = {n: torch.zeros_like(p) for n, p in anchor.items()}
    for step, (x, y) in enumerate(data, 1):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            cross_entropy(model(x[number::2]), y[number::2]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step % strategy.every == 0:
            for n, a in anchor.items():
                change = torch.stack([a - dict(m.named_parameters())[n] for m in models]).mean(0)
                change = change.detach()
                velocity[n] = strategy.outer_momentum * velocity[n] + change
                a -= strategy.outer_lr * (change + strategy.outer_momentum * velocity[n])
                with torch.no_grad():
                    for model in models:
                        dict(model.named_parameters())[n].copy_(a)
    return anchor


def test_stages_that_share_a_weight_find_each_other_after_others_have():
    """The first and the last of four have made a group that the others have not."""
    for stages in (4, 2):
        model, optimizer = distributed(SMALL(), mesh=hvkit.Mesh(pipeline=stages))
        train(model, optimizer, of_this_rank(tokens(1), stages))


def test_diloco_between_pipelines():
    strategy = hvkit.DiLoCo(every=4)
    start, data = SMALL(), tokens(8)
    expected = by_hand(start, data, strategy)
    model, optimizer = distributed(start, strategy=strategy)
    train(model, optimizer, of_this_rank(data))
    assert difference(whole_state(model), expected) < 1e-9


def sgd(model):
    """Adam would make much of rounding where a gradient is zero."""
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_compressed_gradients_are_those_of_two_ranks(compression):
    torch.set_default_dtype(torch.float32)
    start, data = SMALL(), of_this_rank(tokens(6))
    # Two ranks without a pipeline, twice beside each other.
    alone = copy.deepcopy(start)
    its = sgd(alone)
    group = divide([(0, 2), (1, 3)], "torch")
    alone, its = hvkit.distribute(alone, its, compression=compression, _group=group)
    train(alone, its, data)
    model, optimizer = distributed(start, sgd, compression=compression)
    before = hvkit.traffic()["gradients"].bytes
    train(model, optimizer, data)
    sent = hvkit.traffic()["gradients"].bytes - before
    found = difference(whole_state(model), alone.state_dict())
    assert found < (1e-5 if compression == "none" else 3e-3)
    size = 6 * sum(p.nbytes for p in model.parameters() if not p.is_meta)
    shared = 2 * 6 * model.wte.weight.nbytes // 2  # of both stages
    if compression != "none" and hvkit.rank() % 2 == 0:  # as the first stage has rounded it
        shared += 6 * model.wte.weight.nbytes
    share = {"none": 1, "int8": 1 / 4}[compression]
    assert sent == pytest.approx(size * share + shared, rel=0.1)


@pytest.mark.parametrize("compression", ["int8", hvkit.TopK(ratio=0.1)], ids=str)
def test_tied_weights_of_two_stages_stay_equal_with_compressed_gradients(compression):
    """Each stage compresses its own, among other gradients."""
    torch.set_default_dtype(torch.float32)
    model, optimizer = distributed(SMALL(), compression=compression)
    train(model, optimizer, of_this_rank(tokens(6)))
    assert same_on_all_ranks([model.lm_head.weight.detach().numpy()])


def test_tied_weights_of_two_stages_are_refused_with_compressed_weights():
    model, _ = distributed(SMALL(), strategy=hvkit.DiLoCo(every=4), compression="int8")
    with pytest.raises(ValueError, match=r"stages 0 and 1 of the pipeline use wte\.weight"):
        model(of_this_rank(tokens(1))[0][0])


def test_accumulated_gradients_travel_once():
    model, optimizer = distributed(SMALL(), accumulate=2)
    data = of_this_rank(tokens(4))
    for x, y in data[:2]:
        cross_entropy(model(x), y).backward()
    optimizer.step()
    sent = []
    for x, y in data[2:]:
        before = hvkit.traffic()["gradients"].messages
        cross_entropy(model(x), y).backward()
        sent.append(hvkit.traffic()["gradients"].messages - before)
    # One message is about the weight that both stages use.
    assert sent[0] == 1
    assert sent[1] > 1


def test_the_global_batch_scales_the_rate():
    start, data = SMALL(), tokens(3)
    reference = copy.deepcopy(start)
    train(reference, torch.optim.SGD(reference.parameters(), 0.2), data)
    model, own = distributed(start, sgd, lr_scaling="linear")
    train(model, own, of_this_rank(data))
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_shard_gives_a_pipeline_the_same_batches():
    mesh = hvkit.Mesh(pipeline=2)
    rows = torch.arange(32)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    part = hvkit.shard(loader, seed=3, mesh=mesh)
    mine = torch.cat(list(part)).tolist()
    everyone = hvkit.allgather(mine)
    assert everyone[0] == everyone[1]
    assert everyone[2] == everyone[3]
    assert sorted(everyone[0] + everyone[2]) == rows.tolist()
