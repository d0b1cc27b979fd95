"""The flags of the CNN recipes."""

from argparse import BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path

from common.flags import (
    AMOUNT,
    COUNT,
    POSITIVE,
    Flags,
    Parser,
    add_data_flags,
    add_training_flags,
    check,
)
from common.schedule import SCHEDULES

# What the flags below have no say in.
_NOT_WITH_SYNTHETIC = (
    *("test_batch_size", "epochs", "log_interval", "dry_run", "data_dir", "dataset"),
    *("schedule", "warmup_epochs", "augment", "checkpoint_dir", "keep"),
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
    compression: str
    batch_norm: str
    synthetic: bool
    image_size: int
    classes: int
    untimed_steps: int
    rounds: int
    steps_per_round: int


def parse_cnn_flags(description: str, argv: Sequence[str] | None = None) -> CnnFlags:
    """Read the flags of a CNN recipe from ``argv``, by default from the command line."""
    parser = Parser(description)
    add_training_flags(parser, batch_size=64, epochs=10, lr=0.05)
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
    flag("--warmup-epochs", type=COUNT, default=1, help="the learning rate rises over so many")
    flag("--weight-decay", type=AMOUNT, default=1e-4, help="of kernels; biases and norms have none")
    flag(
        "--augment", action=BooleanOptionalAction, default=True, help="random crops, mirror images"
    )
    flag("--checkpoint-dir", type=Path, help="save there each epoch, and resume from the newest")
    flag("--keep", type=POSITIVE, default=3, help="checkpoints to keep")
    flag(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of what is computed; weights stay float32",
    )
    flag(
        "--compression",
        choices=("none", "fp16", "bf16"),
        default="none",
        help="of gradients on the wire",
    )
    flag(
        "--batch-norm",
        choices=("average", "local", "sync"),
        default="average",
        help="statistics: averaged over ranks, kept by each, or of the global batch",
    )


def _add_synthetic_flags(parser: Parser) -> None:
    group = parser.add_argument_group("throughput on random images")
    flag = group.add_argument
    flag("--synthetic", action="store_true", help="measure images per second; nothing is learned")
    flag("--image-size", type=POSITIVE, default=224, help="height and width in pixels")
    flag("--classes", type=POSITIVE, default=1000, help="logits")
    flag("--untimed-steps", type=COUNT, default=10, help="steps before the first round")
    flag("--rounds", type=POSITIVE, default=10, help="measurements of the throughput")
    flag("--steps-per-round", type=POSITIVE, default=10, help="steps that each of them takes")


def _check_synthetic(parser: Parser, flags: CnnFlags) -> None:
    """Refuse what has no effect, rather than let someone wait for it."""
    if flags.model == "resnet50" and not flags.synthetic:
        parser.error(
            "--model resnet50 is for images of ImageNet's size, which come with --synthetic only: "
            "add --synthetic, or use --model resnet20"
        )
    names = _NOT_WITH_SYNTHETIC if flags.synthetic else _ONLY_WITH_SYNTHETIC
    for name in names:
        if getattr(flags, name) != parser.get_default(name):
            flag = "--no-augment" if name == "augment" else f"--{name.replace('_', '-')}"
            how = "has no effect with" if flags.synthetic else "needs"
            parser.error(f"{flag} {how} --synthetic")
