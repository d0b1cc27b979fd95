"""The command-line flags of the MNIST and CNN recipes."""

import argparse
import ast
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hvkit
import hvkit.compression as compression_kinds
from common.schedule import SCHEDULES
from hvkit import strategies
from hvkit.compression import BY_NAME, Compression
from hvkit.mesh import AXES, position_in
from hvkit.strategies.strategy import Strategy, strategies_in

T = TypeVar("T", int, float)

DRY_RUN_STEPS = 3

STRATEGIES = [*strategies_in(strategies)]
# Base classes, and compressions that a word such as "int8" names, are not public names of hvkit.
COMPRESSIONS = [name for name in compression_kinds.__all__ if name in hvkit.__all__]


class CommonFlags(argparse.Namespace):
    """The flags of all recipes; ``mesh`` and ``microbatches`` are None if not given."""

    batch_size: int
    test_batch_size: int
    lr: float
    seed: int
    strategy: Strategy
    compression: str | Compression
    log_interval: int
    mesh: hvkit.Mesh | None = None
    microbatches: int | None = None


class Flags(CommonFlags):
    """The flags of the recipes for images, as ``parse_flags`` returns them."""

    epochs: int
    momentum: float
    data_dir: Path | None
    dataset: str
    output_dir: Path | None
    dry_run: bool


class Parser(argparse.ArgumentParser):
    """Prints help and errors on rank 0 only: every rank gets the same flags."""

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
        hvkit.barrier()  # stop_if_any in ranks.py says why
        self.exit(2)


def _checked(kind: Callable[[str], T], accepts: Callable[[T], bool], wanted: str) -> Any:
    """An argparse type: ``kind`` within a range, and an error that names what is accepted."""

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


def parse_object(text: str, kinds: Sequence[str], words: Sequence[str] = ()) -> Any:
    """One of ``words``, or an object of hvkit made from ``NAME`` or ``NAME:key=value,...``."""
    name, _, settings = text.partition(":")
    if text in words:
        return text
    by_name = {kind.lower(): getattr(hvkit, kind) for kind in kinds}
    if name.lower() not in by_name:
        wanted = ", ".join([*words, *kinds])
        raise argparse.ArgumentTypeError(f"must be one of {wanted}, got {name!r}")
    values = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        try:
            values[key.strip()] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            values[key.strip()] = value
        if not equals:
            raise argparse.ArgumentTypeError(f"settings are key=value, got {setting!r}")
    try:
        return by_name[name.lower()](**values)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def strategy(text: str) -> Strategy:
    """The argparse type of ``--strategy``."""
    return parse_object(text, STRATEGIES)  # type: ignore[no-any-return]


def compression(text: str) -> str | Compression:
    """The argparse type of ``--compression``."""
    return parse_object(text, COMPRESSIONS, words=tuple(BY_NAME))  # type: ignore[no-any-return]


def mesh(text: str) -> hvkit.Mesh:
    """The argparse type of ``--mesh``: ``pipeline=2,data=2``."""
    lengths: dict[str, int] = {}
    for setting in text.split(","):
        axis, _, number = (part.strip() for part in setting.partition("="))
        if axis not in AXES or axis in lengths or not number.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(
                f"must be AXIS=RANKS,... with each of the axes {', '.join(AXES)} at most once, as "
                f"in pipeline=2,data=2, got {setting!r}"
            )
        lengths[axis] = int(number)
    try:
        return hvkit.Mesh(**lengths)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_flags(
    description: str, argv: Sequence[str] | None = None, *, meshes: bool = False
) -> Flags:
    """Read the flags of an MNIST recipe from ``argv``, by default from the command line.

    Args:
        description: of the recipe, for its help.
        argv: the words after the script's name.
        meshes: whether the recipe can divide its model; it then has the flag ``--mesh``. Call this
            before ``hvkit.init``, because Horovod must know when it starts that there is a mesh.
    """
    parser = Parser(description)
    add_training_flags(parser, batch_size=32, epochs=8, lr=0.02)
    if meshes:
        add_mesh_flags(parser)
    add_data_flags(parser, "mnist", "MNIST", "MNIST's four IDX files, plain or .gz")
    flags = parser.parse_args(argv, namespace=Flags())
    check(parser, flags)
    return flags


