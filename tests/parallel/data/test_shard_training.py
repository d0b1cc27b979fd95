"""N ranks that train on their parts get the model of one process that trains on all data."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from cases import MORE
from ranks import largest_difference, same_on_all_ranks
from torch.utils.data import DataLoader, TensorDataset

import hvkit
from hvkit.data import shard

BATCH, LENGTH = 4, 60  # the last step of two and of three ranks has no repetitions


def samples():
    rng = np.random.default_rng(0)
    return rng.normal(size=(LENGTH, 8)).astype("f4"), rng.normal(size=(LENGTH, 1)).astype("f4")


def train(model, optimizer, loader):
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def test_a_shuffled_loader_trains_the_weights_of_one_process():
    def setting(batch):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        data = TensorDataset(*map(torch.from_numpy, samples()))
        loader = DataLoader(data, batch_size=batch, shuffle=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.05), loader

    model, optimizer, loader = setting(BATCH * hvkit.size())
    torch.manual_seed(0)
    reference = train(model, optimizer, loader)
    model, optimizer, loader = setting(BATCH)
    model, optimizer = hvkit.distribute(model, optimizer, lr_scaling="none")
    torch.manual_seed(hvkit.rank())
    weights = train(model, optimizer, shard(loader))
    assert same_on_all_ranks(weights)
    assert largest_difference(weights, reference) < 1e-5


class ShuffledByNumpy(keras.utils.PyDataset):
    """Shuffles itself as most examples do it."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch
        self.x, self.y = samples()

    def __len__(self):
        return -(-LENGTH // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        order = np.random.permutation(LENGTH)
        self.x, self.y = self.x[order], self.y[order]


def fits_like_one_process(make):
    def setting():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        return model, keras.optimizers.SGD(0.05)

    model, optimizer = setting()
    np.random.seed(0)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(make(BATCH * hvkit.size()), epochs=3, shuffle=False, verbose=0)
    reference = model.get_weights()
    model, optimizer = hvkit.distribute(*setting(), lr_scaling="none")
    np.random.seed(hvkit.rank())
    model.compile(optimizer, "mse")
    model.fit(shard(make(BATCH)), epochs=3, shuffle=False, verbose=0)
    assert same_on_all_ranks(model.get_weights())
    assert largest_difference(model.get_weights(), reference) < 1e-5


@MORE
def test_fit_on_a_batched_pipeline_trains_the_weights_of_one_process():
    def make(batch):
        data = tf.data.Dataset.from_tensor_slices(samples())
        return data.shuffle(LENGTH, seed=5).batch(batch).prefetch(1)

    fits_like_one_process(make)


@pytest.mark.two_ranks
def test_fit_on_a_pydataset_that_shuffles_itself_trains_the_weights_of_one_process():
    fits_like_one_process(ShuffledByNumpy)
