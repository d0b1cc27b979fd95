"""``hvkit manifest``: the one table of its options, and the text that their values make.

Functions in ``hvkit.manifest.systems`` and templates get the values by name: ``shm_size``.
"""

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvkit.cli.arguments import (
    add_command,
    add_watching,
    command_of,
    number_of_ranks,
    positive,
    watching,
    whole,
)
from hvkit.cli.command_line import FOREIGN_IN_MANIFESTS, CommandParser, checked
from hvkit.launching.prepare import NUMBER_OF_RANKS
from hvkit.manifest import fields, systems


@dataclass(frozen=True)
class System:
    """A system for which ``hvkit manifest`` writes."""

    name: str
    write: Callable[[Mapping[str, Any], Path | None], str]  # a function of ``systems``
    host: str  # the word for a host
    noun: str  # the word for what is written
    help: str
    description: str
    starts_hvkit_run: bool = True  # so that its options have a reader


@dataclass(frozen=True)
class Option:
    """An option, in the systems that have it."""

    name: str  # with a word for the value
    of: Mapping[str, Callable[[str], Any]]  # by system: text to value; ValueError for invalid text
    help: str = ""  # ``{host}`` and ``{noun}`` are the system's words
    default: str | None = None  # as a user would write it
    required: bool = False
    repeated: type[list[Any]] | type[dict[str, Any]] | None = None  # what several values make
    aliases: tuple[str, ...] = ()


SYSTEMS = (
    System(
        "mpijob",
        systems.mpijob,
        host="worker",
        noun="manifest",
        help="an MPIJob for the Kubeflow MPI operator, in YAML",
        description="Write an MPIJob (kubeflow.org/v2beta1) that runs COMMAND on every rank, for "
        "`kubectl apply -f -`. The image must be built from hvkit's Dockerfile.",
    ),
    System(
        "trainjob",
        systems.trainjob,
        host="worker",
        noun="manifest",
        help="a TrainJob for the Kubeflow Trainer, with its runtime, in YAML",
        description="Write a TrainingRuntime and a TrainJob (trainer.kubeflow.org/v1alpha1, of the "
        "Kubeflow Trainer 2) that run COMMAND on every rank, for `kubectl apply -f -`. The image "
        "must be built from hvkit's Dockerfile.",
    ),
    System(
        "slurm",
        systems.slurm,
        host="host",
        noun="script",
        help="a batch script for Slurm",
        description="Write a script for `sbatch` that runs COMMAND on every rank, in the folder "
        "from which it is submitted and with the Python environment of this hvkit.",
    ),
    System(
        "sagemaker",
        systems.sagemaker,
        host="instance",
        noun="request",
        help="a request CreateTrainingJob of Amazon SageMaker, in JSON",
        description="Write a request that runs COMMAND on every rank, for `aws sagemaker "
        "create-training-job --cli-input-json file://FILE`. The image must be built from hvkit's "
        "Dockerfile and add the key that its hosts share (`RUN hvkit-ssh-key`); keep it private.",
    ),
    System(
        "azureml",
        systems.azureml,
        host="node",
        noun="job",
        help="a command job of Azure Machine Learning, in YAML",
        description="Write a job that runs COMMAND on every rank, for `az ml job create --file "
        "FILE`. Azure starts the ranks with the mpirun of the image, which must have hvkit, Open "
        "MPI and a Horovod that it has built.",
        starts_hvkit_run=False,
    ),
)
_ALL = tuple(system.name for system in SYSTEMS)
_KUBERNETES = ("mpijob", "trainjob")
_IN_IMAGES = ("mpijob", "trainjob", "sagemaker", "azureml")


def _in(systems: tuple[str, ...], check: Callable[[str], Any]) -> dict[str, Callable[[str], Any]]:
    return dict.fromkeys(systems, check)


