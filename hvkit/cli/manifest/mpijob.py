"""``hvkit manifest mpijob``."""

import argparse

from hvkit.cli.manifest.arguments import (
    add_command,
    add_run,
    add_size,
    checked,
    command_of,
    run_options_of,
    size_of,
    variables_of,
)
from hvkit.manifest import MPIJob, names, quantity
from hvkit.manifest.volumes import volume
from hvkit.manifest.yaml_text import dumped


def add_to(systems: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = systems.add_parser(
        "mpijob",
        help="an MPIJob for the Kubeflow MPI operator, in YAML",
        usage="hvkit manifest mpijob --image IMAGE -np N --slots N [options] COMMAND ...",
        description="Write an MPIJob (kubeflow.org/v2beta1) that runs COMMAND on every rank, for "
        "`kubectl apply -f -`. Its image has to be built from hvkit's Dockerfile.",
        allow_abbrev=False,
    )
    parser.add_argument("--image", type=checked(names.image), help="of all pods (required)")
    parser.add_argument(
        "--name", type=checked(names.job_name), default="hvkit", help="of the job (default: hvkit)"
    )
    parser.add_argument("--namespace", type=checked(names.label), help="(default: kubectl's)")
    add_size(parser, "worker")
    _add_ranks(parser)
    _add_launcher(parser)
    add_run(parser, "manifest")
    add_command(parser, _rendered)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpus",
        type=checked(quantity.cpus),
        metavar="CORES",
        help="cores for each rank, such as 4, 0.5 or 500m (default: no limit)",
    )
    parser.add_argument(
        "--memory",
        type=checked(quantity.memory),
        metavar="AMOUNT",
        help="memory for each rank, such as 16Gi (default: no limit)",
    )
    parser.add_argument(
        "--shm-size",
        type=checked(quantity.memory),
        default="2Gi",
        metavar="AMOUNT",
        help="shared memory of each worker, a part of its memory (default: 2Gi)",
    )
    parser.add_argument(
        "--volume",
        dest="volumes",
        action="append",
        default=[],
        type=checked(volume),
        metavar="CLAIM:PATH",
        help="mount this PersistentVolumeClaim at PATH in the workers and the launcher, for data, "
        "checkpoints and logs: what is written elsewhere ends with its pod. Pods on several nodes "
        "need one of access mode ReadWriteMany; may be repeated",
    )


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher-cpus",
        type=checked(quantity.cpus),
        default="1",
        metavar="CORES",
        help="cores for the pod that watches the ranks (default: 1)",
    )
    parser.add_argument(
        "--launcher-memory",
        type=checked(quantity.memory),
        default="1Gi",
        metavar="AMOUNT",
        help="memory for the pod that watches the ranks (default: 1Gi)",
    )
    parser.add_argument(
        "--retries",
        type=_count,
        default=0,
        metavar="N",
        help="start again so often after a failure, for scripts that resume (default: 0)",
    )


def _rendered(args: argparse.Namespace) -> str:
    job = MPIJob(
        image=args.image,
        command=command_of(args),
        size=size_of(args),
        name=args.name,
        namespace=args.namespace,
        gpus=args.gpus,
        cpus=args.cpus,
        memory=args.memory,
        shared_memory=args.shm_size,
        launcher_cpus=args.launcher_cpus,
        launcher_memory=args.launcher_memory,
        retries=args.retries,
        variables=variables_of(args),
        volumes=tuple(args.volumes),
        run_options=run_options_of(args),
    )
    return dumped(job.document())


def _count(text: str) -> int:
    """An integer, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or a positive integer, got {text!r}")
    return int(text)
