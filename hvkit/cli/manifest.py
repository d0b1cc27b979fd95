"""``hvkit manifest``: ``mpijob`` and ``slurm``.

The tables describe each option completely. Its value replaces the option's name in the template,
``hvkit/manifest/mpijob.yaml`` or ``slurm_job.sh``.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkit.cli.arguments import (
    COMMAND_BEGINS,
    COMMAND_MISSING,
    NUMBER_OF_RANKS,
    add_watching,
    number_of_ranks,
    positive,
    watching,
)
from hvkit.cli.command_parser import CommandParser
from hvkit.cli.foreign_options import FOREIGN_IN_MANIFESTS
from hvkit.manifest import fields, mpijob, slurm_job
from hvkit.manifest.fields import HvkitRun, Size


@dataclass(frozen=True)
class _Option:
    """An option of ``hvkit manifest``."""

    name: str  # with a word for the value
    check: Callable[[str], Any]  # converts the text to a value; ValueError for invalid text
    help: str = ""  # {host} and {noun} are the format's words
    default: str | None = None  # as a user would write it
    required: bool = False
    repeated: bool = False
    aliases: tuple[str, ...] = ()


_SIZE = (
    _Option("-np N", number_of_ranks, "ranks", required=True, aliases=NUMBER_OF_RANKS[1:]),
    _Option(
        "--slots N",
        positive,
        "ranks per {host}, at most; the last {host} may have fewer",
        required=True,
    ),
    _Option("--gpus N", positive, "GPUs for each rank"),
)
_ENV = _Option(
    "--env NAME=VALUE",
    fields.assignment,
    "environment variable for all ranks, readable in the {noun}: no secrets",
    repeated=True,
)
_OF_MPIJOB = (
    _Option("--image IMAGE", fields.image, "of all pods", required=True),
    _Option("--name NAME", fields.job_name, "of the job", "hvkit"),
    _Option("--namespace NAMESPACE", fields.label, "(default: kubectl's)"),
    *_SIZE,
    _Option(
        "--cpus CORES",
        fields.cpus,
        "cores for each rank, such as 4, 0.5 or 500m (default: no limit)",
    ),
    _Option(
        "--memory AMOUNT", fields.memory, "memory for each rank, such as 16Gi (default: no limit)"
    ),
    _Option(
        "--shm-size AMOUNT",
        fields.memory,
        "shared memory of each worker, a part of its memory",
        "2Gi",
    ),
    _Option(
        "--volume CLAIM:PATH",
        fields.volume,
        "mount this PersistentVolumeClaim at PATH in the workers and the launcher, for data, "
        "checkpoints and logs: files elsewhere disappear with their pod. Pods on several nodes "
        "need a claim of access mode ReadWriteMany",
        repeated=True,
    ),
    _Option("--launcher-cpus CORES", fields.cpus, "cores for the pod that watches the ranks", "1"),
    _Option(
        "--launcher-memory AMOUNT",
        fields.memory,
        "memory for the pod that watches the ranks",
        "1Gi",
    ),
    _Option(
        "--retries N",
        fields.count,
        "times to start again after a failure, for scripts that resume",
        "0",
    ),
    _ENV,
)
_OF_SLURM = (
    *_SIZE,
    _Option("--job-name NAME", fields.slurm_name, default="hvkit"),
    _Option("--cpus N", positive, "cores for each rank"),
    _Option("--memory AMOUNT", fields.slurm_memory, "memory for each rank, such as 16G"),
    _Option("--time HH:MM:SS", fields.duration, "time limit"),
    _Option("--partition NAME", fields.slurm_names, "where to run"),
    _Option("--account NAME", fields.slurm_name, "account to charge"),
    _Option(
        "--sbatch OPTION",
        fields.sbatch_option,
        "a further option of sbatch, with an equals sign: `--sbatch=--qos=high`",
        repeated=True,
    ),
    _ENV,
)


@dataclass(frozen=True)
class _Format:
    """What ``hvkit manifest`` can write."""

    name: str  # the subcommand
    options: tuple[_Option, ...]
    write: Callable[[Mapping[str, Any], HvkitRun], str]  # from the values of options, by name
    host: str  # the word for a host
    noun: str  # the word for what is written
    help: str
    description: str


_FORMATS = (
    _Format(
        "mpijob",
        _OF_MPIJOB,
        mpijob.manifest,
        host="worker",
        noun="manifest",
        help="an MPIJob for the Kubeflow MPI operator, in YAML",
        description="Write an MPIJob (kubeflow.org/v2beta1) that runs COMMAND on every rank, for "
        "`kubectl apply -f -`. The image must be built from hvkit's Dockerfile.",
    ),
    _Format(
        "slurm",
        _OF_SLURM,
        slurm_job.script,
        host="host",
        noun="script",
        help="a batch script for Slurm",
        description="Write a script for `sbatch` that runs COMMAND on every rank, in the folder "
        "from which it is submitted and with the Python environment of this hvkit.",
    ),
)


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "manifest",
        help="write what Kubernetes or Slurm needs to start a script on several ranks",
        description="Write a description of a run to standard output.",
        allow_abbrev=False,
    )
    systems = parser.add_subparsers(title="systems", required=True, metavar="SYSTEM")
    for form in _FORMATS:
        _add_format(systems, form)


def _add_format(systems: "argparse._SubParsersAction[CommandParser]", form: _Format) -> None:
    required = [option.name for option in form.options if option.required]
    parser = systems.add_parser(
        form.name,
        help=form.help,
        usage=f"hvkit manifest {form.name} {' '.join(required)} [options] COMMAND ...",
        description=form.description,
        foreign=FOREIGN_IN_MANIFESTS,
        allow_abbrev=False,
    )
    for option in form.options:
        name, metavar = option.name.split()
        parser.add_argument(
            name,
            *option.aliases,
            type=_argument_type(option.check),
            metavar=metavar,
            help=_help(option, form),
            default=[] if option.repeated else option.default,
            action="append" if option.repeated else "store",
        )
    add_watching(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="a script, or a program with its arguments; options after it are its own",
    )
    parser.set_defaults(execute=_execute, form=form, refuse=parser.error)


def _help(option: _Option, form: _Format) -> str:
    text = option.help.format(host=form.host, noun=form.noun)
    if option.required:
        text += " (required)"
    if option.default is not None:
        text += f" (default: {option.default})"
    return text.strip() + ("; may be repeated" if option.repeated else "")


def _argument_type(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that reports the ``ValueError`` of ``check`` with its own message."""

    def converted(text: str) -> Any:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _execute(args: argparse.Namespace) -> int:
    try:
        run = _run_of(args)
        text = args.form.write(vars(args), run)
    except ValueError as error:
        args.refuse(str(error))
    size = run.size
    if size.idle:
        print(
            f"hvkit: note: {size.ranks} ranks on {size.hosts} x {size.slots} slots; idle slots on "
            f"the last host: {size.idle}, with the resources that are reserved for them",
            file=sys.stderr,
        )
    print(text, end="")
    return 0


