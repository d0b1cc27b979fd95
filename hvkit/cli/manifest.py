"""``hvkit manifest``: ``mpijob`` and ``slurm``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvkit.cli.arguments import (
    COMMAND_BEGINS,
    COMMAND_MISSING,
    add_number_of_ranks,
    add_watching,
    positive,
    watching,
)
from hvkit.cli.command_parser import CommandParser
from hvkit.cli.foreign_options import FOREIGN_IN_MANIFESTS
from hvkit.manifest import MPIJob, Size, SlurmJob, fields
from hvkit.manifest.mpijob import volume, yaml_text

_T = TypeVar("_T")


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "manifest",
        help="write what Kubernetes or Slurm needs to start a script on several ranks",
        description="Write a description of a run to standard output.",
        allow_abbrev=False,
    )
    systems = parser.add_subparsers(title="systems", required=True, metavar="SYSTEM")
    _add_mpijob(systems)
    _add_slurm(systems)


def _add_mpijob(systems: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = systems.add_parser(
        "mpijob",
        help="an MPIJob for the Kubeflow MPI operator, in YAML",
        usage="hvkit manifest mpijob --image IMAGE -np N --slots N [options] COMMAND ...",
        description="Write an MPIJob (kubeflow.org/v2beta1) that runs COMMAND on every rank, for "
        "`kubectl apply -f -`. The image must be built from hvkit's Dockerfile.",
        foreign=FOREIGN_IN_MANIFESTS,
        allow_abbrev=False,
    )
    parser.add_argument("--image", type=_checked(fields.image), help="of all pods (required)")
    parser.add_argument(
        "--name",
        type=_checked(fields.job_name),
        default="hvkit",
        help="of the job (default: hvkit)",
    )
    parser.add_argument("--namespace", type=_checked(fields.label), help="(default: kubectl's)")
    _add_size(parser, "worker")
    _add_worker_options(parser)
    _add_launcher_options(parser)
    _add_run_options(parser, "manifest")
    _add_command(parser, _mpijob)


def _add_worker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpus",
        type=_checked(fields.cpus),
        metavar="CORES",
        help="cores for each rank, such as 4, 0.5 or 500m (default: no limit)",
    )
    parser.add_argument(
        "--memory",
        type=_checked(fields.memory),
        metavar="AMOUNT",
        help="memory for each rank, such as 16Gi (default: no limit)",
    )
    parser.add_argument(
        "--shm-size",
        type=_checked(fields.memory),
        default="2Gi",
        metavar="AMOUNT",
        help="shared memory of each worker, a part of its memory (default: 2Gi)",
    )
    parser.add_argument(
        "--volume",
        dest="volumes",
        action="append",
        default=[],
        type=_checked(volume),
        metavar="CLAIM:PATH",
        help="mount this PersistentVolumeClaim at PATH in the workers and the launcher, for data, "
        "checkpoints and logs: files elsewhere disappear with their pod. Pods on several nodes "
        "need a claim of access mode ReadWriteMany; may be repeated",
    )


def _add_launcher_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher-cpus",
        type=_checked(fields.cpus),
        default="1",
        metavar="CORES",
        help="cores for the pod that watches the ranks (default: 1)",
    )
    parser.add_argument(
        "--launcher-memory",
        type=_checked(fields.memory),
        default="1Gi",
        metavar="AMOUNT",
        help="memory for the pod that watches the ranks (default: 1Gi)",
    )
    parser.add_argument(
        "--retries",
        type=_count,
        default=0,
        metavar="N",
        help="times to start again after a failure, for scripts that resume (default: 0)",
    )


def _mpijob(args: argparse.Namespace) -> str:
    job = MPIJob(
        image=args.image,
        command=_command_of(args),
        size=_size_of(args),
        name=args.name,
        namespace=args.namespace,
        gpus=args.gpus,
        cpus=args.cpus,
        memory=args.memory,
        shared_memory=args.shm_size,
        launcher_cpus=args.launcher_cpus,
        launcher_memory=args.launcher_memory,
        retries=args.retries,
        grace=args.grace,
        variables=_variables_of(args),
        volumes=tuple(args.volumes),
        run_options=_run_options_of(args),
    )
    return yaml_text(job.document())


def _add_slurm(systems: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = systems.add_parser(
        "slurm",
        help="a batch script for Slurm",
        usage="hvkit manifest slurm -np N --slots N [options] COMMAND ...",
        description="Write a script for `sbatch` that runs COMMAND on every rank, in the folder "
        "from which it is submitted and with the Python environment of this hvkit.",
        foreign=FOREIGN_IN_MANIFESTS,
        allow_abbrev=False,
    )
    _add_size(parser, "host")
    parser.add_argument(
        "--job-name",
        type=_checked(fields.slurm_name),
        default="hvkit",
        metavar="NAME",
        help="(default: hvkit)",
    )
    parser.add_argument("--cpus", type=positive, metavar="N", help="cores for each rank")
    parser.add_argument(
        "--memory",
        type=_checked(fields.slurm_memory),
        metavar="AMOUNT",
        help="memory for each rank, such as 16G",
    )
    parser.add_argument(
        "--time", type=_checked(fields.duration), metavar="HH:MM:SS", help="time limit"
    )
    parser.add_argument(
        "--partition", type=_checked(fields.slurm_names), metavar="NAME", help="where to run"
    )
    parser.add_argument(
        "--account", type=_checked(fields.slurm_name), metavar="NAME", help="account to charge"
    )
    parser.add_argument(
        "--sbatch",
        dest="sbatch_options",
        action="append",
        default=[],
        type=_checked(fields.sbatch_option),
        metavar="OPTION",
        help="a further option of sbatch, with an equals sign: `--sbatch=--qos=high`; "
        "may be repeated",
    )
    _add_run_options(parser, "script")
    _add_command(parser, _batch_script)


def _batch_script(args: argparse.Namespace) -> str:
    return SlurmJob(
        command=_command_of(args),
        size=_size_of(args),
        name=args.job_name,
        gpus=args.gpus,
        cpus=args.cpus,
        memory=args.memory,
        time=args.time,
        partition=args.partition,
        account=args.account,
        variables=_variables_of(args),
        sbatch_options=tuple(args.sbatch_options),
        run_options=_run_options_of(args),
    ).script()


def _add_size(parser: argparse.ArgumentParser, host: str) -> None:
    """Add the numbers of ranks, slots and GPUs; ``host`` is the system's word for a host."""
    add_number_of_ranks(parser, "required")
    parser.add_argument(
        "--slots",
        type=positive,
        metavar="N",
        help=f"ranks per {host}, at most; the last {host} may have fewer (required)",
    )
    parser.add_argument("--gpus", type=positive, default=0, metavar="N", help="GPUs for each rank")


