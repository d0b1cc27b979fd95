"""Runs that are stopped and go on, and those that they are compared with."""

import functools

import keras
import numpy as np
import torch
from keras_models import regression as keras_batches
from ranks import my_part, shared_folder
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays

import hvkit

DILOCO = hvkit.DiLoCo(5, outer_lr=0.6, outer_momentum=0.8)


class TorchRun:
    """A script run from its start; every run begins with other weights and random states."""

    def __init__(self, folder, seed, strategy=DILOCO, compression="none"):
        torch.manual_seed(seed * 10 + hvkit.rank())
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        hvkit.distribute(self.model, self.optimizer, strategy=strategy, compression=compression)
        self.checkpoint = hvkit.Checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def train(self, until, save_at=None):
        start = self.checkpoint.restore().step
        batches = np.random.default_rng(0).normal(size=(40, 12, 8)).astype(np.float32)
        for step, batch in enumerate(batches[start:until], start + 1):
            x = torch.from_numpy(my_part(batch))
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x[:, :4]).backward()
            self.optimizer.step()
            if step == save_at:
                self.checkpoint.save(epoch=0, step=step)
        return self

    def weights(self):
        return arrays(self.model.state_dict().values())

    def state(self):
        moments = self.optimizer.state_dict()["state"].values()
        return arrays([*self.model.state_dict().values(), *(m["exp_avg"] for m in moments)])


class KerasRun:
    """The same with Keras, in ``fit``, step by step: making a graph takes longer than the steps."""

    eager = True

    def __init__(self, folder, seed, strategy=DILOCO, compression="none"):
        keras.utils.set_random_seed(seed * 10 + hvkit.rank())
        self.model = self.make()
        self.optimizer = keras.optimizers.Adam(0.01)
        hvkit.distribute(self.model, self.optimizer, strategy=strategy, compression=compression)
        self.model.compile(self.optimizer, "mse", run_eagerly=self.eager)
        self.checkpoint = hvkit.Checkpoint(folder, model=self.model, optimizer=self.optimizer)
        self.ends = []

    def make(self):
        layers = keras.layers
        named = layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(4)
        return keras.Sequential([keras.Input((8,)), *named])

    def train(self, until, save_at=None):
        start = self.checkpoint.restore().step

        def end_batch(batch, logs):
            if start + batch + 1 == save_at:
                self.checkpoint.save(epoch=0, step=save_at)
            if start + batch + 1 == until:
                self.ends = [np.array(w.numpy()) for w in self.variables()]

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=end_batch)
        x, y = (
            np.concatenate([my_part(each) for each in part])
            for part in zip(*keras_batches(40), strict=True)
        )
        x, y = x[6 * start : 6 * until], y[6 * start : 6 * until]
        self.model.fit(x, y, batch_size=6, shuffle=False, verbose=0, callbacks=[callback])
        return self

    def weights(self):
        return [np.array(w.numpy()) for w in self.model.weights]

    def variables(self):
        return [*self.model.weights, *self.optimizer.variables]

    def state(self):
        """Before the end of ``fit`` has ended the round."""
        return self.ends


class KerasGraphRun(KerasRun):
    """The same in graphs."""

    eager = False


class Past:
    """Runs that several tests compare with or go on from, each trained once."""

    def __init__(self, folders):
        self._folders = folders
        self.undisturbed = functools.cache(self._undisturbed)
        self._saved = functools.cache(self._save)

    def _undisturbed(self, run, strategy=DILOCO, compression="none"):
        """The state after 14 steps."""
        return run(self._new(), 1, strategy, compression).train(14).state()

    def saved(self, run, at, strategy=DILOCO, compression="none"):
        """A folder with the checkpoint of a run that stopped there."""
        return self._saved(run, at, strategy, compression)

    def _save(self, run, at, strategy, compression):
        folder = self._new()
        run(folder, 1, strategy, compression).train(at, save_at=at)
        return folder

    def _new(self):
        return shared_folder(self._folders)