def _run_of(args: argparse.Namespace) -> HvkitRun:
    """The ``hvkit run`` that the arguments describe; refuses those that do not go together."""
    # Not by argparse, which would complain about a missing option before an unknown one.
    for name in (option.name.split()[0] for option in args.form.options if option.required):
        if getattr(args, name.strip("-")) is None:
            raise ValueError(f"{name} is missing")
    return HvkitRun(
        size=Size.of(args.np, args.slots),
        command=_command_of(args),
        variables=_variables_of(args),
        options=_run_options_of(args),
    )


def _command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The command, without a ``--`` before it."""
    words: Sequence[str] = args.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ValueError(COMMAND_MISSING)
    if not command[0] or command[0].startswith("-"):
        raise ValueError(f"{COMMAND_BEGINS}, got {command[0]!r}")
    return tuple(map(fields.utf8, command))


def _variables_of(args: argparse.Namespace) -> dict[str, str]:
    """The environment variables for ranks; each may be set once."""
    variables: dict[str, str] = {}
    for name, value in args.env:
        if name in variables:
            raise ValueError(f"argument --env: {name} is set twice: set each variable once")
        variables[name] = value
    return variables


def _run_options_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The options for ``hvkit run``, one word each; refuses to show ranks that do not exist."""
    for some in args.show or ():
        if some[-1] >= args.np:
            raise ValueError(
                f"argument --show: there is no rank {some[-1]}: ranks are numbered from 0 to "
                f"{args.np - 1}"
            )
    return tuple(map(fields.utf8, watching(args)))
