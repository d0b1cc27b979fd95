"""The report of a run: lines or a progress bar on rank 0, and ``metrics.jsonl``."""

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
from hvkit.communication.traffic import Sent

NOTHING = Sent()


class Metrics:
    """``metrics.jsonl`` in ``--output-dir``, written on rank 0; no file without that flag.

    Each line is a JSON object with its kind in ``"event"``. A number that is not finite becomes
    ``null``. A resumed run appends to the file; any other run empties it first.
    """

    def __init__(self, flags: Flags, data: str, resumes: bool = False) -> None:
        self._file = _open(flags.output_dir, "a" if resumes else "w")
        plain = str | int | float | None
        shown = {name: v if isinstance(v, plain) else str(v) for name, v in vars(flags).items()}
        self.record("start", ranks=hvkit.size(), data=data, flags=shown)

    def record(self, event: str, **values: Any) -> None:
        """Write one line."""
        if self._file:
            record = {"event": event} | {name: _finite(value) for name, value in values.items()}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file:
            self._file.close()


class Report:
    """Reports the progress of a run on rank 0, and writes ``metrics.jsonl``.

    Every rank must call the same methods at the same steps, because losses are averaged over
    ranks. On a terminal there is a progress bar, elsewhere plain lines. The events in
    ``metrics.jsonl`` are ``"start"``, ``"train"`` every ``--log-interval`` steps, ``"epoch"``, and
    ``"final"`` if the ``with`` block ends without an error.

    Args:
        flags: the recipe's flags.
        data: the images.
        steps: the number of steps in an epoch.
        first_epoch: the number of epochs that the resumed run has done; 0 for a new run.
    """

    def __init__(self, flags: Flags, data: Dataset, steps: int, first_epoch: int = 0) -> None:
        self._flags = flags
        self.steps = steps
        self._epoch, self._step, self._images = first_epoch, 0, 0
        self._steps_done = 0
        self._sent_before = hvkit.traffic()
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
                bytes_per_step=self._bytes_per_step(),
            )
            if rate is None:
                say(f"all {self._epoch} epochs were done before: there was nothing to train")
            else:
                say(f"{rate:.0f} images/s in training, all ranks together")
                if sent := self._bytes_per_step():
                    parts = (f"{size / 1000:.1f} kB of {kind}" for kind, size in sent.items())
                    say(f"sent by a rank in a step, on average: {', '.join(parts)}")
        self._metrics.close()

    def start_epoch(self) -> None:
        """Start the clock of an epoch, which stops at its last step."""
        self._epoch += 1
        self._step = 0
        self._bar.reset(self._task, description=self._where())
        self._bar.start()
        self._epoch_began = time.perf_counter()

    def step(self, loss: SupportsFloat) -> None:
        """Count a step. ``loss`` is this rank's; it is read only in steps that are reported."""
        self._step += 1
        self._steps_done += 1
        self._bar.advance(self._task)
        if self._step % self._flags.log_interval and self._step < self.steps:
            return
        mean = hvkit.average(float(loss))
        self._epoch_seconds = time.perf_counter() - self._epoch_began
        self._metrics.record("train", epoch=self._epoch, step=self._step, loss=mean)
        say(f"{self._where()}, step {self._step}/{self.steps}: loss {mean:.4f}")

    def end_epoch(self, test_loss: float, test_accuracy: float) -> None:
        """Report the epoch and its test results, which are equal on all ranks."""
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

    def _bytes_per_step(self) -> dict[str, float]:
        """What this rank has sent in training and testing, by purpose."""
        sent = {
            purpose: now.bytes - self._sent_before.get(purpose, NOTHING).bytes
            for purpose, now in hvkit.traffic().items()
        }
        return {p: size / self._steps_done for p, size in sent.items() if size}

    def _where(self) -> str:
        return f"epoch {self._epoch}/{self._flags.epochs}"


def _finite(value: Any) -> Any:
    """``value``, or None for a float that JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open(folder: Path | None, mode: str) -> TextIO | None:
    """``metrics.jsonl`` in ``folder``, opened on rank 0; ends all ranks if that fails."""
    file, problem = None, None
    if folder is not None and hvkit.rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / "metrics.jsonl").open(mode)
        except OSError as error:
            problem = f"--output-dir {folder}: {error.strerror}; name a writable folder"
    stop_if_any(problem)
    return file
