"""Transformers' ``Trainer``, and TRL's above it, on hvkit's ranks: ``hvkit.distribute(trainer)``.

The trainer's accelerator does what ``integrations.accelerate`` describes. The trainer itself hands
its model over when training begins, once it has loaded a checkpoint, if any.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

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
    trainer.gather_function = trainer.accelerator.gather_for_metrics
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

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        # TRL's trainers do not pass it on in evaluation.
        self.accelerator._hvkit.counts_tokens = kwargs.get("num_items_in_batch") is not None
        return super().compute_loss(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(inputs.get("labels", ()))
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        counted = self.args.average_tokens_across_devices and self.accelerator._hvkit.counts_tokens
        whole = getattr(self.accelerator.gradient_state.active_dataloader, "is_whole", False)
        if loss is not None and counted and rows and not whole:
            # It is a part of the mean over all ranks' tokens, and will count as often as the rank
            # has samples.
            loss = loss * (hvkit.allreduce(rows) / rows)
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
