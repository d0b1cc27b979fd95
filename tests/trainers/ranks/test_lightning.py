"""Lightning's Trainer and Fabric on ranks train, log and decide as in one process."""

import itertools
import pickle

import lightning as L
import lightning_cases
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from lightning_cases import BATCH, CASES, loaders, train

import hvkit
from hvkit.integrations.lightning import HvkitFabricStrategy, HvkitStrategy

EXACT = [name for name in CASES if name != "mixed precision"]


def same(found, wanted, tolerance=1e-13):
    if hvkit.is_main():  # strategies that divide weights have them on rank 0 alone
        for name, value in wanted["weights"].items():
            assert torch.allclose(found.weights[name], value, rtol=0, atol=tolerance), name
    assert found.rates == wanted["rates"]
    for epoch, expected in zip(found.epochs, wanted["epochs"], strict=True):
        for name, value in expected.items():
            if name != "loss_step":  # that of the rank
                assert epoch[name] == pytest.approx(value, abs=max(1e-6, tolerance)), name
    assert found.test == pytest.approx(wanted["test"], abs=max(1e-6, tolerance))


@pytest.mark.parametrize("case", EXACT)
def test_the_weights_and_metrics_are_those_of_one_process(case, one_process):
    same(train(case, "hvkit", hvkit.size()), one_process(lightning_cases)[case, hvkit.size()])


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("clipping what is accumulated", {"strategy": hvkit.ShardedOptimizer()}),
        ("clipping what is accumulated", {"strategy": hvkit.FullyShard()}),
        ("uneven last batch", {"strategy": hvkit.FullyShard()}),
        ("SGD", {"strategy": hvkit.LocalSGD(every=1)}),
        ("clipping", {"mesh": hvkit.Mesh(shard=hvkit.size())}),
    ],
    ids=str,
)
def test_strategies_give_the_weights_of_one_process(case, options, one_process):
    found = train(case, HvkitStrategy(**options), hvkit.size())
    same(found, one_process(lightning_cases)[case, hvkit.size()])


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_mesh_gives_the_weights_of_one_process_with_one_batch(axis, one_process):
    microbatches = {"microbatches": 2} if axis == "pipeline" else {}
    strategy = HvkitStrategy(mesh=hvkit.Mesh(**{axis: hvkit.size()}), **microbatches)
    if axis == "pipeline" and hvkit.size() > 2:
        pytest.skip("a model of two layers has two stages")
    same(train("clipping", strategy, hvkit.size()), one_process(lightning_cases)["clipping", 1])


def test_mixed_precision_trains_alike(one_process):
    wanted = one_process(lightning_cases)["mixed precision", hvkit.size()]
    same(train("mixed precision", "hvkit", hvkit.size()), wanted, tolerance=0.05)


@pytest.mark.parametrize("case", ["clipping", "clipping what is accumulated"])
def test_an_overflow_on_one_rank_is_skipped_by_all(case, monkeypatch):
    """Lightning itself scales losses on GPUs only, and trains in bfloat16 on CPUs."""
    step = lightning_cases.Classifier.training_step

    def overflowing(module, batch, i):
        last = module.trainer.global_rank == module.trainer.world_size - 1
        overflows = last and (module.trainer.current_epoch, i) == (1, 4)
        return step(module, batch, i) * (float("inf") if overflows else 1)

    monkeypatch.setattr(lightning_cases.Classifier, "training_step", overflowing)
    done, scales = [], []
    for strategy, batches in [("hvkit", 1), ("auto", hvkit.size())]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        done.append(train(case, strategy, hvkit.size(), batches, plugins=[precision]))
        scales.append(scaler.get_scale())
    assert scales == [512, 512]
    for name, value in done[0].weights.items():
        assert torch.allclose(value, done[1].weights[name], rtol=0, atol=2e-3), name


def test_rounds_end_with_the_weights_that_ranks_agree_on():
    found = train("SGD", HvkitStrategy(strategy=hvkit.LocalSGD(every=5)), hvkit.size())
    assert len({str(each) for each in hvkit.allgather(found.epochs[-1]["val"])}) == 1


def test_files_and_lines_are_written_once(folder, capfd):
    train(
        "plain", "hvkit", hvkit.size(), enable_checkpointing=True, logger=True,
        default_root_dir=folder / "once", enable_model_summary=True,
    )  # fmt: skip
    said = hvkit.allgather("".join(capfd.readouterr()))
    assert "Total params" in said[0]
    assert not any("Total params" in each or "max_epochs" in each for each in said[1:])
    assert len(list((folder / "once").rglob("*.ckpt"))) == 1


