"""Functions that all ranks of a recipe call together; and printing on rank 0."""

import os
import sys
from dataclasses import replace

import hvkit
from common import sources
from common.cifar10 import Cifar10
from common.flags import DRY_RUN_STEPS, CnnFlags, CommonFlags, Flags
from common.images import DataError, Dataset
from common.mnist import Mnist
from hvkit.mesh import position_in


def load_data(flags: Flags) -> Dataset:
    """The same images on every rank; one rank of each host downloads them if necessary.

    If a rank has no images, or other images than rank 0, all ranks end and rank 0 prints why.
    """
    source = Cifar10() if isinstance(flags, CnnFlags) else Mnist()
    data, problem = None, None
    first_on_host = hvkit.local_rank() == 0
    if first_on_host:
        data, problem = _try_to_load(source, flags, download=True)
    stop_if_any(problem)
    if not first_on_host:
        data, problem = _try_to_load(source, flags, download=False)
    stop_if_any(problem)
    assert data is not None
    digest = data.digest()
    digest_of_0, origin_of_0 = hvkit.broadcast((digest, data.origin))
    parts = parts_of_a_batch(flags)
    step = flags.batch_size * parts
    if digest != digest_of_0:
        problem = f"its images ({data.origin}) are not those of rank 0 ({origin_of_0})"
    elif len(data.train) < step:
        problem = (
            f"{len(data.train)} training images are too few for one step of {step}, "
            f"{flags.batch_size} on each of {parts} {_holders(flags)}: use a smaller --batch-size"
        )
    elif len(data.test) < parts:
        problem = f"{len(data.test)} test images are too few for {parts} {_holders(flags)}"
    stop_if_any(problem)
    return replace(data, train=data.train.first(DRY_RUN_STEPS * step)) if flags.dry_run else data


def parts_of_a_batch(flags: CommonFlags) -> int:
    """The number of batches in a step: one per rank, or per group of ranks that share a model."""
    return hvkit.size() if flags.mesh is None else position_in(flags.mesh).batches


def _holders(flags: CommonFlags) -> str:
    return "ranks" if flags.mesh is None else "parts of the mesh"


def _try_to_load(
    source: sources.Source, flags: Flags, download: bool
) -> tuple[Dataset | None, str | None]:
    """The images, or the problem."""
    try:
        return sources.load(source, flags.dataset, flags.data_dir, download=download, say=say), None
    except (DataError, OSError) as error:
        return None, str(error)


def say(line: str) -> None:
    """Print, on rank 0 only."""
    if hvkit.rank() == 0:
        print(line, flush=True)


def stop_if_any(problem: str | None) -> None:
    """End every rank if any has a problem; rank 0 prints it. Every rank must call this."""
    problems = hvkit.allgather(problem)
    if not any(problems):
        return
    if hvkit.rank() == 0:
        for text in dict.fromkeys(filter(None, problems)):
            ranks = [str(rank) for rank, found in enumerate(problems) if found == text]
            where = "" if len(ranks) == hvkit.size() else f" on rank {', '.join(ranks)}"
            print(f"error{where}: {text}", file=sys.stderr, flush=True)
    # If another rank ended first, a launcher could end rank 0 before it prints.
    hvkit.barrier()
    sys.exit(1)


def on_terminal() -> bool:
    """Whether standard output goes to a terminal.

    Open MPI gives its ranks a pseudo-terminal even if mpirun's own output goes to a file or a
    pipe. So on several ranks this looks at the output of mpirun, the parent of this process.
    """
    if not sys.stdout.isatty() or hvkit.size() == 1:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def mean_over_ranks(loss_sum: float, correct: int, images: int) -> tuple[float, float]:
    """Mean loss and accuracy on all test images, from this rank's sums over its part of them."""
    means = {"loss": loss_sum / images, "accuracy": correct / images} if images else {}
    means = hvkit.average(means, weight=images)
    return means["loss"], means["accuracy"]