OPTIONS = (
    Option("--image IMAGE", _in(_IN_IMAGES, fields.image), "of all {host}s", required=True),
    Option(
        "--name NAME",
        {
            **_in(_KUBERNETES, fields.job_name),
            "slurm": fields.slurm_name,
            "sagemaker": fields.sagemaker_name,
            "azureml": fields.one_line,
        },
        "of the job",
        "hvkit",
    ),
    Option("--namespace NAMESPACE", _in(_KUBERNETES, fields.label), "(default: kubectl's)"),
    Option(
        "-np N", _in(_ALL, number_of_ranks), "ranks", required=True, aliases=NUMBER_OF_RANKS[1:]
    ),
    Option(
        "--slots N",
        _in(_ALL, positive),
        "ranks per {host}, at most; the last {host} may have fewer",
        required=True,
    ),
    Option("--gpus N", _in((*_KUBERNETES, "slurm"), positive), "GPUs for each rank"),
    Option(
        "--cpus CORES",
        {**_in(_KUBERNETES, fields.cpus), "slurm": positive},
        "cores for each rank; for Kubernetes also 0.5 or 500m (default: no limit, or Slurm's own)",
    ),
    Option(
        "--memory AMOUNT",
        {**_in(_KUBERNETES, fields.memory), "slurm": fields.slurm_memory},
        "memory for each rank, 16Gi for Kubernetes, 16G for Slurm (default: no limit, or Slurm's)",
    ),
    Option(
        "--shm-size AMOUNT",
        {**_in(_KUBERNETES, fields.memory), "azureml": fields.docker_memory},
        "shared memory of each {host}, a part of its memory",
        "2Gi",
    ),
    Option(
        "--volume CLAIM:PATH",
        _in(_KUBERNETES, fields.volume),
        "mount this PersistentVolumeClaim at PATH in the workers and the launcher, for data, "
        "checkpoints and logs: files elsewhere disappear with their pod. Pods on several nodes "
        "need a claim of access mode ReadWriteMany",
        repeated=dict,
    ),
    Option(
        "--pull-secret NAME",
        _in(_KUBERNETES, fields.subdomain),
        "the Secret with the password of the image's registry",
        repeated=list,
    ),
    Option(
        "--node-label KEY=VALUE",
        _in(_KUBERNETES, fields.node_label),
        "run the {host}s on nodes with this label only",
        repeated=dict,
    ),
    Option(
        "--tolerate TAINT",
        _in(_KUBERNETES, fields.toleration),
        "allow nodes with this taint, KEY[=VALUE][:EFFECT], such as nvidia.com/gpu",
        repeated=list,
    ),
    Option(
        "--queue NAME",
        _in(_KUBERNETES, fields.queue),
        "the queue of Kueue in which the job waits for room",
    ),
    Option(
        "--input NAME=PLACE",
        {"sagemaker": fields.s3_input, "azureml": fields.azure_folder},
        "data for all ranks: an s3:// URI, which SageMaker copies to /opt/ml/input/data/NAME; or "
        "Azure's path of a folder, which replaces ${{{{inputs.NAME}}}} in COMMAND",
        repeated=dict,
    ),
    Option("--output URI", {"sagemaker": fields.s3}, "the s3:// URI for results", required=True),
    Option(
        "--output NAME=PLACE",
        {"azureml": fields.azure_folder},
        "Azure's path of a folder for results, which replaces ${{{{outputs.NAME}}}} in COMMAND",
        repeated=dict,
    ),
    Option("--role ARN", {"sagemaker": fields.one_line}, "the role of the job", required=True),
    Option(
        "--instance-type TYPE",
        {"sagemaker": fields.one_line},
        "of each {host}, such as ml.p4d.24xlarge",
        required=True,
    ),
    Option("--disk GB", {"sagemaker": positive}, "gigabytes of storage of each {host}", "30"),
    Option(
        "--spot HH:MM:SS",
        {"sagemaker": fields.seconds},
        "use spare capacity, which is cheaper and may be taken away: the longest time until the "
        "job's end with all waits; the job starts again, for scripts that resume",
    ),
    Option(
        "--checkpoints URI",
        {"sagemaker": fields.s3},
        "the s3:// URI that /opt/ml/checkpoints is copied to, and from when the job starts again",
    ),
    Option(
        "--subnet ID",
        {"sagemaker": fields.one_line},
        "run in this subnet of your network, with --security-group",
        repeated=list,
    ),
    Option(
        "--security-group ID",
        {"sagemaker": fields.one_line},
        "the rules for traffic there, which must let the {host}s reach each other",
        repeated=list,
    ),
    Option("--output-key KEY", {"sagemaker": fields.one_line}, "encrypts the results: a KMS key"),
    Option(
        "--disk-key KEY",
        {"sagemaker": fields.one_line},
        "encrypts the storage of each {host}: a KMS key",
    ),
    Option("--compute NAME", {"azureml": fields.azure_name}, "the cluster", required=True),
    Option("--code DIR", {"azureml": fields.one_line}, "upload this folder and start in it"),
    Option("--experiment NAME", {"azureml": fields.azure_name}, "that the job belongs to"),
    Option(
        "--identity WHO",
        {"azureml": fields.azure_identity},
        "with whose rights the job reads and writes: user (whoever submits it), managed (the "
        "cluster's), or the client ID of one of the cluster's identities",
    ),
    Option(
        "--launcher-cpus CORES",
        _in(_KUBERNETES, fields.cpus),
        "cores for the pod that watches the ranks",
        "1",
    ),
    Option(
        "--launcher-memory AMOUNT",
        _in(_KUBERNETES, fields.memory),
        "memory for the pod that watches the ranks",
        "1Gi",
    ),
    Option(
        "--retries N",
        _in(_KUBERNETES, whole),
        "times to start again after a failure, for scripts that resume",
        "0",
    ),
    Option(
        "--time HH:MM:SS",
        {"slurm": fields.duration, **_in(("sagemaker", "azureml"), fields.seconds)},
        "time limit; SageMaker's default is a day",
    ),
    Option("--partition NAME", {"slurm": fields.slurm_names}, "where to run"),
    Option("--account NAME", {"slurm": fields.slurm_name}, "account to charge"),
    Option(
        "--sbatch OPTION",
        {"slurm": fields.sbatch_option},
        "a further option of sbatch, with an equals sign: `--sbatch=--qos=high`",
        repeated=list,
    ),
    Option(
        "--env NAME=VALUE",
        _in(_ALL, fields.assignment),
        "environment variable for all ranks, readable in the {noun}: no secrets",
        repeated=dict,
    ),
    Option(
        "--secret-env NAME=SECRET:KEY",
        _in(_KUBERNETES, fields.secret_variable),
        "environment variable for all ranks, from this key of a Secret",
        repeated=dict,
    ),
    Option(
        "--template FILE",
        _in(_ALL, Path),
        "fill in this template, a changed copy of one in hvkit/manifest/templates/",
    ),
)
"""The options, in the order in which help shows them."""


