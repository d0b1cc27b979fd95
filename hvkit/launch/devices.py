"""Which GPU and how many CPU threads one rank of a host takes: plain arithmetic."""

import math

from hvkit.errors import LaunchError


def gpu_of_rank(local_rank: int, local_size: int, visible_gpus: int) -> int | None:
    """Index of the GPU for this rank, or None on a host without GPUs.

    A launcher that shows each rank a single GPU (``CUDA_VISIBLE_DEVICES``, Slurm's
    ``--gpus-per-task``) has already chosen: that one is taken.

    Raises:
        LaunchError: the host has several GPUs, but fewer than ranks.
    """
    if visible_gpus == 0:
        return None
    if visible_gpus == 1:
        return 0
    if local_size > visible_gpus:
        raise LaunchError(
            f"{local_size} ranks on a host with {visible_gpus} GPUs: start at most {visible_gpus} "
            "ranks there (slots in the hostfile), or hide the GPUs: CUDA_VISIBLE_DEVICES= "
            "(`hvkit run -x CUDA_VISIBLE_DEVICES=`)"
        )
    return local_rank


def threads_of_rank(local_size: int, usable_cpus: int, host_cpus: int, limit: float | None) -> int:
    """CPU threads for one of ``local_size`` ranks on a host, at least 1.

    Args:
        local_size: the number of ranks on this host.
        usable_cpus: the size of this process's affinity mask. If it is smaller than the host, the
            launcher has bound the rank to its share already and all of it is used.
        host_cpus: the number of the host's CPUs.
        limit: time of so many CPUs that the ranks of this host have together, as containers are
            given it, for instance 1.5; ``None`` for all of it.
    """
    share = usable_cpus if usable_cpus < host_cpus else max(1, usable_cpus // local_size)
    return share if limit is None else min(share, max(1, math.ceil(limit / local_size)))
