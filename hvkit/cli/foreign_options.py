"""Options of other launchers that people type, and what to write instead.

They are options of torchrun, accelerate, deepspeed, horovodrun, mpirun and srun.
"""

import re
from collections.abc import Mapping, Sequence

_RANKS = "-np N is the number of all ranks on all hosts"
_HOSTS = "name hosts with their ranks: -H host1:4,host2:4, or --hostfile FILE"
_ONCE = (
    "start `hvkit run` once, on one host: it starts the ranks on all hosts of -H or --hostfile, "
    "where they find each other"
)
_SCRIPT = "the script or its framework decides that"

_CORES = "leave it out: each rank gets an equal share of its host's cores"
_PORT = "set Port for the host in ~/.ssh/config"
_LOG_DIR = "write --log-dir DIR"
_MCA = (
    "set the environment variable OMPI_MCA_NAME=VALUE or, for what Open MPI 5 starts ranks with "
    "(plm, ras, rmaps, prte), PRTE_MCA_NAME=VALUE"
)
_TIME = "the time limit belongs in `hvkit manifest slurm --time`"
_PARTITION = "the partition belongs in `hvkit manifest slurm --partition`"

_OF_RANKS = (
    *("--nproc-per-node", "--num-processes", "--num-gpus", "--nproc", "--nprocs", "--ntasks"),
    "--world-size",
)
_OF_HOSTS = (
    *("--nnodes", "--num-machines", "--num-nodes", "--nodes", "--host", "-host", "--hosts"),
    *("-hosts", "--include", "-N", "-ppn", "--npernode", "--ntasks-per-node"),
    *("--gpus-per-node", "--slots-per-host", "--map-by", "-map-by"),
)

# By option of horovodrun: the variable that it sets, which Horovod reads.
_HOROVOD = {
    "--fusion-threshold-mb": "HOROVOD_FUSION_THRESHOLD (in bytes)",
    "--cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--hierarchical-allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE=1",
    "--hierarchical-allgather": "HOROVOD_HIERARCHICAL_ALLGATHER=1",
    "--torus-allreduce": "HOROVOD_TORUS_ALLREDUCE=1",
    "--autotune": "HOROVOD_AUTOTUNE=1",
    "--autotune-log-file": "HOROVOD_AUTOTUNE_LOG",
    "--autotune-warmup-samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "--autotune-steps-per-sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "--autotune-bayes-opt-max-samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "--autotune-gaussian-process-noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "--timeline-mark-cycles": "HOROVOD_TIMELINE_MARK_CYCLES=1",
    "--num-nccl-streams": "HOROVOD_NUM_NCCL_STREAMS",
    "--thread-affinity": "HOROVOD_THREAD_AFFINITY",
    "--gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "--mpi-threads-disable": "HOROVOD_MPI_THREADS_DISABLE=1",
    "--log-level": "HOROVOD_LOG_LEVEL",
    "--log-without-timestamp": "HOROVOD_LOG_HIDE_TIME=1",
}

# By advice: the options.
_OPTIONS = {
    _RANKS: _OF_RANKS,
    _HOSTS: _OF_HOSTS,
    "name the file with --hostfile": ("-hostfile", "--machinefile", "-machinefile"),
    _ONCE: (
        *("--node-rank", "--machine-rank", "--standalone", "--master-addr", "--master-port"),
        *("--main-process-ip", "--main-process-port", "--multi-gpu"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    ),
    "write `python -m MODULE` as COMMAND": ("-m", "--module"),
    "leave it out: COMMAND may be any program": ("--no-python",),
    "write --max-restarts": ("--max_restarts", "--reset-limit"),
    "write --min-np": ("--min-num-proc",),
    "write --min-np; new hosts are taken at a restart": (
        *("--max-np", "--max-num-proc", "--host-discovery-script"),
    ),
    "leave it out: hosts that do not answer are named before ranks start": (
        *("--start-timeout", "--elastic-timeout", "--blacklist-cooldown-range"),
    ),
    _SCRIPT: ("--mixed-precision", "--cpu", "--config-file"),
    _LOG_DIR: ("--output-filename", "--tee", "--redirects", "-r", "--log_dir"),
    f"for torchrun's --tee, {_LOG_DIR}; for srun's --time, {_TIME}": ("-t",),
    _TIME: ("--time",),
    _PARTITION: ("--partition",),
    "write --prefix": ("--tag-output", "-prepend-rank", "-l"),
    "write --timestamps": (
        *("--timestamp-output", "-prefix-timestamp", "--prefix-output-with-timestamp"),
    ),
    "write --timeline FILE": ("--timeline-filename",),
    "write --launcher gloo": ("--gloo",),
    "leave it out: ranks use MPI unless you write --launcher gloo": ("--mpi", "--jsrun"),
    "write --interfaces NAME": (
        *("--network-interface", "--network-interfaces", "-iface", "--nics"),
    ),
    _PORT: ("--ssh-port",),
    f"for horovodrun's --ssh-port, {_PORT}; for srun's --partition, {_PARTITION}": ("-p",),
    "set IdentityFile for the host in ~/.ssh/config": ("--ssh-identity-file", "-i"),
    "run `hvkit doctor`": ("--check-build", "-cb"),
    "leave it out: hosts are checked at every start": ("--disable-cache",),
    "write --bind cores or --bind none": ("--bind-to", "-bind-to", "--binding-args"),
    _CORES: ("--cpus-per-task",),
    f"for Python's, write `python -c CODE` as COMMAND; for srun's, {_CORES}": ("-c",),
    "print(os.sched_getaffinity(0)) in the script shows the cores of each rank": (
        "--report-bindings",
    ),
    "write --stall SECONDS": (
        *("--no-stall-check", "--stall-check-warning-time-seconds"),
        "--stall-check-shutdown-time-seconds",
    ),
    "leave it out: more ranks than cores may start": ("--oversubscribe", "-oversubscribe"),
    "leave it out: root may start ranks": ("--allow-run-as-root",),
    _MCA: ("--mca", "-mca", "--prtemca"),
    f"write the options of hvkit run that do the same; for --mca, {_MCA}": ("--mpi-args",),
    "write -x NAME=VALUE": ("-genv", "-env", "--env", "--export"),
    "`cd` there first": ("--wdir", "-wdir", "--chdir"),
}

_SLOTS = (
    "--slots N is the number of ranks on each host; with -np, the number of all ranks, it gives "
    "the number of hosts"
)


def _by_option(options: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The advice for each option, also if it is written with underscores."""
    found = {option: advice for advice, several in options.items() for option in several}
    return {re.sub(r"(?<=\w)-", "_", option): advice for option, advice in found.items()} | found


_VARIABLES = {
    f"set the environment variable {variable}, which ranks inherit": (option,)
    for option, variable in _HOROVOD.items()
}
FOREIGN = _by_option({**_OPTIONS, **_VARIABLES})
"""By option, what to write after ``hvkit run`` instead."""

FOREIGN_IN_MANIFESTS = _by_option({_RANKS: _OF_RANKS, _SLOTS: _OF_HOSTS})
"""By option, what to write after ``hvkit manifest SYSTEM`` instead."""
