"""What ranks do together in a recipe: speak with one voice, and end together."""

import os
import sys

import hvkit


def say(line: str) -> None:
    """Print, on rank 0 only."""
    if hvkit.rank() == 0:
        print(line, flush=True)


def stop_if_any(problem: str | None) -> None:
    """End every rank, rank 0 saying why, if any rank has a problem. Every rank must call it."""
    problems = hvkit.allgather(problem)
    if not any(problems):
        return
    if hvkit.rank() == 0:
        for text in dict.fromkeys(filter(None, problems)):
            ranks = [str(rank) for rank, theirs in enumerate(problems) if theirs == text]
            where = "" if len(ranks) == hvkit.size() else f" on rank {', '.join(ranks)}"
            print(f"error{where}: {text}", file=sys.stderr, flush=True)
    hvkit.barrier()  # a launcher ends rank 0, unheard, when it sees another rank fail first
    sys.exit(1)


def on_terminal() -> bool:
    """Whether standard output is a terminal that someone watches.

    Open MPI gives its ranks a pseudo-terminal also where mpirun's own output goes to a file or a
    pipe; what counts then is the output of mpirun, the parent of this process.
    """
    if not sys.stdout.isatty() or hvkit.size() == 1:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def mean_over_ranks(loss_sum: float, correct: int, images: int) -> tuple[float, float]:
    """Mean loss and accuracy on all test images, from the sums over each rank's part of them."""
    means = {"loss": loss_sum / images, "accuracy": correct / images} if images else {}
    means = hvkit.average(means, weight=images)
    return means["loss"], means["accuracy"]