def add_training_flags(parser: Parser, batch_size: int, epochs: int, lr: float) -> None:
    """Add the flags for training on images, with these defaults."""
    flag = parser.add_argument
    flag("--batch-size", type=POSITIVE, default=batch_size, help="images a step, per rank")
    flag("--test-batch-size", type=POSITIVE, default=500, help="test images at once, per rank")
    flag("--epochs", type=POSITIVE, default=epochs, help="passes over the training images")
    flag("--lr", type=RATE, default=lr, help="learning rate of one rank; N ranks use N times it")
    flag("--momentum", type=FRACTION, default=0.9, help="momentum of SGD")
    add_distribute_flags(parser)
    flag("--seed", type=SEED, default=1, help="seed of initial weights, image order and dropout")
    flag("--log-interval", type=POSITIVE, default=100, help="steps between reports of the loss")
    flag("--output-dir", type=Path, help="folder for a record of the run: hvkit report shows it")
    flag("--dry-run", action="store_true", help=f"one epoch of images for {DRY_RUN_STEPS} steps")


def add_distribute_flags(parser: Parser) -> None:
    """Add ``--strategy`` and ``--compression``, which every recipe passes to ``distribute``."""
    flag = parser.add_argument
    flag(
        "--strategy",
        type=strategy,
        default=hvkit.Synchronous(),
        metavar="NAME[:key=value,...]",
        help=f"how ranks train together: {', '.join(STRATEGIES)}; DiLoCo:every=50 sets a value",
    )
    flag(
        "--compression",
        type=compression,
        default="none",
        metavar="NAME[:key=value,...]",
        help=f"fewer bytes to send: {', '.join([*BY_NAME, *COMPRESSIONS])}, as in TopK:ratio=0.01",
    )


def add_mesh_flags(parser: Parser) -> None:
    """Add the flags that divide the model among ranks."""
    flag = parser.add_argument
    flag(
        "--mesh",
        type=mesh,
        metavar="AXIS=RANKS,...",
        help=f"divide the model, as in pipeline=2,data=2; axes: {', '.join(AXES)}",
    )
    flag(
        "--microbatches",
        type=POSITIVE,
        help="parts of a batch in a pipeline (by default four for each stage)",
    )


def check_mesh(parser: Parser, flags: CommonFlags) -> None:
    """Reject a mesh that the ranks cannot form, and ``--microbatches`` without a pipeline."""
    try:
        pipeline = 1 if flags.mesh is None else position_in(flags.mesh).mesh.pipeline
    except ValueError as error:
        parser.error(f"--mesh: {error}")
    # In one process any mesh is accepted: it holds the whole model.
    if flags.microbatches is not None and pipeline == 1 and (not flags.mesh or hvkit.size() > 1):
        parser.error(f"--microbatches {flags.microbatches} needs a pipeline: add --mesh pipeline=2")


def add_data_flags(parser: Parser, key: str, name: str, files: str) -> None:
    """Add the flags for the source of the images."""
    parser.add_argument("--data-dir", type=Path, help=f"folder with {files}")
    parser.add_argument(
        "--dataset",
        choices=("auto", key, "digits"),
        default="auto",
        help=f"auto: {name}, or scikit-learn's digits where {name} cannot be downloaded",
    )


def check(parser: Parser, flags: Flags) -> None:
    """Reject flags that contradict each other; apply ``--dry-run`` to the others."""
    check_mesh(parser, flags)
    if flags.dataset == "digits" and flags.data_dir is not None:
        parser.error(
            f"--dataset digits does not read --data-dir {flags.data_dir}: drop one of the two"
        )
    if flags.dry_run:
        flags.epochs = 1


