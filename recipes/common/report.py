"""What a run tells: lines or a progress bar on rank 0, and ``metrics.jsonl``."""

import json
import math
import time
from pathlib import Path
from typing import Any, Self, SupportsFloat, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hvkit
from common.flags import Flags
from common.images import Dataset
from common.ranks import on_terminal, say, stop_if_any


class Metrics:
    """``metrics.jsonl`` in ``--output-dir``, if there is one, written on rank 0.

    A line of the file is one JSON object with its kind in ``"event"``. A number that is not
    finite becomes ``null``. A run that resumes adds to the file; another one empties it.
    """

    def __init__(self, flags: Flags, data: str, resumes: bool = False) -> None:
        self._file = _open(flags.output_dir, "a" if resumes else "w")
        shown = {name: str(v) if isinstance(v, Path) else v for name, v in vars(flags).items()}
        self.record("start", ranks=hvkit.size(), data=data, flags=shown)

    def record(self, event: str, **values: Any) -> None:
        """Write one line."""
        if self._file:
            record = {"event": event} | {name: _finite(value) for name, value in values.items()}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; without one, there is nothing to do."""
        if self._file:
            self._file.close()


class Report:
    """Tells on rank 0 how a run goes, and writes ``metrics.jsonl``.

    Every rank calls the same methods at the same steps, because losses are averaged over ranks. On
    a terminal there is a progress bar, elsewhere plain lines. The events of ``metrics.jsonl`` are
    ``"start"``, ``"train"`` each ``--log-interval`` steps, ``"epoch"`` and, where the ``with``
    block ends without an error, ``"final"``.

    Args:
        flags: of the recipe.
        data: the images.
        steps: in one epoch.
        first_epoch: epochs that were done before, by a run that this one resumes.
    """

    def __init__(self, flags: Flags, data: Dataset, steps: int, first_epoch: int = 0) -> None:
        self._flags = flags
        self.steps = steps
        self._epoch, self._step, self._images = first_epoch, 0, 0
        self._epoch_began = self._epoch_seconds = self._seconds = 0.0
        self._last_test: dict[str, float] = {}
        self._metrics = Metrics(flags, data.origin, resumes=first_epoch > 0)
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
        say(f"{hvkit.size()} x {flags.batch_size} images a step, {self.steps} steps an epoch")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is None:
            rate = self._images / self._seconds if self._images else None
            self._metrics.record(
                "final",
                **self._last_test,
                epochs=self._epoch,
                ranks=hvkit.size(),
                images_per_second=rate,
            )
            if rate is None:
                say(f"all {self._epoch} epochs were done before: nothing was trained")
            else:
                say(f"{rate:.0f} images/s in training, all ranks together")
        self._metrics.close()

    def start_epoch(self) -> None:
        """Start the clock, which runs until the epoch's last step."""
        self._epoch += 1
        self._step = 0
        self._bar.reset(self._task, description=self._where())
        self._bar.start()
        self._epoch_began = time.perf_counter()

    def step(self, loss: SupportsFloat) -> None:
        """Count one step; ``loss`` is this rank's, and is read only when it is reported."""
        self._step += 1
        self._bar.advance(self._task)
        if self._step % self._flags.log_interval and self._step < self.steps:
            return
        mean = hvkit.average(float(loss))
        self._epoch_seconds = time.perf_counter() - self._epoch_began
        self._metrics.record("train", epoch=self._epoch, step=self._step, loss=mean)
        say(f"{self._where()}, step {self._step}/{self.steps}: loss {mean:.4f}")

    def end_epoch(self, test_loss: float, test_accuracy: float) -> None:
        """Report the epoch, with its test over all ranks."""
        self._bar.stop()
        images = self._step * self._flags.batch_size * hvkit.size()
        self._images += images
        self._seconds += self._epoch_seconds
        self._last_test = {"test_accuracy": test_accuracy, "test_loss": test_loss}
        rate = images / self._epoch_seconds
        self._metrics.record("epoch", epoch=self._epoch, **self._last_test, images_per_second=rate)
        say(
            f"{self._where()}: test accuracy {test_accuracy:.4f}, test loss {test_loss:.4f}, "
            f"{rate:.0f} images/s"
        )

    def _where(self) -> str:
        return f"epoch {self._epoch}/{self._flags.epochs}"


def _finite(value: Any) -> Any:
    """``value``, or None for a float that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open(folder: Path | None, mode: str) -> TextIO | None:
    """``metrics.jsonl`` in ``folder`` on rank 0; ends all ranks if it cannot be opened."""
    file, problem = None, None
    if folder is not None and hvkit.rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / "metrics.jsonl").open(mode)
        except OSError as error:
            problem = f"--output-dir {folder}: {error.strerror}; name a folder that can be written"
    stop_if_any(problem)
    return file
