"""Transformers' ``Trainer``, and TRL's above it, on hvkit's ranks: ``hvkit.distribute(trainer)``.

The trainer's accelerator does what ``integrations.accelerate`` describes. The trainer itself hands
its model over when training begins, once it has loaded a checkpoint, if any.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

import hvkit
from hvkit.integrations import accelerate
from hvkit.integrations.ranks import Mixin, check_use


def distribute(trainer: Any, options: Mapping[str, Any]) -> Any:
    """Let a trainer train on all ranks, with options of ``hvkit.distribute``."""
    from transformers import TrainerCallback

    class Begin(TrainerCallback):
        """Distributes the model when training begins."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ours, optimizer = trainer.accelerator._hvkit, trainer.optimizer.optimizer
            if optimizer not in ours.trained:
                steps = trainer.args.gradient_accumulation_steps
                ours.distribute([trainer.model], [optimizer], steps)

    check_use("transformers", options)
    accelerate.distribute(trainer.accelerator, options, waits=True)
    if (mesh := options.get("mesh")) is not None and mesh.pipeline != 1:
        trainer.model_accepts_loss_kwargs = False  # a loss that micro-batches share is their mean
    trainer.__class__ = _class_on_ranks(trainer.__class__)
    trainer.callback_handler.callbacks.insert(0, Begin())
    return trainer


class TrainerOnRanks(Mixin):  # type: ignore[misc]
    """A mixin before the class of a trainer."""

    accelerator: Any

    def get_train_dataloader(self) -> Any:
        ours = self.accelerator._hvkit
        ours.trains = True
        try:
            return super().get_train_dataloader()
        finally:
            ours.trains = False

    def num_examples(self, dataloader: Any) -> int:
        samples = vars(dataloader).get("samples")
        return int(super().num_examples(dataloader) if samples is None else samples)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with hvkit.settled(*self.accelerator._hvkit.trained[:1]):
            return super().evaluation_loop(*args, **kwargs)

    @property
    def gather_function(self) -> Any:
        """What gathers in evaluation; trainers set another one, which repeats samples."""
        return self.accelerator.gather_for_metrics

    @gather_function.setter
    def gather_function(self, function: Any) -> None: ...

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """The tokens of all ranks for each rank, so that the mean of ranks is that of tokens.

        Transformers instead multiplies losses by the number of ranks, also those of models that
        divide by another number.
        """
        count = super()._get_num_items_in_batch(*args, **kwargs)
        if count is None or not self.args.average_tokens_across_devices:
            return count
        return count / torch.tensor(hvkit.size(), dtype=torch.float64)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator._hvkit.among(1, 0):  # by which Transformers multiplies it
            return super().compute_loss(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss is a rank's mean, weighted so that the mean over rows is that over tokens."""
        labels, averages = inputs.get("labels"), self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            count = super()._get_num_items_in_batch([inputs], self.args.device)
            loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
        whole = getattr(self.accelerator.gradient_state.active_dataloader, "is_whole", False)
        if loss is not None and isinstance(labels, torch.Tensor) and not whole:
            add_up = functools.partial(self.accelerator._hvkit.ranks.reduce, op="sum")
            count = int(labels.ne(-100).sum() if count is None else count)
            tokens, rows = add_up(count), add_up(len(labels))
            if tokens and len(labels):
                loss = loss * (count / tokens * rows / len(labels)) if count else loss * 0
        return loss, *rest

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator._hvkit.settled():
            return super()._save_checkpoint(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator._hvkit.settled():
            return super().save_model(*args, **kwargs)


@functools.cache
def _class_on_ranks(base: Any) -> type:
    return type(base.__name__, (TrainerOnRanks, base), {"__module__": base.__module__})