def _add_run_options(parser: argparse.ArgumentParser, manifest: str) -> None:
    """Add the options that go on to ``hvkit run``; ``manifest`` names the text that is written."""
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=_checked(fields.assignment),
        metavar="NAME=VALUE",
        help=f"environment variable for all ranks, readable in the {manifest}: no secrets; "
        "may be repeated",
    )
    add_watching(parser)


def _add_command(
    parser: argparse.ArgumentParser, manifest: Callable[[argparse.Namespace], str]
) -> None:
    """Add the command that ranks run; ``manifest`` turns the arguments into the text to print."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND ...",
        help="a script, or a program with its arguments; options after it are its own",
    )
    parser.set_defaults(execute=_execute, manifest=manifest, refuse=parser.error)


def _execute(args: argparse.Namespace) -> int:
    try:
        _check_required(args)
        text = args.manifest(args)
    except ValueError as error:
        args.refuse(str(error))
    size = _size_of(args)
    if size.idle:
        print(
            f"hvkit: note: {size.ranks} ranks on {size.hosts} x {size.slots} slots; idle slots on "
            f"the last host: {size.idle}, with the resources that are reserved for them",
            file=sys.stderr,
        )
    print(text, end="")
    return 0


def _check_required(args: argparse.Namespace) -> None:
    """Require options here: argparse would complain about a missing one before an unknown one."""
    for option, name in (("--image", "image"), ("-np", "np"), ("--slots", "slots")):
        if getattr(args, name, "not an option") is None:
            raise ValueError(f"{option} is missing")


def _size_of(args: argparse.Namespace) -> Size:
    return Size.of(args.np, args.slots)


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


def _command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The command, without a ``--`` before it."""
    words: Sequence[str] = args.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ValueError(COMMAND_MISSING)
    if not command[0] or command[0].startswith("-"):
        raise ValueError(f"{COMMAND_BEGINS}, got {command[0]!r}")
    return tuple(map(fields.utf8, command))


def _checked(check: Callable[[str], _T]) -> Callable[[str], _T]:
    """An argparse type that reports the ``ValueError`` of ``check`` with its own message."""

    def converted(text: str) -> _T:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _count(text: str) -> int:
    """An integer, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or a positive integer, got {text!r}")
    return int(text)
