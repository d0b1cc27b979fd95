"""Options of other launchers that people type after ``hvkit run``, and what to write instead."""

_RANKS = "-np N is the number of all ranks on all hosts"
_HOSTS = "name hosts with their ranks: -H host1:4,host2:4, or --hostfile FILE"
_ONCE = (
    "start `hvkit run` once, on one host: it starts the ranks on all hosts of -H or --hostfile, "
    "where they find each other"
)
_SCRIPT = "the script or its framework decides that"

# By advice: the options of torchrun, accelerate, deepspeed, horovodrun, mpirun and srun.
_OPTIONS = {
    _RANKS: (
        *("--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes"),
        *("--num-gpus", "--num_gpus", "--nproc", "--nprocs", "--ntasks", "--world-size"),
    ),
    _HOSTS: (
        *("--nnodes", "--num-machines", "--num_machines", "--num-nodes", "--num_nodes", "--nodes"),
        *("--host", "-host", "--hosts", "-hosts", "--include", "-N", "-ppn", "--npernode"),
        *("--ntasks-per-node", "--map-by", "-map-by"),
    ),
    "name the file with --hostfile": ("-hostfile", "--machinefile", "-machinefile"),
    _ONCE: (
        *("--node-rank", "--node_rank", "--machine-rank", "--machine_rank", "--standalone"),
        *("--master-addr", "--master_addr", "--master-port", "--master_port"),
        *("--main-process-ip", "--main_process_ip", "--main-process-port", "--main_process_port"),
        *("--rdzv-backend", "--rdzv_backend", "--rdzv-endpoint", "--rdzv_endpoint"),
        *("--rdzv-id", "--rdzv_id", "--multi-gpu", "--multi_gpu"),
    ),
    "write `python -m MODULE` as COMMAND": ("-m", "--module"),
    "leave it out: COMMAND may be any program": ("--no-python", "--no_python"),
    "write --max-restarts": ("--max_restarts", "--reset-limit"),
    "write --min-np; new hosts are taken at a restart": (*("--max-np", "--host-discovery-script"),),
    _SCRIPT: ("--mixed-precision", "--mixed_precision", "--cpu", "--config-file", "--config_file"),
    "write --log-dir DIR": ("--output-filename", "--tee", "-t", "--redirects", "-r", "--log_dir"),
    "write --prefix": ("--tag-output", "-prepend-rank", "-l"),
    "write --timeline FILE": ("--timeline-filename",),
    "write --launcher gloo": ("--gloo",),
    "leave it out: ranks use MPI unless you write --launcher gloo": ("--mpi",),
    "write --interfaces NAME": (
        *("--network-interface", "--network-interfaces", "-iface", "--nics"),
    ),
    "set Port for the host in ~/.ssh/config": ("--ssh-port",),
    "write --bind cores or --bind none": ("--bind-to", "-bind-to"),
    "leave it out: more ranks than cores may start": ("--oversubscribe", "-oversubscribe"),
    "leave it out: root may start ranks": ("--allow-run-as-root",),
    "set the environment variable OMPI_MCA_NAME=VALUE": ("--mca", "-mca"),
    "write -x NAME=VALUE": ("-genv", "-env", "--env", "--export"),
    "`cd` there first": ("--wdir", "-wdir", "--chdir"),
}

FOREIGN = {option: advice for advice, options in _OPTIONS.items() for option in options}
"""By option, what to write instead."""
