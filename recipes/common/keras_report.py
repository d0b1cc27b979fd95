"""The report of a run in Keras's ``fit``."""

from typing import Any

import keras

from common.report import Report


class ReportProgress(keras.callbacks.Callback):
    """Reports the loss during an epoch, and the test over all ranks after it."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._report.start_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._report.step(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._report.end_epoch(logs["val_loss"], logs["val_accuracy"])
