"""The command-line flags of the GPT recipes."""

from collections.abc import Sequence
from pathlib import Path

from common.flags import (
    FRACTION,
    POSITIVE,
    RATE,
    SEED,
    CommonFlags,
    Parser,
    add_distribute_flags,
    add_mesh_flags,
    check_mesh,
)
from hvkit.mesh import SCHEDULES


class GptFlags(CommonFlags):
    """The flags of the GPT recipes, as ``parse_gpt_flags`` returns them."""

    layers: int
    width: int
    heads: int
    length: int
    dropout: float
    steps: int
    checkpoint_dir: Path | None
    save_every: int
    keep: int
    schedule: str


def parse_gpt_flags(
    description: str, argv: Sequence[str] | None = None, *, of_keras: bool = False
) -> GptFlags:
    """Read the flags of a GPT recipe; call it before ``hvkit.init``, as ``parse_flags``.

    Args:
        description: of the recipe.
        argv: None for the command line.
        of_keras: the recipe trains in ``fit``, which has one schedule only, and reports and saves
            where an epoch of ``fit`` ends.
    """
    parser = Parser(description)
    flag = parser.add_argument
    flag("--layers", type=POSITIVE, default=4, help="blocks of attention and MLP")
    flag("--width", type=POSITIVE, default=64, help="features of each character")
    flag("--heads", type=POSITIVE, default=4, help="heads of each attention")
    flag("--length", type=POSITIVE, default=64, help="characters in the model's context")
    flag("--dropout", type=FRACTION, default=0.0, help="share of activations that are dropped")
    flag("--batch-size", type=POSITIVE, default=32, help="lines of --length a step, per rank")
    flag("--test-batch-size", type=POSITIVE, default=64, help="held-out lines at once, per rank")
    flag("--steps", type=POSITIVE, default=300, help="updates of the weights")
    flag("--lr", type=RATE, default=0.01, help="highest learning rate, after the warm-up")
    add_distribute_flags(parser)
    add_mesh_flags(parser)
    flag("--checkpoint-dir", type=Path, help="folder to save to, and to resume from")
    flag("--keep", type=POSITIVE, default=3, help="checkpoints to keep")
    flag("--seed", type=SEED, default=1, help="seed of initial weights, order and dropout")
    flag("--log-interval", type=POSITIVE, default=50, help="steps between reports of the loss")
    if not of_keras:
        flag(
            "--schedule",
            choices=SCHEDULES,
            default="GPipe",
            help="schedule of the micro-batches in a pipeline",
        )
        flag("--save-every", type=POSITIVE, default=100, help="steps between checkpoints")
    flags = parser.parse_args(argv, namespace=GptFlags())
    check_mesh(parser, flags)
    if flags.width % flags.heads:
        parser.error(
            f"--heads must divide --width, got {flags.heads} heads and a width of {flags.width}"
        )
    if of_keras and flags.steps % flags.log_interval:
        parser.error(
            f"--log-interval must divide --steps, since fit reports where an epoch of that many "
            f"steps ends: got {flags.log_interval} and {flags.steps}"
        )
    return flags
