"""The flags of the recipes; on several ranks, rank 0 alone tells what is wrong with them."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hvkit

T = TypeVar("T", int, float)

DRY_RUN_STEPS = 3


class Flags(argparse.Namespace):
    """The flags that all recipes have, as ``parse_flags`` returns them."""

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


class Parser(argparse.ArgumentParser):
    """Every rank is given the same flags; rank 0 alone tells what is wrong with them."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

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


POSITIVE = _checked(int, lambda n: n > 0, "a positive whole number")
COUNT = _checked(int, lambda n: n >= 0, "a whole number from 0")
RATE = _checked(float, lambda x: 0 < x < math.inf, "a positive number")
AMOUNT = _checked(float, lambda x: 0 <= x < math.inf, "a number from 0")
FRACTION = _checked(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
SEED = _checked(int, lambda n: 0 <= n < 2**31, "a whole number from 0 to 2147483647")


def parse_flags(description: str, argv: Sequence[str] | None = None) -> Flags:
    """Read the flags of an MNIST recipe from ``argv``, by default from the command line."""
    parser = Parser(description)
    add_training_flags(parser, batch_size=32, epochs=8, lr=0.02)
    add_data_flags(parser, "mnist", "MNIST", "MNIST's four IDX files, plain or .gz")
    flags = parser.parse_args(argv, namespace=Flags())
    check(parser, flags)
    return flags


def add_training_flags(parser: Parser, batch_size: int, epochs: int, lr: float) -> None:
    """Add the flags about training, with these defaults."""
    flag = parser.add_argument
    flag("--batch-size", type=POSITIVE, default=batch_size, help="images a step, per rank")
    flag("--test-batch-size", type=POSITIVE, default=500, help="test images at once, per rank")
    flag("--epochs", type=POSITIVE, default=epochs, help="passes over the training images")
    flag(
        "--lr", type=RATE, default=lr, help="learning rate of one rank; a step of N uses N times it"
    )
    flag("--momentum", type=FRACTION, default=0.9, help="momentum of SGD")
    flag("--seed", type=SEED, default=1, help="of initial weights, image order and dropout")
    flag("--log-interval", type=POSITIVE, default=100, help="steps between reports of the loss")
    flag("--output-dir", type=Path, help="folder for metrics.jsonl")
    flag("--dry-run", action="store_true", help=f"one epoch of images for {DRY_RUN_STEPS} steps")


def add_data_flags(parser: Parser, key: str, name: str, files: str) -> None:
    """Add the flags about where the images come from."""
    parser.add_argument("--data-dir", type=Path, help=f"folder with {files}")
    parser.add_argument(
        "--dataset",
        choices=("auto", key, "digits"),
        default="auto",
        help=f"auto: {name}, or scikit-learn's digits where {name} cannot be downloaded",
    )


def check(parser: Parser, flags: Flags) -> None:
    """Refuse flags that do not go together; bring those that follow from others into line."""
    if flags.dataset == "digits" and flags.data_dir is not None:
        parser.error(
            f"--dataset digits does not read --data-dir {flags.data_dir}: drop one of the two"
        )
    if flags.dry_run:
        flags.epochs = 1