# Flags without effect on throughput, and flags without effect on training.
_NOT_WITH_SYNTHETIC = (
    *("test_batch_size", "epochs", "log_interval", "dry_run", "data_dir", "dataset"),
    *("schedule", "warmup_epochs", "augment", "checkpoint_dir", "keep", "output_dir"),
)
_ONLY_WITH_SYNTHETIC = ("image_size", "classes", "untimed_steps", "rounds", "steps_per_round")


class CnnFlags(Flags):
    """The flags of the CNN recipes, as ``parse_cnn_flags`` returns them."""

    model: str
    schedule: str
    warmup_epochs: int
    weight_decay: float
    augment: bool
    checkpoint_dir: Path | None
    keep: int
    precision: str
    batch_norm: str
    synthetic: bool
    image_size: int
    classes: int
    untimed_steps: int
    rounds: int
    steps_per_round: int


def parse_cnn_flags(
    description: str, argv: Sequence[str] | None = None, *, meshes: bool = False
) -> CnnFlags:
    """Read the flags of a CNN recipe, as ``parse_flags`` reads those of an MNIST recipe."""
    parser = Parser(description)
    add_training_flags(parser, batch_size=64, epochs=10, lr=0.05)
    if meshes:
        add_mesh_flags(parser)
    add_data_flags(parser, "cifar10", "CIFAR-10", "CIFAR-10's binary files, plain or .gz")
    _add_recipe_flags(parser)
    _add_synthetic_flags(parser)
    flags = parser.parse_args(argv, namespace=CnnFlags())
    _check_synthetic(parser, flags)
    check(parser, flags)
    return flags


def _add_recipe_flags(parser: Parser) -> None:
    flag = parser.add_argument
    flag("--model", choices=("resnet20", "resnet50"), default="resnet20", help="the network")
    flag("--schedule", choices=SCHEDULES, default="cosine", help="how the learning rate decays")
    flag("--warmup-epochs", type=COUNT, default=1, help="epochs over which the learning rate rises")
    flag(
        "--weight-decay",
        type=AMOUNT,
        default=1e-4,
        help="weight decay of kernels; biases and norms have none",
    )
    flag(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="random crops, mirror images",
    )
    flag(
        "--checkpoint-dir", type=Path, help="folder to save to after each epoch and to resume from"
    )
    flag("--keep", type=POSITIVE, default=3, help="checkpoints to keep")
    flag(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the computation; weights stay float32",
    )
    flag(
        "--batch-norm",
        choices=("average", "local", "sync"),
        default="average",
        help="statistics averaged over ranks, separate on each rank, or of the global batch",
    )


def _add_synthetic_flags(parser: Parser) -> None:
    group = parser.add_argument_group("throughput on random images")
    flag = group.add_argument
    flag("--synthetic", action="store_true", help="measure images per second; nothing is learned")
    flag("--image-size", type=POSITIVE, default=224, help="height and width in pixels")
    flag("--classes", type=POSITIVE, default=1000, help="number of logits")
    flag("--untimed-steps", type=COUNT, default=10, help="steps before the first round")
    flag("--rounds", type=POSITIVE, default=10, help="number of measurements")
    flag("--steps-per-round", type=POSITIVE, default=10, help="steps in each measurement")


def _check_synthetic(parser: Parser, flags: CnnFlags) -> None:
    """Reject flags that would have no effect."""
    if flags.model == "resnet50" and not flags.synthetic:
        parser.error(
            "--model resnet50 is for images of ImageNet's size, which only --synthetic has: "
            "add --synthetic, or use --model resnet20"
        )
    names = _NOT_WITH_SYNTHETIC if flags.synthetic else _ONLY_WITH_SYNTHETIC
    for name in names:
        if getattr(flags, name) != parser.get_default(name):
            flag = "--no-augment" if name == "augment" else f"--{name.replace('_', '-')}"
            how = "has no effect with" if flags.synthetic else "needs"
            parser.error(f"{flag} {how} --synthetic")
    if flags.synthetic and flags.mesh is not None:
        parser.error("--synthetic measures ranks that hold the whole model: drop it or --mesh")