def test_a_checkpoint_of_divided_weights_is_plain(folder, one_process):
    strategy = HvkitStrategy(strategy=hvkit.FullyShard())
    done = train(
        "plain",
        strategy,
        hvkit.size(),
        enable_checkpointing=True,
        default_root_dir=folder / "whole",
    )
    path = hvkit.broadcast(done.trainer.checkpoint_callback.best_model_path)
    saved = torch.load(path, weights_only=False)
    wanted = one_process(lightning_cases)["plain", hvkit.size()]["weights"]
    for name, value in wanted.items():
        assert torch.allclose(saved["state_dict"][name], value, rtol=0, atol=1e-13)
    assert saved["optimizer_states"][0]["state"][0]["exp_avg"].shape == (16, 8)


def test_predictions_are_those_of_each_ranks_samples():
    _, data = loaders("plain", 1, hvkit.size())
    module = lightning_cases.Classifier("plain")
    module.predict_step = lambda batch, *_: batch[1]
    trainer = L.Trainer(
        accelerator="cpu", strategy="hvkit", logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    parts = hvkit.allgather(torch.cat(trainer.predict(module, data)).tolist())
    assert sorted(itertools.chain(*parts)) == sorted((data.dataset.tensors[1]).tolist())


def test_ranks_begin_with_the_weights_of_rank_0_also_to_evaluate():
    torch.manual_seed(hvkit.rank())
    module = lightning_cases.Classifier("plain")
    _, data = loaders("plain", 1, hvkit.size())
    trainer = L.Trainer(
        accelerator="cpu", strategy="hvkit", logger=False, enable_progress_bar=False
    )
    trainer.validate(module.double(), data_of(data), verbose=False)
    first = hvkit.allgather(module.net[0].weight.detach())
    assert all(torch.equal(each, first[0]) for each in first)


def data_of(loader):
    x, y = loader.dataset.tensors
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.double(), y), BATCH)


@pytest.mark.parametrize("options", [{}, {"strategy": hvkit.FullyShard()}], ids=str)
def test_fabric_trains_the_weights_of_one_process(options):
    torch.set_default_dtype(torch.float64)
    fabric = L.Fabric(
        accelerator="cpu", strategy=HvkitFabricStrategy(**options) if options else "hvkit"
    )
    fabric.launch()
    numbers = fabric.all_gather(torch.tensor(float(hvkit.rank())))
    assert numbers.tolist() == list(range(hvkit.size()))
    assert fabric.all_reduce(numbers, reduce_op="sum").sum() == numbers.sum() * hvkit.size()
    weights = []
    for ranks in (1, hvkit.size()):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        data, _ = loaders("plain", hvkit.size() // ranks, hvkit.size())
        backward = torch.Tensor.backward
        if ranks > 1:
            model, optimizer = fabric.setup(model, optimizer)
            data, backward = fabric.setup_dataloaders(data), fabric.backward
        for x, y in data:
            optimizer.zero_grad()
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
        fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer}) if ranks > 1 else None
        weights.append(model.state_dict() if ranks == 1 else torch.load("fabric.ckpt")["model"])
        hvkit.barrier()
    for name, value in weights[0].items():
        assert torch.allclose(weights[1][name], value, rtol=0, atol=1e-13)


def test_unknown_options_are_refused_at_once():
    with pytest.raises(TypeError, match="compresion"):
        HvkitStrategy(compresion="bf16")


def test_a_module_with_parameters_of_its_own_is_refused_in_a_mesh():
    class Own(lightning_cases.Classifier):
        def __init__(self):
            super().__init__("plain")
            self.scale = torch.nn.Parameter(torch.ones(1))

    strategy = HvkitStrategy(mesh=hvkit.Mesh(tensor=hvkit.size()))
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match="must hold its parameters in one module"):
        trainer.fit(Own().double(), data_of(loaders("plain", 1, hvkit.size())[0]))