def add_to(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "manifest",
        help="write what Kubernetes, Slurm, SageMaker or Azure ML needs to start a script on ranks",
        description="Write a description of a run to standard output.",
        allow_abbrev=False,
    )
    parsers = parser.add_subparsers(title="systems", required=True, metavar="SYSTEM")
    for system in SYSTEMS:
        _add_system(parsers, system)


def _add_system(parsers: "argparse._SubParsersAction[CommandParser]", system: System) -> None:
    required = [option.name for option in _options_of(system) if option.required]
    parser = parsers.add_parser(
        system.name,
        help=system.help,
        usage=textwrap.fill(
            f"hvkit manifest {system.name} {' '.join(required)} [options] COMMAND ...",
            width=80,
            subsequent_indent="    ",
            break_on_hyphens=False,
        ),
        description=system.description,
        foreign=FOREIGN_IN_MANIFESTS,
        allow_abbrev=False,
    )
    for option in _options_of(system):
        name, metavar = option.name.split()
        parser.add_argument(
            name,
            *option.aliases,
            type=checked(option.of[system.name]),
            metavar=metavar,
            help=_help(option, system),
            default=[] if option.repeated else option.default,
            action="append" if option.repeated else "store",
        )
    if system.starts_hvkit_run:
        add_watching(parser)
    add_command(parser)
    parser.set_defaults(execute=_execute, system=system)


def _help(option: Option, system: System) -> str:
    text = option.help.format(host=system.host, noun=system.noun)
    required = " (required)" if option.required else ""
    default = "" if option.default is None else f" (default: {option.default})"
    return f"{text}{required}{default}".strip() + ("; may be repeated" if option.repeated else "")


def _execute(args: argparse.Namespace) -> int:
    try:
        values = _values_of(args)
        text = args.system.write(values, values.pop("template"))
    except ValueError as error:
        args.refuse(str(error))
    ranks, hosts, slots = (values[name] for name in ("np", "hosts", "slots"))
    if idle := hosts * slots - ranks:
        print(
            f"hvkit: note: {ranks} ranks on {hosts} x {slots} slots; idle slots on the last host: "
            f"{idle}, with the resources that are reserved for them",
            file=sys.stderr,
        )
    print(text, end="")
    return 0


def _values_of(args: argparse.Namespace) -> dict[str, Any]:
    """The values for ``hvkit.manifest.systems``; refuses arguments that do not go together."""
    values = {}
    for option in _options_of(args.system):
        name = option.name.split()[0]
        dest = name.strip("-").replace("-", "_")
        given = getattr(args, dest)
        # Not by argparse, which would complain about a missing option before an unknown one.
        if option.required and given is None:
            raise ValueError(f"{name} is missing")
        if option.repeated is dict:
            for each, times in Counter(each for each, _ in given).items():
                if times > 1:
                    raise ValueError(f"argument {name}: {each} is set {times} times: set it once")
            given = dict(given)
        values[dest] = given
    # As with mpirun, the last host may run fewer ranks than the others. All of its slots still
    # reserve resources: Kubernetes and Slurm describe all hosts at once.
    ranks, slots = args.np, min(args.slots, args.np)
    values |= {"slots": slots, "hosts": -(-ranks // slots)}
    if args.system.starts_hvkit_run:
        for shown in args.show or ():
            if shown[-1] >= ranks:
                raise ValueError(
                    f"argument --show: there is no rank {shown[-1]}: ranks are numbered from 0 to "
                    f"{ranks - 1}"
                )
        values |= {"grace": args.grace, "max_restarts": args.max_restarts}
        values["run_options"] = tuple(map(fields.utf8, watching(args)))
    command = tuple(map(fields.utf8, command_of(args)))
    return {**values, "command": command}


def _options_of(system: System) -> tuple[Option, ...]:
    return tuple(option for option in OPTIONS if system.name in option.of)
