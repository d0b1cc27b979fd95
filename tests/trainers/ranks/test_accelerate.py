"""Accelerate on ranks trains and gathers as in one process."""

import accelerate_cases
import pytest
import torch
from accelerate import Accelerator
from accelerate_cases import train

import hvkit
from hvkit.integrations.ranks import whole_state


@pytest.mark.parametrize(
    "strategy", [hvkit.Synchronous(), hvkit.ShardedOptimizer(), hvkit.FullyShard()], ids=str
)
def test_weights_and_gathered_predictions_are_those_of_one_process(strategy, one_process):
    model, accelerator, gathered = train(
        lambda each: hvkit.distribute(each, strategy=strategy), hvkit.size()
    )
    assert (accelerator.process_index, accelerator.num_processes) == (hvkit.rank(), hvkit.size())
    wanted = one_process(accelerate_cases)
    weights = whole_state(model, accelerator._hvkit.trained)
    for name, value in wanted["weights"].items() if hvkit.is_main() else ():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-13), name
    assert all(map(torch.equal, gathered, wanted["gathered"]))


def test_a_saved_state_is_loaded_again(folder):
    model, accelerator, _ = train(hvkit.distribute, hvkit.size())
    accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()
    wanted = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(folder / "state")
    assert torch.equal(model[0].weight, wanted)


def test_a_state_saved_in_an_epoch_goes_on_to_the_same_bits(folder):
    wanted, _, _ = train(hvkit.distribute, hvkit.size(), save=folder / "in an epoch")
    hvkit.barrier()
    found, _, _ = train(hvkit.distribute, hvkit.size(), load=folder / "in an epoch")
    assert all(map(torch.equal, found.parameters(), wanted.parameters()))


def test_a_state_that_ranks_have_divided_is_refused(folder):
    _, accelerator, _ = train(
        lambda each: hvkit.distribute(each, strategy=hvkit.ShardedOptimizer()), hvkit.size()
    )
    with pytest.raises(ValueError, match=r"save with hvkit\.Checkpoint"):
        accelerator.save_state(folder / "divided")


def test_an_accelerator_is_distributed_before_it_prepares():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        hvkit.distribute(accelerator)
    with pytest.raises(TypeError, match="compresion"):
        hvkit.distribute(Accelerator(cpu=True), compresion="bf16")


def test_a_model_that_is_prepared_alone_does_not_train():
    accelerator = hvkit.distribute(Accelerator(cpu=True))
    model = accelerator.prepare_model(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="no model is kept in step over ranks"):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(ValueError, match="none of the prepared models has parameters"):
        accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))


def test_a_state_that_does_not_know_the_ranks_is_refused(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "num_processes", 1)
    with pytest.raises(ValueError, match="import hvkit before the first Accelerator"):
        hvkit.distribute(accelerator)


def test_a_model_that_is_only_evaluated_has_the_weights_of_rank_0():
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(hvkit.rank() + 1)
    model = hvkit.distribute(Accelerator(cpu=True)).prepare(model)
    assert (model.weight == 1).all()


def test_between_rounds_the_mean_of_the_ranks_is_saved():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    accelerator = hvkit.distribute(Accelerator(cpu=True), strategy=hvkit.LocalSGD(every=1000))
    model, optimizer = accelerator.prepare(model, optimizer)
    first = model.weight.detach().clone()
    accelerator.backward(model(torch.full((1, 1), float(hvkit.rank()))).sum())
    optimizer.step()
    mean = sum(range(hvkit.size())) / hvkit.size()
    assert torch.allclose(accelerator.get_state_dict(model)["weight"], first - mean)
    assert torch.allclose(model.weight, first - hvkit.rank())
