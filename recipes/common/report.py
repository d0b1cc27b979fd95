"""Reports a run: lines or a progress bar on rank 0, and records in ``--output-dir``."""

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self, SupportsFloat, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hvkit
from common.flags import Flags
from common.images import Dataset
from common.ranks import on_terminal, parts_of_a_batch, say
from hvkit.transport.traffic import Sent

T = TypeVar("T")

NOTHING = Sent()


def make_monitor(flags: Flags, steps: int) -> hvkit.Monitor | None:
    """The monitor that records a run into ``--output-dir``; None without that flag.

    It records as often as ``Report`` prints the loss: every ``--log-interval`` steps, or once per
    epoch if an epoch has fewer steps.
    """
    if flags.output_dir is None:
        return None
    return hvkit.Monitor(flags.output_dir, every=min(flags.log_interval, steps))


class Report:
    """Prints the progress of a run on rank 0, and passes it to the monitor, if there is one.

    Every rank must call the same methods at the same steps, because losses are averaged over
    ranks. On a terminal there is a progress bar, elsewhere plain lines. The monitor closes with
    the ``with`` block.

    Args:
        flags: the recipe's flags.
        data: the images.
        steps: the number of steps in an epoch.
        monitor: what ``make_monitor`` returned.
        first_epoch: the number of epochs that the resumed run has done; 0 for a new run.
    """

    def __init__(
        self,
        flags: Flags,
        data: Dataset,
        steps: int,
        monitor: hvkit.Monitor | None,
        first_epoch: int = 0,
    ) -> None:
        self._flags = flags
        self.steps = steps
        self._monitor = monitor
        self._epoch, self._step, self._images = first_epoch, 0, 0
        self._steps_done = 0
        self._sent_before = hvkit.traffic()
        self._epoch_began = self._epoch_seconds = self._seconds = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(),
            transient=True,
            disable=hvkit.rank() > 0 or not on_terminal(),
        )
        self._task = self._bar.add_task("", total=self.steps)
        say(f"{len(data.train)} training and {len(data.test)} test images: {data.origin}")
        self._images_per_step = flags.batch_size * parts_of_a_batch(flags)
        parts = f"{parts_of_a_batch(flags)} x {flags.batch_size}"
        say(f"{parts} images a step, {self.steps} steps an epoch")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if kind is None:
            self._say_results()
        if self._monitor is not None:
            self._monitor.__exit__(kind, error, trace)

    def start_epoch(self) -> None:
        """Start the clock of an epoch, which stops at its last step."""
        if self._monitor is not None:
            self._monitor.begin_epoch(self._epoch)
        self._epoch += 1
        self._step = 0
        self._bar.reset(self._task, description=self._where())
        self._bar.start()
        self._epoch_began = time.perf_counter()

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """A loop's batches of one epoch; the monitor measures how long the loop waits for them."""
        return iter(data) if self._monitor is None else self._monitor.batches(data)

    def step(self, loss: SupportsFloat) -> None:
        """End a step of a loop; ``loss`` is this rank's loss."""
        self.show_step(loss)
        if self._monitor is not None:
            self._monitor.step(loss=loss)
            if self._step == self.steps:  # before a schedule changes the rate
                self._monitor.flush()

    def show_step(self, loss: SupportsFloat) -> None:
        """Count and print a step; in ``fit``, where the monitor counts steps itself.

        ``loss`` is read only in steps that are printed.
        """
        self._step += 1
        self._steps_done += 1
        self._bar.advance(self._task)
        if self._step % self._flags.log_interval and self._step < self.steps:
            return
        mean = hvkit.average(float(loss))
        self._epoch_seconds = time.perf_counter() - self._epoch_began
        say(f"{self._where()}, step {self._step}/{self.steps}: loss {mean:.4f}")

    def end_epoch(self, test_loss: float, test_accuracy: float) -> None:
        """Record and print an epoch of a loop with its test results, equal on all ranks."""
        if self._monitor is not None:
            self._monitor.log(test_accuracy=test_accuracy, test_loss=test_loss)
        self.show_epoch(test_loss, test_accuracy)

    def show_epoch(self, test_loss: float, test_accuracy: float) -> None:
        """Print an epoch; in ``fit``, where the monitor records the results itself."""
        self._bar.stop()
        images = self._step * self._images_per_step
        self._images += images
        self._seconds += self._epoch_seconds
        rate = images / self._epoch_seconds
        say(
            f"{self._where()}: test accuracy {test_accuracy:.4f}, test loss {test_loss:.4f}, "
            f"{rate:.0f} images/s"
        )

    def _say_results(self) -> None:
        if not self._images:
            say(f"the checkpoint has all {self._epoch} epochs: there was nothing to train")
            return
        rate = self._images / self._seconds
        say(f"{rate:.0f} images/s in training, all ranks together")
        if sent := self._bytes_per_step():
            parts = (f"{size / 1000:.1f} kB of {purpose}" for purpose, size in sent)
            say(f"sent by a rank in a step, on average: {', '.join(parts)}")

    def _bytes_per_step(self) -> list[tuple[str, float]]:
        """Bytes per step that this rank has sent, by purpose, the most first; 50 bytes at least."""
        sent = {
            purpose: now.bytes - self._sent_before.get(purpose, NOTHING).bytes
            for purpose, now in hvkit.traffic().items()
        }
        sizes = ((purpose, size / self._steps_done) for purpose, size in sent.items())
        return sorted((each for each in sizes if each[1] >= 50), key=lambda each: -each[1])

    def _where(self) -> str:
        return f"epoch {self._epoch}/{self._flags.epochs}"
