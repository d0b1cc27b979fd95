"""What the recipes share: flags, each rank's part of the data, and the report of a run."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsFloat, TextIO, TypeVar

import mnist_data
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hvkit

T = TypeVar("T", int, float)

DRY_RUN_STEPS = 3

# Each epoch's learning rate is this fraction of the epoch's before.
LR_DECAY = 0.8


class Flags(argparse.Namespace):
    """The recipes' flags, as ``parse_flags`` returns them."""

    batch_size: int
    test_batch_size: int
    epochs: int
    lr: float
    momentum: float
    seed: int
    log_interval: int
    data_dir: Path | None
    dataset: str
    output_dir: Path | None
    dry_run: bool


def parse_flags(description: str, argv: Sequence[str] | None = None) -> Flags:
    """Read the recipe's flags from ``argv``, by default from the command line."""
    positive = _checked(int, lambda n: n > 0, "a positive whole number")
    rate = _checked(float, lambda x: 0 < x < math.inf, "a positive number")
    fraction = _checked(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
    seed = _checked(int, lambda n: 0 <= n < 2**31, "a whole number from 0 to 2147483647")

    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = parser.add_argument
    flag("--batch-size", type=positive, default=32, help="training images a step, per rank")
    flag("--test-batch-size", type=positive, default=500, help="test images at once, per rank")
    flag("--epochs", type=positive, default=8, help="passes over the training images")
    flag("--lr", type=rate, default=0.02, help="learning rate of one rank")
    flag("--momentum", type=fraction, default=0.9, help="momentum of SGD")
    flag("--seed", type=seed, default=1, help="of initial weights, image order and dropout")
    flag("--log-interval", type=positive, default=100, help="steps between reports of the loss")
    flag("--data-dir", type=Path, help="folder with MNIST's four IDX files, plain or .gz")
    flag(
        "--dataset",
        choices=("auto", "mnist", "digits"),
        default="auto",
        help="auto: MNIST, or scikit-learn's digits where MNIST cannot be downloaded",
    )
    flag("--output-dir", type=Path, help="folder for metrics.jsonl")
    flag("--dry-run", action="store_true", help=f"one epoch of at most {DRY_RUN_STEPS} steps")
    flags = parser.parse_args(argv, namespace=Flags())
    if flags.dataset == "digits" and flags.data_dir is not None:
        parser.error(
            f"--dataset digits does not read --data-dir {flags.data_dir}: drop one of the two"
        )
    if flags.dry_run:
        flags.epochs = 1
    return flags


class _Parser(argparse.ArgumentParser):
    """Every rank is given the same flags; rank 0 alone tells what is wrong with them."""

    def print_help(self, file: Any = None) -> None:
        if hvkit.rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if hvkit.rank() == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        hvkit.barrier()  # see stop_if_any
        self.exit(2)


def _checked(kind: Callable[[str], T], accepts: Callable[[T], bool], wanted: str) -> Any:
    """An argparse type: ``kind`` with a range, and an error that says what is wanted."""

    def convert(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return convert


def load_data(flags: Flags) -> mnist_data.Dataset:
    """The same images on every rank, downloaded once per host if they must be.

    If any rank has no images, or others than rank 0, all ranks end, and rank 0 says why.
    """
    data, problem = None, None
    first_on_host = hvkit.local_rank() == 0
    if first_on_host:
        data, problem = _try_to_load(flags, download=True)
    stop_if_any(problem)
    if not first_on_host:
        data, problem = _try_to_load(flags, download=False)
    stop_if_any(problem)
    assert data is not None
    digest = data.digest()
    digest_of_0, origin_of_0 = hvkit.broadcast((digest, data.origin))
    step = flags.batch_size * hvkit.size()
    if digest != digest_of_0:
        problem = f"its images ({data.origin}) are not those of rank 0 ({origin_of_0})"
    elif len(data.train) < step:
        problem = (
            f"{len(data.train)} training images are too few for one step of {step}, "
            f"{flags.batch_size} on each of {hvkit.size()} ranks: use a smaller --batch-size"
        )
    elif len(data.test) < hvkit.size():
        problem = f"{len(data.test)} test images are too few for {hvkit.size()} ranks"
    stop_if_any(problem)
    return data


def _try_to_load(flags: Flags, download: bool) -> tuple[mnist_data.Dataset | None, str | None]:
    """The images, or what is wrong."""
    try:
        return mnist_data.load(flags.dataset, flags.data_dir, download=download, say=say), None
    except (mnist_data.DataError, OSError) as error:
        return None, str(error)


def stop_if_any(problem: str | None) -> None:
    """End every rank, rank 0 saying why, if any rank has a problem. Every rank must call it."""
    problems = hvkit.allgather(problem)
    if not any(problems):
        return
    if hvkit.rank() == 0:
        for text in dict.fromkeys(filter(None, problems)):
            ranks = [str(rank) for rank, theirs in enumerate(problems) if theirs == text]
            where = "" if len(ranks) == hvkit.size() else f" on rank {', '.join(ranks)}"
            print(f"error{where}: {text}", file=sys.stderr, flush=True)
    hvkit.barrier()  # a launcher ends rank 0, unheard, when it sees another rank fail first
    sys.exit(1)


def say(line: str) -> None:
    """Print, on rank 0 only."""
    if hvkit.rank() == 0:
        print(line, flush=True)


def split_epoch(
    samples: int, batch_size: int, seed: int, epoch: int, rank: int, size: int
) -> np.ndarray:
    """The rows that one rank trains on in one epoch: int64 of shape (steps, ``batch_size``).

    The order of all rows depends on ``seed`` and ``epoch`` only. Step by step the ranks take
    ``batch_size`` rows each, so all of them together train on what one process would with the
    ``size`` times larger batch. The rows of an incomplete last step are left out.
    """
    steps = samples // (batch_size * size)
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    return order[: steps * size * batch_size].reshape(steps, size, batch_size)[:, rank]


def part_of_rank(samples: int, rank: int, size: int) -> slice:
    """The rows that one rank tests on; the parts differ by one row at most, none is left out."""
    return slice(samples * rank // size, samples * (rank + 1) // size)


def train_batches(flags: Flags, images: mnist_data.Images, epoch: int) -> np.ndarray:
    """This rank's rows of each step of an epoch; see ``split_epoch``."""
    rank, size = hvkit.rank(), hvkit.size()
    rows = split_epoch(len(images), flags.batch_size, flags.seed, epoch, rank, size)
    return rows[:DRY_RUN_STEPS] if flags.dry_run else rows


def own_part(images: mnist_data.Images) -> mnist_data.Images:
    """This rank's part of the test images; see ``part_of_rank``."""
    rows = part_of_rank(len(images), hvkit.rank(), hvkit.size())
    return mnist_data.Images(images.pixels[rows], images.labels[rows])


def over_all_ranks(loss_sum: float, correct: int, images: int) -> tuple[float, float]:
    """Mean loss and accuracy on all test images, from the sums over each rank's part."""
    loss, hits, count = np.sum(hvkit.allgather((loss_sum, correct, images)), axis=0)
    return float(loss / count), float(hits / count)


class Report:
    """Tells on rank 0 how a run goes, and writes ``metrics.jsonl`` into ``--output-dir``.

    Every rank calls the same methods at the same steps, because losses are averaged over ranks. On
    a terminal there is a progress bar, elsewhere plain lines. A line of the file is one JSON
    object with its kind in ``"event"``: ``"start"``, ``"train"`` each ``--log-interval`` steps,
    ``"epoch"`` and, where the ``with`` block ends without an error, ``"final"``. A number that is
    not finite becomes ``null``.
    """

    def __init__(self, flags: Flags, data: mnist_data.Dataset) -> None:
        self._flags = flags
        self.steps = len(train_batches(flags, data.train, epoch=0))
        self._epoch = self._step = self._images = 0
        self._epoch_began = self._epoch_seconds = self._seconds = 0.0
        self._last_test: dict[str, float] = {}
        self._file = _open_metrics(flags.output_dir)
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
        shown = {name: str(v) if isinstance(v, Path) else v for name, v in vars(flags).items()}
        self._record("start", ranks=hvkit.size(), data=data.origin, flags=shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is None:
            rate = self._images / self._seconds
            self._record(
                "final",
                **self._last_test,
                epochs=self._epoch,
                ranks=hvkit.size(),
                images_per_second=rate,
            )
            say(f"{rate:.0f} images/s in training, all ranks together")
        if self._file:
            self._file.close()

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
        self._record("train", epoch=self._epoch, step=self._step, loss=mean)
        say(f"{self._where()}, step {self._step}/{self.steps}: loss {mean:.4f}")

    def end_epoch(self, test_loss: float, test_accuracy: float) -> None:
        """Report the epoch, with its test over all ranks."""
        self._bar.stop()
        images = self._step * self._flags.batch_size * hvkit.size()
        self._images += images
        self._seconds += self._epoch_seconds
        self._last_test = {"test_accuracy": test_accuracy, "test_loss": test_loss}
        rate = images / self._epoch_seconds
        self._record("epoch", epoch=self._epoch, **self._last_test, images_per_second=rate)
        say(
            f"{self._where()}: test accuracy {test_accuracy:.4f}, test loss {test_loss:.4f}, "
            f"{rate:.0f} images/s"
        )

    def _where(self) -> str:
        return f"epoch {self._epoch}/{self._flags.epochs}"

    def _record(self, event: str, **values: Any) -> None:
        if self._file:
            record = {"event": event} | {name: _finite(value) for name, value in values.items()}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def _finite(value: Any) -> Any:
    """``value``, or None for a float that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_metrics(folder: Path | None) -> TextIO | None:
    """``metrics.jsonl`` in ``folder``, emptied, on rank 0; ends all ranks if that fails."""
    file, problem = None, None
    if folder is not None and hvkit.rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / "metrics.jsonl").open("w")
        except OSError as error:
            problem = f"--output-dir {folder}: {error.strerror}; name a folder that can be written"
    stop_if_any(problem)
    return file


def on_terminal() -> bool:
    """Whether standard output is a terminal that someone watches.

    Open MPI gives its ranks a pseudo-terminal also where mpirun's own output goes to a file or a
    pipe; what counts then is the output of mpirun, the parent of this process.
    """
    if not sys.stdout.isatty() or hvkit.size() == 1:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
