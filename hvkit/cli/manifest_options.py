"""The one table of options of all manifests: their names, what they accept, and who has them.

A system's module in ``hvkit.manifest`` gets their values by name: ``options["shm_size"]``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvkit.cli.arguments import number_of_ranks, positive
from hvkit.launching.request import NUMBER_OF_RANKS
from hvkit.manifest import (
    azureml,
    fields,
    kubernetes_fields,
    mpijob,
    sagemaker,
    slurm_job,
    trainjob,
)
from hvkit.manifest.fields import HvkitRun


@dataclass(frozen=True)
class System:
    """A system for which ``hvkit manifest`` writes.

    Attributes:
        name: the subcommand.
        write: makes the text from the values of options, by name.
        host: the word for a host.
        noun: the word for what is written.
        help: in the list of subcommands.
        description: on the subcommand's own page.
        starts_hvkit_run: whether ``hvkit run`` takes part, so that its options have a reader.
    """

    name: str
    write: Callable[[Mapping[str, Any], HvkitRun], str]
    host: str
    noun: str
    help: str
    description: str
    starts_hvkit_run: bool = True


@dataclass(frozen=True)
class Option:
    """An option, in the systems that have it.

    Attributes:
        name: with a word for the value.
        of: the check of the text in each system, by the system's name; it returns the value, and
            raises ValueError for invalid text.
        help: ``{host}`` and ``{noun}`` are the system's words.
        default: as a user would write it.
        required: whether it must be given.
        repeated: whether it may be given several times.
        aliases: further names.
    """

    name: str
    of: Mapping[str, Callable[[str], Any]]
    help: str = ""
    default: str | None = None
    required: bool = False
    repeated: bool = False
    aliases: tuple[str, ...] = ()


MPIJOB = System(
    "mpijob",
    mpijob.manifest,
    host="worker",
    noun="manifest",
    help="an MPIJob for the Kubeflow MPI operator, in YAML",
    description="Write an MPIJob (kubeflow.org/v2beta1) that runs COMMAND on every rank, for "
    "`kubectl apply -f -`. The image must be built from hvkit's Dockerfile.",
)
TRAINJOB = System(
    "trainjob",
    trainjob.manifest,
    host="worker",
    noun="manifest",
    help="a TrainJob for the Kubeflow Trainer, with its runtime, in YAML",
    description="Write a TrainingRuntime and a TrainJob (trainer.kubeflow.org/v1alpha1, of the "
    "Kubeflow Trainer 2) that run COMMAND on every rank, for `kubectl apply -f -`. The image must "
    "be built from hvkit's Dockerfile.",
)
SLURM = System(
    "slurm",
    slurm_job.script,
    host="host",
    noun="script",
    help="a batch script for Slurm",
    description="Write a script for `sbatch` that runs COMMAND on every rank, in the folder "
    "from which it is submitted and with the Python environment of this hvkit.",
)
SAGEMAKER = System(
    "sagemaker",
    sagemaker.manifest,
    host="instance",
    noun="request",
    help="a request CreateTrainingJob of Amazon SageMaker, in JSON",
    description="Write a request that runs COMMAND on every rank, for `aws sagemaker "
    "create-training-job --cli-input-json file://FILE`. The image must be built from hvkit's "
    "Dockerfile and add the key that its hosts share (`RUN hvkit-ssh-key`); keep it private.",
)
AZUREML = System(
    "azureml",
    azureml.manifest,
    host="node",
    noun="job",
    help="a command job of Azure Machine Learning, in YAML",
    description="Write a job that runs COMMAND on every rank, for `az ml job create --file FILE`. "
    "Azure starts the ranks with the mpirun of the image, which must have hvkit, Open MPI and a "
    "Horovod that it has built.",
    starts_hvkit_run=False,
)
SYSTEMS = (MPIJOB, TRAINJOB, SLURM, SAGEMAKER, AZUREML)
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
        repeated=True,
    ),
    Option(
        "--pull-secret NAME",
        _in(_KUBERNETES, fields.subdomain),
        "the Secret with the password of the image's registry",
        repeated=True,
    ),
    Option(
        "--node-label KEY=VALUE",
        _in(_KUBERNETES, kubernetes_fields.node_label),
        "run the {host}s on nodes with this label only",
        repeated=True,
    ),
    Option(
        "--tolerate TAINT",
        _in(_KUBERNETES, kubernetes_fields.toleration),
        "allow nodes with this taint, KEY[=VALUE][:EFFECT], such as nvidia.com/gpu",
        repeated=True,
    ),
    Option(
        "--queue NAME",
        _in(_KUBERNETES, kubernetes_fields.queue),
        "the queue of Kueue in which the job waits for room",
    ),
    Option(
        "--input NAME=PLACE",
        {"sagemaker": fields.s3_input, "azureml": fields.azure_folder},
        "data for all ranks: an s3:// URI, which SageMaker copies to /opt/ml/input/data/NAME; or "
        "Azure's path of a folder, which replaces ${{{{inputs.NAME}}}} in COMMAND",
        repeated=True,
    ),
    Option("--output URI", {"sagemaker": fields.s3}, "the s3:// URI for results", required=True),
    Option(
        "--output NAME=PLACE",
        {"azureml": fields.azure_folder},
        "Azure's path of a folder for results, which replaces ${{{{outputs.NAME}}}} in COMMAND",
        repeated=True,
    ),
    Option("--role ARN", {"sagemaker": fields.role}, "the role of the job", required=True),
    Option(
        "--instance-type TYPE",
        {"sagemaker": fields.instance_type},
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
        {"sagemaker": fields.amazon_id},
        "run in this subnet of your network, with --security-group",
        repeated=True,
    ),
    Option(
        "--security-group ID",
        {"sagemaker": fields.amazon_id},
        "the rules for traffic there, which must let the {host}s reach each other",
        repeated=True,
    ),
    Option("--output-key KEY", {"sagemaker": fields.kms_key}, "encrypts the results: a KMS key"),
    Option(
        "--disk-key KEY",
        {"sagemaker": fields.kms_key},
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
        _in(_KUBERNETES, fields.count),
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
        repeated=True,
    ),
    Option(
        "--env NAME=VALUE",
        _in(_ALL, fields.assignment),
        "environment variable for all ranks, readable in the {noun}: no secrets",
        repeated=True,
    ),
    Option(
        "--secret-env NAME=SECRET:KEY",
        _in(_KUBERNETES, kubernetes_fields.secret_variable),
        "environment variable for all ranks, from this key of a Secret",
        repeated=True,
    ),
)
"""The options, in the order in which help shows them."""


def options_of(system: System) -> tuple[Option, ...]:
    """The options that a system has."""
    return tuple(option for option in OPTIONS if system.name in option.of)