def test_later_calls_divide_their_data_and_train_on():
    torch.set_default_dtype(torch.float64)
    weights, seen = [], []
    for ranks in (1, hvkit.size()):
        torch.manual_seed(0)
        module = lightning_cases.Classifier("plain")
        module.on_validation_batch_end = lambda *args: seen.append(len(args[1][0]))
        for _ in range(2):
            shuffled, test = loaders("plain", hvkit.size() // ranks, hvkit.size())
            data = torch.utils.data.DataLoader(shuffled.dataset, shuffled.batch_size)
            trainer = L.Trainer(
                accelerator="cpu", strategy="hvkit" if ranks > 1 else "auto", max_epochs=1,
                logger=False, enable_checkpointing=False, enable_progress_bar=False,
                num_sanity_val_steps=0,
            )  # fmt: skip
            for epochs in (1, 2):
                trainer.fit_loop.max_epochs = epochs
                trainer.fit(module, data)
            seen.clear()
            trainer.validate(module, test, verbose=False)
            if ranks > 1:
                assert sum(hvkit.allgather(sum(seen))) == 31
        weights.append({k: v.clone() for k, v in module.state_dict().items()})
    for name, value in weights[0].items():
        assert torch.allclose(weights[1][name], value, rtol=0, atol=1e-13)


def test_other_optimizers_in_a_later_fit_are_refused():
    done = train("SGD", "hvkit", hvkit.size())
    done.module.case = "plain"
    done.trainer.fit_loop.max_epochs = 4
    with pytest.raises(ValueError, match=r"other optimizers \(AdamW\) than the first \(SGD\)"):
        done.trainer.fit(done.module, loaders("SGD", 1, hvkit.size())[0])


class Logs(lightning_cases.Classifier):
    """Logs what a function of the rank says."""

    def __init__(self, logged):
        super().__init__("plain")
        self.logged = logged

    def validation_step(self, batch, *_):
        for name, value in self.logged().items():
            self.log(name, float(value), on_step=True, on_epoch=True, sync_dist=True)


def validated(logged, *rows):
    trainer = L.Trainer(
        accelerator="cpu", strategy="hvkit", logger=False, enable_progress_bar=False
    )
    data = [
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(n, 8).double(), torch.arange(n) % 4), BATCH
        )
        for n in rows
    ]
    return trainer.validate(Logs(logged).double(), data, verbose=False)[0]


def test_names_that_ranks_log_in_another_order_are_refused():
    first = {"a": 1, "b": 100}
    both = [first, dict(reversed(first.items()))]
    with pytest.raises(hvkit.HvkitError, match="log the same names in the same order"):
        validated(lambda: both[hvkit.rank() % 2], 9)


@pytest.mark.parametrize("rows", [1, 4 * 5 + 1])
def test_ranks_may_evaluate_other_numbers_of_batches(rows):
    assert validated(lambda: {"a": 2}, rows)["a_epoch"] == 2


def test_evaluation_loaders_of_which_some_cannot_be_divided_are_refused():
    for rows in [(9, 1), (1, 9)]:
        with pytest.raises(ValueError, match="some evaluation loaders can be divided among ranks"):
            validated(lambda: {"a": 2}, *rows)
    validated(lambda: {"a": 2}, 9, 8)
    validated(lambda: {"a": 2}, 1, 1)


def test_another_strategy_in_a_later_fit_is_refused():
    done = train("SGD", "hvkit", hvkit.size())
    strategy = HvkitStrategy(strategy=hvkit.LocalSGD(every=5))
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, logger=False, max_epochs=1)
    with pytest.raises(ValueError, match="was fitted with no options before"):
        trainer.fit(done.module, loaders("SGD", 1, hvkit.size())[0])


def test_a_module_pickles_after_a_fit():
    pickle.dumps(train("plain", "hvkit", hvkit.size()).module.accuracy)


def test_fabric_is_not_set_up_in_parts():
    fabric = L.Fabric(accelerator="cpu", strategy="hvkit")
    fabric.launch()
    model = torch.nn.Linear(1, 1)
    fabric.setup_module(model)
    with pytest.raises(ValueError, match=r"call fabric\.setup\(model, optimizer\)"):
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))


def test_samples_that_every_rank_evaluates_count_once_in_metrics():
    class Counted(lightning_cases.Classifier):
        def __init__(self):
            super().__init__("plain")
            self.seen = torchmetrics.SumMetric()

        def validation_step(self, batch, _):
            self.seen(float(len(batch[0])))
            self.log("seen", self.seen)
            if self.trainer.is_global_zero:
                self.log("of rank 0", 1.0, rank_zero_only=True)

    class Outside(L.Callback):
        def __init__(self):
            self.seen = torchmetrics.SumMetric()

        def on_validation_batch_end(self, trainer, module, outputs, batch, *_):
            self.seen(float(len(batch[0])))

        def on_validation_epoch_end(self, trainer, module):
            module.log("outside", self.seen.compute())

    for rows in (1, 8 * hvkit.size() + 1):
        trainer = L.Trainer(
            accelerator="cpu", strategy="hvkit", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, callbacks=[Outside()],
        )  # fmt: skip
        data = torch.utils.data.TensorDataset(torch.randn(rows, 8), torch.zeros(rows).long())
        (found,) = trainer.validate(Counted(), torch.utils.data.DataLoader(data, 2), verbose=False)
        assert (found["seen"], found["outside"]) == (rows, rows)
